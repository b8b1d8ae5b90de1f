"""Encoders and the cache of their features, with tiny models that are made on the spot."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from encoders_for_tests import make_texts, save_image_encoder, save_photos, save_text_encoder

from logitclip import data, encoders
from logitclip.data._images import ImageFiles
from logitclip.data._texts import TextInputs
from logitclip.encoders import blocks, features
from logitclip.encoders.features import Features
from logitclip.runs import config as config_module
from logitclip.runs import listing
from logitclip.runs.config import RunConfig
from logitclip.runs.encoding import compute_features, encode_dataset
from logitclip.runs.train import prepare, train

_PATHS = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGITCLIP_FEATURES", str(tmp_path / "features"))
    monkeypatch.setattr(features, "BLOCK_ROWS", 16)


@pytest.fixture
def reviews(tmp_path):
    """A table of 40 short texts with a number and a category beside them."""
    texts, labels = make_texts(40)
    lines = [
        f"{text},{'film' if y == 0 else 'other'},{i % 7},{'ab'[i % 2]}"
        for i, (text, y) in enumerate(zip(texts, labels, strict=True))
    ]
    path = tmp_path / "reviews.csv"
    path.write_text("\n".join(["text,kind,stars,shop", *lines]), encoding="utf-8")
    return path


# -- families ----------------------------------------------------------------------------------------------------------


def test_hf_texts_are_the_mean_of_the_tokens(bert):
    from transformers import AutoModel, AutoTokenizer

    encode = encoders.build(f"hf:{bert}", "texts")
    texts = ["good film", "", "fish one two three"]
    found = encode([encode.prepare(text) for text in texts])
    model, tokenizer = AutoModel.from_pretrained(bert), AutoTokenizer.from_pretrained(bert)
    for text, row in zip(texts, found, strict=True):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        torch.testing.assert_close(row, hidden.mean(0), rtol=1e-4, atol=1e-5)
    assert encode.width == 16


@pytest.mark.parametrize("pooling", ["cls", "pooler"])
def test_hf_pooling(bert, pooling):
    from transformers import AutoModel, AutoTokenizer

    encode = encoders.build(f"hf:{bert},pooling={pooling}", "texts")
    with torch.no_grad():
        output = AutoModel.from_pretrained(bert)(**AutoTokenizer.from_pretrained(bert)("red fish", return_tensors="pt"))
    wanted = output.last_hidden_state[:, 0] if pooling == "cls" else output.pooler_output
    torch.testing.assert_close(encode(["red fish"]), wanted, rtol=1e-4, atol=1e-5)


def test_hf_prompt_and_length(bert):
    plain, asked = (encoders.build(f"hf:{bert}{knobs}", "texts") for knobs in ("", ",prompt=good"))
    assert torch.equal(asked([asked.prepare("film")]), plain([plain.prepare("good film")]))
    long = plain([plain.prepare("fish " * 500)])  # the model has 32 positions
    assert long.isfinite().all()


def test_hf_images_pass_the_processor_of_the_model(vit):
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModel

    encode = encoders.build(f"hf:{vit}", "images")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 20, 3), dtype=np.uint8))
    inputs = AutoImageProcessor.from_pretrained(vit)(images=[image], return_tensors="pt")
    with torch.no_grad():
        wanted = AutoModel.from_pretrained(vit)(**inputs).pooler_output
    torch.testing.assert_close(encode([encode.prepare(image)]), wanted, rtol=1e-4, atol=1e-5)


def test_a_pooler_that_the_weights_lack_is_not_used(vit, tmp_path):
    from safetensors.torch import load_file, save_file

    other = tmp_path / "no_pooler"
    save_image_encoder(other)
    weights = {key: value for key, value in load_file(other / "model.safetensors").items() if "pooler" not in key}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    default, first = (encoders.build(f"hf:{other}{knobs}", "images") for knobs in ("", ",pooling=cls"))
    image = torch.zeros(3, 16, 16)
    assert torch.equal(default([image]), first([image]))
    with pytest.raises(ValueError, match="have no pooler: choose pooling=mean or pooling=cls"):
        encoders.build(f"hf:{other},pooling=pooler", "images")


def test_sentence_transformers_gives_what_its_package_gives(bert, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    word = Transformer(str(bert))
    model = SentenceTransformer(modules=[word, Pooling(16, pooling_mode="mean"), Normalize()], device="cpu")
    model.save(str(tmp_path / "sbert"))
    encode = encoders.build(f"sentence_transformers:{tmp_path / 'sbert'}", "texts")
    found = encode([encode.prepare("blue sun"), encode.prepare("dog")])
    np.testing.assert_allclose(found.numpy(), model.encode(["blue sun", "dog"]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.norm(dim=1).numpy(), 1, rtol=1e-5)  # its last module
    with pytest.raises(ValueError, match="takes texts, not images"):
        encoders.build(f"sentence_transformers:{tmp_path / 'sbert'}", "images")


@pytest.mark.slow
def test_timm_gives_pooled_features(tmp_path):
    """In a process of its own: timm imports torchvision, which needs two operators that a CPU build of torch lacks."""
    code = f"""
import torch
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import json, pathlib
import numpy as np
import timm
from PIL import Image
from safetensors.torch import save_file
from logitclip import encoders
folder = pathlib.Path({str(tmp_path)!r})
torch.manual_seed(0)
model = timm.create_model("test_resnet", num_classes=5).eval()
save_file(model.state_dict(), folder / "model.safetensors")
config = dict(model.pretrained_cfg, num_classes=5)
keep = ("input_size", "mean", "std", "crop_pct", "interpolation", "num_classes", "first_conv", "classifier")
own = {{key: config[key] for key in keep if key in config}}
about = dict(architecture="test_resnet", num_classes=5, pretrained_cfg=own)
(folder / "config.json").write_text(json.dumps(about))
encode = encoders.build(f"timm:{{folder}}", "images")
image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 250, 3), dtype=np.uint8))
from timm.data import create_transform, resolve_model_data_config
wanted = create_transform(**resolve_model_data_config(model), is_training=False)(image)
prepared = encode.prepare(image)
assert prepared.shape == wanted.shape, (prepared.shape, wanted.shape)
print(float((prepared - wanted).abs().max()))
with torch.no_grad():
    pooled = model.forward_head(model.forward_features(prepared[None]), pre_logits=True)
torch.testing.assert_close(encode([prepared]), pooled)
print("width", encode.width)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    if "No module named 'timm'" in done.stderr or "No module named 'torchvision'" in done.stderr:
        pytest.skip("timm and torchvision are not installed")
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.split()[0]) < 0.05
    assert "width" in done.stdout


def test_unsafe_or_missing_weights_are_refused_in_one_sentence(bert, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no \.safetensors file"):
        encoders.build(f"hf:{tmp_path / 'empty'}", "texts")
    pickled = save_text_encoder(tmp_path / "pickled")
    (pickled / "2_Dense").mkdir()
    (pickled / "2_Dense" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"may run code, and there is no \.safetensors file beside it"):
        encoders.build(f"hf:{pickled}", "texts")
    with pytest.raises(ValueError, match="There is no folder /nowhere"):
        encoders.build("hf:/nowhere", "texts")
    with pytest.raises(ValueError, match="cache of the hub has no such name: add --download to fetch it"):
        encoders.build("hf:nobody/nothing", "texts")
    with pytest.raises(ValueError, match="does not take images: it has no image processor here"):
        encoders.build(f"hf:{bert}", "images")


def test_remote_code_is_never_run(bert, tmp_path):
    remote = save_text_encoder(tmp_path / "remote")
    config = json.loads((remote / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "strange", "auto_map": {"AutoModel": "code.Strange", "AutoConfig": "code.StrangeConfig"}}
    (remote / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (remote / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    with pytest.raises(ValueError):
        encoders.build(f"hf:{remote}", "texts")
    assert not (tmp_path / "ran").exists()


def test_a_name_in_the_hub_cache_is_found_without_the_network(bert, tmp_path, monkeypatch):
    import huggingface_hub

    snapshot = tmp_path / "models--me--tiny" / "snapshots" / "abc"
    save_text_encoder(snapshot)
    (tmp_path / "models--me--tiny" / "refs").mkdir()
    (tmp_path / "models--me--tiny" / "refs" / "main").write_text("abc", encoding="utf-8")
    asked = []
    original = huggingface_hub.snapshot_download

    def ask(name, **options):
        asked.append(options["local_files_only"])
        return original(name, cache_dir=tmp_path, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", ask)
    assert encoders.identify("hf:me/tiny") == encoders.identify(f"hf:{bert}")  # the same weights elsewhere
    assert asked == [True]


@pytest.mark.parametrize("name", ["tune", "sweep"])
def test_download_fetches_the_encoder(name, command, bert, reviews, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def ask(wanted, **options):
        asked.append((wanted, options["local_files_only"]))
        if ("me/tiny", False) not in asked:
            raise FileNotFoundError(wanted)
        return str(bert)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", ask)
    spec = f"table:path={reviews},label=kind,text=text"
    if name == "tune":
        options = ["--data", spec, "--encoder", "hf:me/tiny", "--epochs", "1", "--option", "lr", "--values", "0.1"]
    else:
        recipe = tmp_path / "few.toml"
        lines = [
            "[base]",
            f"data = {json.dumps(spec)}",
            'encoder = "hf:me/tiny"',
            "epochs = 1",
            "[grid]",
            "seed = [0]",
            "[scale.smoke]",
        ]
        recipe.write_text("\n".join(lines), encoding="utf-8")
        options = [str(recipe), "--scale", "smoke"]
    place = ("--runs", tmp_path / "runs", "--executor", "inline", "-q")
    code, _, err = command(name, *options, *place, "--download")
    assert code == 0, err
    assert ("me/tiny", False) in asked
    assert len(list((tmp_path / "runs").glob("*/result.json"))) >= 1


# -- the cache ---------------------------------------------------------------------------------------------------------


def _compute(spec, takes="texts"):
    return lambda some: blocks.in_this_process(lambda: encoders.build(spec, takes), some)


def _bytes(kept):
    return {path.name: path.read_bytes() for path in sorted(kept.folder.glob("*.npy"))}


def test_features_are_blocks_of_float16_with_their_digest(bert):
    texts = TextInputs(make_texts(40)[0])
    kept = Features.of(texts, f"hf:{bert}")
    assert kept.missing_blocks() == [0, 1, 2]
    seen = []
    kept.complete(texts, _compute(f"hf:{bert}"), lambda done, rows: seen.append((done, rows)))
    assert seen == [(0, 40), (16, 40), (32, 40), (40, 40)]
    for name, content in _bytes(kept).items():
        assert name[7:-4] == hashlib.sha256(content).hexdigest()
    x = kept.read()
    assert (x.dtype, x.shape) == (np.float16, (40, 16))
    encode = encoders.build(f"hf:{bert}", "texts")
    for i in (0, 17, 39):  # batches by length change nothing but the last bits
        np.testing.assert_allclose(x[i], encode([texts.values[i]])[0].numpy(), rtol=1e-2, atol=1e-3)


def test_only_missing_blocks_are_computed_and_they_are_the_same_bytes(bert):
    texts = TextInputs(make_texts(40)[0])
    kept = Features.of(texts, f"hf:{bert}")
    kept.complete(texts, _compute(f"hf:{bert}"))
    before = _bytes(kept)
    next(kept.folder.glob("000001-*")).unlink()
    (kept.folder / ".scratch-1-000001.npy").write_bytes(b"half")  # of a process that was killed
    numbers = []

    def compute(some):
        for number, found in _compute(f"hf:{bert}")(some):
            numbers.append(number)
            yield number, found

    kept.complete(texts, compute)
    assert (numbers, _bytes(kept)) == ([1], before)
    assert not list(kept.folder.glob(".scratch-*"))


def test_a_damaged_block_is_found_and_computed_again(bert):
    texts = TextInputs(make_texts(20)[0])
    kept = Features.of(texts, f"hf:{bert}")
    kept.complete(texts, _compute(f"hf:{bert}"))
    before = _bytes(kept)
    path = next(kept.folder.glob("000001-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x00\x01")
    with pytest.raises(ValueError, match="was damaged and has been removed: start again"):
        kept.read()
    kept.complete(texts, _compute(f"hf:{bert}"))
    assert _bytes(kept) == before


def test_the_key_depends_on_weights_options_and_inputs_but_not_on_the_place(bert, tmp_path):
    import shutil

    texts, other = TextInputs(["red fish", "dog"]), save_text_encoder(tmp_path / "other", seed=1)
    key = Features.of(texts, f"hf:{bert}").key
    assert Features.of(texts, f"hf:name={shutil.copytree(bert, tmp_path / 'copy')}").key == key
    different = [
        Features.of(texts, f"hf:{other}").key,
        Features.of(texts, f"hf:{bert},pooling=cls").key,
        Features.of(TextInputs(["red fishd", "og"]), f"hf:{bert}").key,
        Features.of(texts.select(torch.tensor([1, 0])), f"hf:{bert}").key,
    ]
    assert len({key, *different}) == 5


def test_image_files_count_by_name_size_and_time(vit, tmp_path):
    folder = save_photos(tmp_path / "photos", 3)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png"))
    keys = [Features.of(ImageFiles(folder, names), f"hf:{vit}").key]
    moved = folder.rename(tmp_path / "elsewhere")
    assert Features.of(ImageFiles(moved, names), f"hf:{vit}").key == keys[0]
    os.utime(moved / names[0], ns=(1, 1))
    assert Features.of(ImageFiles(moved, names), f"hf:{vit}").key != keys[0]


class _Products:
    """An encoder that another process can make quickly: products of random matrices."""

    width, size = 8, 0

    def __init__(self):
        self.weight = torch.randn(26, self.width, generator=torch.Generator().manual_seed(0))

    def prepare(self, example):
        return torch.tensor([example.count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"], dtype=torch.float32)

    def __call__(self, batch):
        return torch.stack(batch) @ self.weight


def test_several_processes_give_the_same_bytes(bert, tmp_path, monkeypatch):
    texts = TextInputs(make_texts(70)[0])
    one = Features.of(texts, f"hf:{bert}")
    one.complete(texts, lambda some: blocks.in_this_process(_Products, some))
    wanted = _bytes(one)
    monkeypatch.setenv("LOGITCLIP_FEATURES", str(tmp_path / "again"))
    two = Features.of(texts, f"hf:{bert}")
    two.complete(texts, lambda some: blocks.in_processes(_Products, some, jobs=2))
    assert _bytes(two) == wanted


class _Once(_Products):
    """An encoder whose process dies at its first block, unless a file says that one has died."""

    def __init__(self, marker):
        super().__init__()
        self.marker = marker

    def __call__(self, batch):
        if not self.marker.exists():
            self.marker.touch()
            os._exit(1)
        return super().__call__(batch)


@pytest.mark.slow
def test_ray_gives_the_same_bytes_also_when_a_worker_dies(bert, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    texts = TextInputs(make_texts(70)[0])
    one = Features.of(texts, f"hf:{bert}")
    one.complete(texts, lambda some: blocks.in_this_process(_Products, some))
    wanted = _bytes(one)
    ray.init(
        address="local", num_cpus=2, log_to_driver=False, include_dashboard=False, runtime_env={"env_vars": _PATHS}
    )
    try:
        for name, load in (("plain", _Products), ("dies", partial(_Once, tmp_path / "died"))):
            monkeypatch.setenv("LOGITCLIP_FEATURES", str(tmp_path / name))
            two = Features.of(texts, f"hf:{bert}")
            two.complete(texts, lambda some, load=load: blocks.on_ray(load, some, jobs=2))
            assert _bytes(two) == wanted, name
    finally:
        ray.shutdown()
    assert (tmp_path / "died").exists()


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("LOGITCLIP_FEATURES", str(tmp_path / "mine"))
    assert features.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("LOGITCLIP_FEATURES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert features.cache_folder() == tmp_path / "cache" / "logitclip" / "features"


# -- runs --------------------------------------------------------------------------------------------------------------


def _run(path, bert, tmp_path, **options):
    spec = f"table:path={path},label=kind,text=text"
    return RunConfig(data=spec, encoder=f"hf:{bert}", epochs=2, runs=str(tmp_path / "runs"), **options)


def test_a_run_trains_on_features(reviews, bert, tmp_path):
    config = _run(reviews, bert, tmp_path)
    rows = []
    result = train(config, on_rows=lambda done, total: rows.append((done, total)))
    assert rows == [(0, 40), (16, 40), (32, 40), (40, 40)]
    dataset, _ = prepare(config.resolve())
    assert isinstance(dataset.train.x, torch.Tensor)
    assert dataset.train.x.shape[1] == 16 + 1 + 2  # tokens, stars, and a shop each for a and b
    seen = (dataset.train.x[:, :16] - torch.tensor(dataset.mean[:16])) / torch.tensor(dataset.std[:16])
    torch.testing.assert_close(seen.mean(0), torch.zeros(16), rtol=0, atol=1e-4)
    torch.testing.assert_close(seen.std(0, correction=0), torch.ones(16), rtol=0, atol=1e-3)
    assert dataset.mean[16:] == (0.0,) * 3  # the preprocessor has standardised them
    again = train(replace(config, runs=str(tmp_path / "again")), on_rows=lambda *_: pytest.fail("computed twice"))
    assert again.last10_accuracy == result.last10_accuracy


def test_folds_share_their_features(reviews, bert, tmp_path):
    for fold in range(5):
        config = _run(reviews, bert, tmp_path).resolve()
        dataset = data.load(f"{config.data},fold={fold}", raw=True)
        compute_features(config, dataset, on_rows=None if fold == 0 else lambda *_: pytest.fail("computed twice"))
        x = encode_dataset(config, dataset)
        texts = dataset.train.x[torch.tensor([3])]
        alone = encoders.build(config.encoder, "texts")(texts)
        np.testing.assert_allclose(x.train.x[3, :16], alone[0], rtol=1e-2, atol=1e-3)


def test_several_texts_are_joined(tmp_path):
    path = tmp_path / "two.csv"
    path.write_text(
        "title,body,kind\n" + "\n".join(f"t{i},b{i},{'xy'[i % 2]}" for i in range(11)) + "\n,b11,x", encoding="utf-8"
    )
    raw = data.load(f"table:path={path},label=kind,text=title,body,test=0.25", raw=True)
    assert isinstance(raw.train.x, TextInputs)
    assert isinstance(raw.test.x, TextInputs)
    joined = {*raw.train.x.values, *raw.test.x.values}
    assert joined == {f"t{i}\nb{i}" for i in range(11)} | {"b11"}
    assert raw.train.beside is None


def test_the_id_holds_the_encoder_without_its_place(reviews, bert, tmp_path):
    import shutil

    config = _run(reviews, bert, tmp_path)
    plain = replace(config, encoder="none")
    copied = replace(config, encoder=f"hf:{shutil.copytree(bert, tmp_path / 'copy')}")
    assert config.id == copied.id != plain.id
    assert config.id != replace(config, encoder=f"hf:{bert},pooling=cls").id
    weights = tmp_path / "copy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert copied.id != config.id
    copied = replace(config, encoder=f"hf:{shutil.copytree(bert, tmp_path / 'copy2')}")
    (tmp_path / "copy2" / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert copied.id != config.id


def test_changed_photos_are_another_run(tmp_path, monkeypatch):
    monkeypatch.setattr(config_module, "LISTED", 0.0)  # list the files each time
    folder = save_photos(tmp_path / "photos", 12)
    config = RunConfig(data=f"folder:path={folder},size=16", epochs=1)
    before = config.id
    assert config.id == before
    photo = next(folder.rglob("*.png"))
    os.utime(photo, ns=(5, 5))
    changed = config.id
    assert changed != before
    photo.unlink()
    assert config.id not in (before, changed)


def test_changed_photos_of_a_table_are_another_run(tmp_path, monkeypatch):
    monkeypatch.setattr(config_module, "LISTED", 0.0)
    save_photos(tmp_path, 12)
    photos = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png"))
    table = tmp_path / "list.csv"
    table.write_text("file,kind\n" + "\n".join(f"{photo},{photo[:3]}" for photo in photos), encoding="utf-8")
    config = RunConfig(data=f"table:path={table},label=kind,image=file,size=16", epochs=1)
    before = config.id
    os.utime(tmp_path / photos[0], ns=(5, 5))
    assert config.id != before


def test_noise_is_drawn_on_the_original_inputs(bert, vit, reviews, tmp_path):
    spec = "instance:rate=0.3"
    config = _run(reviews, bert, tmp_path, noise=spec)
    with_features, without = (prepare(c.resolve()) for c in (config, replace(config, encoder="none")))
    assert torch.equal(with_features[1].labels, without[1].labels)
    seen, given = with_features[0].train.x, without[0].train.x
    assert isinstance(seen, torch.Tensor)
    assert isinstance(given, torch.Tensor)
    assert seen.shape != given.shape
    for noise in (spec, "symmetric:rate=0.3"):
        images = RunConfig(data="digits", noise=noise, limit=50, test_limit=20, encoder=f"hf:{vit}").resolve()
        plain = replace(images, encoder="none", model=None, epochs=None, lr=None, augment=None).resolve()
        assert torch.equal(prepare(images)[0].train.labels, prepare(plain)[0].train.labels)


def test_a_limit_takes_its_part_of_the_features(vit, tmp_path):
    config = RunConfig(data="digits", encoder=f"hf:{vit}").resolve()
    whole, part = (prepare(c)[0].train.x for c in (config, replace(config, limit=30, test_limit=10)))
    assert isinstance(whole, torch.Tensor)
    assert isinstance(part, torch.Tensor)
    assert part.shape == (30, 16)
    rows = {tuple(row.tolist()) for row in whole}
    assert all(tuple(row.tolist()) in rows for row in part)


def test_a_limit_encodes_only_its_part(vit, tmp_path):
    config = RunConfig(data="digits", encoder=f"hf:{vit}", limit=30, test_limit=10, epochs=1, runs=str(tmp_path))
    rows = []
    train(config, on_rows=lambda done, total: rows.append((done, total)))
    assert rows == [(0, 40), (16, 40), (30, 40), (30, 40), (40, 40)]  # two parts of 30 and 10
    assert sum(len(np.load(path)) for path in (tmp_path / "features").rglob("*.npy")) == 40


def test_a_limit_where_images_cannot_be_read(vit, tmp_path):
    folder = save_photos(tmp_path / "photos", 20)
    sorted(folder.rglob("*.png"))[3].write_bytes(b"no image")
    config = RunConfig(data=f"folder:path={folder}", encoder=f"hf:{vit}", noise="instance:rate=0.3", limit=8)
    dataset, record = prepare(config.resolve())  # the noise is drawn on the images that can be read
    assert len(dataset.train.x) == len(record.labels) == 8
    assert dataset.train.rows is not None
    raw = data.load(f"folder:path={folder}", raw=True).train
    assert raw.rows is not None
    inputs = raw.select(torch.stack([(raw.rows == row).nonzero().flatten()[0] for row in dataset.train.rows]))
    assert isinstance(inputs.x, ImageFiles)
    alone = blocks.encode_block(encoders.build(f"hf:{vit}", "images"), inputs.x)
    assert isinstance(dataset.train.x, torch.Tensor)
    np.testing.assert_allclose(dataset.train.x.numpy(), alone, rtol=1e-2, atol=1e-3)


def test_an_image_that_cannot_be_read_is_left_out(vit, tmp_path):
    folder = save_photos(tmp_path / "photos", 20)
    damaged = sorted(folder.rglob("*.png"))[3]
    damaged.write_bytes(b"no image")
    config = RunConfig(data=f"folder:path={folder}", encoder=f"hf:{vit}").resolve()
    dataset, record = prepare(config)
    assert len(dataset.train) + len(dataset.test) == 19
    assert len(record.labels) == len(dataset.train)
    assert isinstance(dataset.train.x, torch.Tensor)
    assert dataset.train.x.isfinite().all()


def test_defaults_are_those_of_the_head_and_augmentation_is_refused(vit):
    config = RunConfig(data="cifar10", encoder=f"hf:{vit}").resolve()
    for name, value in encoders.HEAD.items():
        assert getattr(config, name) == value
    with pytest.raises(ValueError, match="without augmentation: leave out 'flip_crop'"):
        RunConfig(data="cifar10", encoder=f"hf:{vit}", augment="flip_crop").resolve()


def test_features_are_no_inputs_of_an_encoder(vit, tmp_path):
    path = tmp_path / "numbers.csv"
    path.write_text("a,b,kind\n" + "\n".join(f"{i % 5},{i % 3},{'xy'[i % 2]}" for i in range(20)), encoding="utf-8")
    config = RunConfig(data=f"table:path={path},label=kind", encoder=f"hf:{vit}").resolve()
    with pytest.raises(ValueError, match="takes images or texts, not features of shape"):
        prepare(config)


def test_auto_is_for_images_or_for_texts(reviews, monkeypatch):
    table = RunConfig(data=f"table:path={reviews},label=kind,text=text", encoder="auto").resolve()
    assert table.encoder == encoders.ENCODERS.canonical(encoders.AUTO_ENCODERS["texts"])
    assert RunConfig(data="digits", encoder="auto").resolve().encoder == encoders.AUTO_ENCODERS["images"]


def test_gc_removes_the_features_that_no_run_names(reviews, bert, tmp_path):
    config = _run(reviews, bert, tmp_path)
    train(config)
    kept = list(features.cache_folder().iterdir())
    assert len(kept) == 1
    listing.collect_garbage(Path(config.runs))
    assert list(features.cache_folder().iterdir()) == kept  # a run names them
    listing.remove(listing.read_run(Path(config.runs) / config.id))
    assert [Path(name) for name in listing.collect_garbage(Path(config.runs), dry=True)] == kept
    assert kept[0].exists()
    listing.collect_garbage(Path(config.runs))
    assert not kept[0].exists()


def test_gc_leaves_other_folders_and_fresh_features(bert, tmp_path):
    Features.of(TextInputs(["a", "b"]), f"hf:{bert}")
    (features.cache_folder() / ("0" * 32)).mkdir()
    assert features.remove_unused() == {}
