"""CIFAR from tiny files in the official formats, written by the tests."""

import hashlib
import io
import pickle
import struct
import tarfile
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tensors import as_tensor

from logitclip.data import cifar, defaults_of, load
from logitclip.data._download import Remote
from logitclip.data.cifar import CIFAR10, CIFAR100, cifar10, cifar100

COUNT, TEST_COUNT = 50, 20  # five batches of ten, and a test batch


def records(n, seed, kinds):
    """Make labels of every kind, [n, kinds] uint8, and pixels, [n, 3072] uint8; every class has an example."""
    rng = np.random.default_rng(seed)
    labels = np.stack([np.arange(n) % k for k in kinds], 1).astype(np.uint8)
    return labels, rng.integers(0, 256, (n, 3072), dtype=np.uint8)


PurePythonPickler: Any = pickle._Pickler


class Python2Pickler(PurePythonPickler):
    """Pickles text and bytes like Python 2, which wrote the official files."""

    dispatch = dict(PurePythonPickler.dispatch)  # noqa: RUF012

    def save_str(self, obj):
        raw = obj.encode("latin1") if isinstance(obj, str) else obj
        head = bytes([len(raw)]) if len(raw) < 256 else struct.pack("<i", len(raw))
        self.write((pickle.SHORT_BINSTRING if len(raw) < 256 else pickle.BINSTRING) + head + raw)
        self.memoize(obj)

    dispatch[str] = dispatch[bytes] = save_str


def python2_pickle(content):
    out = io.BytesIO()
    Python2Pickler(out, 2).dump(content)
    return out.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def write(root, release):
    """Write both layouts of a release to `root`; return the release with the counts and checksums of these files."""
    kinds, layouts = [len(classes) for classes in release.classes.values()], []
    for layout in release.layouts:
        folder = root / layout.folder
        folder.mkdir(parents=True)
        digests = []
        for part, (files, count) in enumerate(((layout.train, COUNT), (layout.test, TEST_COUNT))):
            labels, pixels = records(count, part, kinds)
            chunks = np.array_split(np.arange(count), len(files))
            digests.append({})
            for name, rows in zip(files, chunks, strict=True):
                if name.endswith(".bin"):
                    content = np.concatenate([labels[rows], pixels[rows]], 1).tobytes()
                else:
                    batch = {"data": pixels[rows], "batch_label": "a batch", "filenames": ["a.png"] * len(rows)}
                    batch |= {key: labels[rows, i].tolist() for i, key in enumerate(release.classes)}
                    content = python2_pickle(batch)
                (folder / name).write_bytes(content)
                digests[part][name] = hashlib.md5(content).hexdigest()
        layouts.append(replace(layout, train=digests[0], test=digests[1]))
    return replace(release, layouts=tuple(layouts), count=COUNT, test_count=TEST_COUNT)


def archive(root, layout):
    """Replace a layout's folder by an archive; return the layout with its size and checksum."""
    path = root / layout.archive.name
    with tarfile.open(path, "w:gz") as tar:
        tar.add(root / layout.folder, layout.folder)
    for file in (root / layout.folder).iterdir():
        file.unlink()
    (root / layout.folder).rmdir()
    content = path.read_bytes()
    return replace(layout, archive=Remote(layout.archive.url, len(content), hashlib.md5(content).hexdigest()))


@pytest.fixture
def ten(tmp_path, monkeypatch):
    release = write(tmp_path, CIFAR10)
    monkeypatch.setattr(cifar, "CIFAR10", release)
    return release


@pytest.fixture
def hundred(tmp_path, monkeypatch):
    release = write(tmp_path, CIFAR100)
    monkeypatch.setattr(cifar, "CIFAR100", release)
    return release


def remove(root, layout):
    for file in (root / layout.folder).iterdir():
        file.unlink()
    (root / layout.folder).rmdir()


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".download.lock")


def test_cifar10_is_as_it_was_written(tmp_path, ten):
    data = cifar10(tmp_path)
    for split, (count, seed) in ((data.train, (COUNT, 0)), (data.test, (TEST_COUNT, 1))):
        labels, pixels = records(count, seed, [10])
        images = as_tensor(split.x)
        assert images.dtype == torch.uint8
        assert np.array_equal(images.numpy(), pixels.reshape(-1, 3, 32, 32))  # red plane, green plane, blue plane
        assert np.array_equal(split.labels.numpy(), labels[:, 0])
        assert split.labels.dtype == torch.int64
    assert data.class_names[3] == "cat"
    assert data.label_sets == {}


@pytest.mark.parametrize("labels", ["fine", "coarse"])
def test_cifar100_has_both_kinds_of_labels(tmp_path, hundred, labels):
    data = load(f"cifar100:labels={labels}", tmp_path)
    column, classes = (1, 100) if labels == "fine" else (0, 20)
    assert data.num_classes == len(set(data.class_names)) == classes
    assert np.array_equal(data.train.labels.numpy(), records(COUNT, 0, [20, 100])[0][:, column])
    with pytest.raises(ValueError, match="labels must be 'fine' or 'coarse', got 'medium'"):
        cifar100(tmp_path, labels="medium")


@pytest.mark.parametrize(("name", "release"), [("cifar10", "ten"), ("cifar100", "hundred")])
def test_python_and_binary_folders_give_the_same(tmp_path, name, release, request):
    binary_layout = request.getfixturevalue(release).layouts[0]
    binary = load(name, tmp_path)
    remove(tmp_path, binary_layout)
    python = load(name, tmp_path)
    for part in ("train", "test"):
        assert torch.equal(getattr(binary, part).x, getattr(python, part).x)
        assert torch.equal(getattr(binary, part).labels, getattr(python, part).labels)


def test_what_the_paper_says_about_it(tmp_path, ten, hundred):
    first, second = cifar10(tmp_path), cifar100(tmp_path)
    arrows = {(first.class_names[a], first.class_names[b]) for a, b in first.asymmetric.items()}
    assert arrows == {
        ("truck", "automobile"),
        ("bird", "airplane"),
        ("deer", "horse"),
        ("cat", "dog"),
        ("dog", "cat"),
    }
    assert second.asymmetric is None
    for name in ("cifar10", "cifar100"):
        protocol = defaults_of(name)
        assert protocol["model"] == "wrn:depth=40,width=2"
        assert (protocol["epochs"], protocol["batch_size"], protocol["drop_last"]) == (200, 128, True)


def test_the_official_constants():
    for release, bytes_ in ((CIFAR10, 3073), (CIFAR100, 3074)):
        assert len(release.classes) + 3072 == bytes_
        assert (release.count, release.test_count) == (50_000, 10_000)
    assert len(set(CIFAR100.classes["fine_labels"])) == 100
    assert sorted(CIFAR100.classes["fine_labels"]) == list(CIFAR100.classes["fine_labels"])
    assert len(CIFAR100.classes["coarse_labels"]) == 20


@pytest.mark.parametrize(
    ("spec", "mean", "std"),
    [
        # dataloader_cifar.py of DivideMix, data_loaders.py of SOP
        ("cifar10:normalisation=dividemix", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        ("cifar10:normalisation=sop", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        ("cifar100:normalisation=dividemix", (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
        ("cifar100:normalisation=sop", (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    ],
)
def test_normalisation_of_other_code(tmp_path, ten, hundred, spec, mean, std):
    data = load(spec, tmp_path)
    assert (data.mean, data.std) == (mean, std)


def test_unknown_normalisation(tmp_path, ten):
    with pytest.raises(ValueError, match="normalisation must be one of logitclip, dividemix, sop; got 'mine'"):
        cifar10(tmp_path, normalisation="mine")


# -- damaged, missing and other files --------------------------------------------------------------------------------


def test_nothing_there(tmp_path):
    with pytest.raises(ValueError, match=r"CIFAR-10 is not in .*: put the folder cifar-10-batches-bin or"):
        cifar10(tmp_path)


def test_a_missing_file(tmp_path, ten):
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(ValueError, match=r"data_batch_3\.bin is missing"):
        cifar10(tmp_path)


@pytest.mark.parametrize("layout", [0, 1])
def test_a_corrupted_byte(tmp_path, ten, layout):
    if layout:
        remove(tmp_path, ten.layouts[0])
    name = list(ten.layouts[layout].train)[1]
    path = tmp_path / ten.layouts[layout].folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # one pixel: all lengths and labels stay valid
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} is damaged: its checksum .* Unpack the archive of CIFAR-10 again"):
        cifar10(tmp_path)


def test_a_truncated_file(tmp_path, ten):
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"data_batch_2\.bin is cut off: its 30,729 bytes are not a multiple of 3073"):
        cifar10(tmp_path)
    path.write_bytes(content[:-3073])
    with pytest.raises(ValueError, match=r"has 49 records in .* where CIFAR-10 has 50: .*'cifar10:subset=true'"):
        cifar10(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"data_batch_2\.bin is cut off"):
        cifar10(tmp_path, subset=True)


def test_a_class_outside_the_range(tmp_path, ten):
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    content = bytearray(path.read_bytes())
    content[3073] = 10
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"data_batch_2\.bin: labels has the class 10, outside 0\.\.9"):
        cifar10(tmp_path, subset=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": np.zeros((10, 3072), np.uint8)}, "has no 'labels'"),
        ({"data": np.zeros((10, 3071), np.uint8), "labels": [0] * 10}, "must have its images as bytes"),
        ({"data": np.zeros((10, 3072), np.int64), "labels": [0] * 10}, "must have its images as bytes"),
        ({"data": [1, 2], "labels": [0, 1]}, "must have its images as bytes"),
        ({"data": np.zeros((10, 3072), np.uint8), "labels": [0] * 9}, "has 9 labels for 10 examples"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": ["a", "b"]}, "must be a list of class numbers"),
        ([1, 2, 3], "holds a list instead of a dict"),
    ],
)
def test_python_files_with_other_content(tmp_path, ten, content, message):
    remove(tmp_path, ten.layouts[0])
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps(content, 2))
    with pytest.raises(ValueError, match=rf"data_batch_1.* {message}"):
        cifar10(tmp_path, subset=True)


class Evil:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        import os

        return os.system, (self.command,)


def test_a_malicious_pickle_among_the_batches(tmp_path, ten):
    remove(tmp_path, ten.layouts[0])
    marker = tmp_path / "executed"
    path = tmp_path / "cifar-10-batches-py" / "data_batch_4"
    path.write_bytes(pickle.dumps({"data": Evil(f"touch {marker}")}, 2))
    for subset in (False, True):
        with pytest.raises(ValueError, match=r"data_batch_4 is damaged or unsafe .* \(it asks for \w+\.system"):
            cifar10(tmp_path, subset=subset)
    assert not marker.exists()


# -- archives and downloads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [0, 1])
def test_straight_from_the_archive(tmp_path, ten, layout, monkeypatch):
    expected = cifar10(tmp_path)
    remove(tmp_path, ten.layouts[1 - layout])
    packed = archive(tmp_path, ten.layouts[layout])
    monkeypatch.setattr(cifar, "CIFAR10", replace(ten, layouts=(packed, ten.layouts[1 - layout])))
    for _ in range(2):  # from the archive, then from the unpacked files
        assert torch.equal(cifar10(tmp_path).train.x, expected.train.x)
    assert names(tmp_path) == sorted([packed.archive.name, packed.folder])


@pytest.mark.parametrize("damage", ["truncated", "byte"])
def test_a_damaged_archive(tmp_path, ten, damage, monkeypatch):
    remove(tmp_path, ten.layouts[1])
    packed = archive(tmp_path, ten.layouts[0])
    monkeypatch.setattr(cifar, "CIFAR10", replace(ten, layouts=(packed, ten.layouts[1])))
    path = tmp_path / packed.archive.name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if damage == "byte" else content[:-100])
    with pytest.raises(ValueError, match=r"cifar-10-binary\.tar\.gz (is damaged|has .* bytes where)"):
        cifar10(tmp_path)
    assert names(tmp_path) == [packed.archive.name]


def test_download_from_a_mirror(tmp_path, ten, monkeypatch):
    mirror, root = tmp_path, tmp_path / "root"
    expected = cifar10(mirror)
    remove(mirror, ten.layouts[1])
    packed = archive(mirror, ten.layouts[0])
    monkeypatch.setattr(cifar, "CIFAR10", replace(ten, layouts=(packed, ten.layouts[1])))
    data = load("cifar10", root, download=True, mirror=mirror)
    assert torch.equal(data.train.x, expected.train.x)
    assert names(root) == ["cifar-10-batches-bin", "cifar-10-binary.tar.gz"]
    (root / "cifar-10-binary.tar.gz").write_bytes(b"damaged")
    remove(root, ten.layouts[0])
    assert torch.equal(load("cifar10", root, download=True, mirror=mirror).train.x, expected.train.x)


# -- subsets and human labels ----------------------------------------------------------------------------------------


def human_file(path, release, kind="labels", clean_key="clean_label", coarse=False):
    kinds = [len(classes) for classes in release.classes.values()]
    clean = records(COUNT, 0, kinds)[0][:, list(release.classes).index(kind)].astype(np.int64)
    sets = {key: (clean + shift + 1) % kinds[-1] for shift, key in enumerate(release.human_sets[kind])}
    torch.save({clean_key: clean, **sets}, path)
    digests = {key: hashlib.md5(labels.astype(np.uint8).tobytes()).hexdigest() for key, labels in sets.items()}
    return replace(release, human_sets={**release.human_sets, kind: digests}), sets


def test_human_labels_are_found_and_checked(tmp_path, ten, monkeypatch):
    path = tmp_path / "CIFAR-10_human.pt"
    release, sets = human_file(path, ten)
    monkeypatch.setattr(cifar, "CIFAR10", release)
    data = cifar10(tmp_path, human=True)
    assert set(data.label_sets) == {
        "aggre_label",
        "worse_label",
        "random_label1",
        "random_label2",
        "random_label3",
    }
    for key, labels in data.label_sets.items():
        assert np.array_equal(labels.numpy(), sets[key])
    torch.save({"clean_label": np.zeros(COUNT, np.int64)}, path)
    with pytest.raises(ValueError, match=r"CIFAR-10_human\.pt"):
        cifar10(tmp_path)


def test_human_labels_other_than_published(tmp_path, ten):
    human_file(tmp_path / "CIFAR-10_human.pt", ten)
    with pytest.raises(ValueError, match=r"CIFAR-10_human\.pt: aggre_label is not the published label set"):
        cifar10(tmp_path)


def test_cifar100n_has_fine_and_coarse_labels(tmp_path, hundred, monkeypatch):
    release, fine = human_file(tmp_path / "CIFAR-100_human.pt", hundred, "fine_labels")
    monkeypatch.setattr(cifar, "CIFAR100", release)
    assert np.array_equal(cifar100(tmp_path).label_sets["noisy_label"].numpy(), fine["noisy_label"])
    with pytest.raises(ValueError, match="has no 'clean_coarse_label'"):
        cifar100(tmp_path, labels="coarse")


def test_human_labels_that_must_be_there(tmp_path, ten, monkeypatch):
    with pytest.raises(ValueError, match=r"There is no CIFAR-10_human\.pt in .* ask for the download"):
        cifar10(tmp_path, human=True)
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    release, sets = human_file(mirror / "CIFAR-10_human.pt", ten)
    monkeypatch.setattr(cifar, "CIFAR10", release)
    data = cifar10(tmp_path, human=True, download=True, mirror=mirror)
    assert np.array_equal(data.label_sets["worse_label"].numpy(), sets["worse_label"])


def test_a_subset_is_accepted_only_when_it_is_asked_for(tmp_path, hundred):
    folder = tmp_path / "cifar-100-binary"
    kept = np.array([3, 10, 41])
    train = np.frombuffer((folder / "train.bin").read_bytes(), np.uint8).reshape(-1, 3074)
    (folder / "train.bin").write_bytes(train[kept].tobytes())
    with pytest.raises(ValueError, match=r"cifar-100-binary has 3 records in train\.bin where CIFAR-100 has 50"):
        cifar100(tmp_path)
    data = load("cifar100:subset=true", tmp_path)
    assert np.array_equal(as_tensor(data.train.x).flatten(1).numpy(), train[kept, 2:])

    _, sets = human_file(tmp_path / "CIFAR-100_human.pt", hundred, "fine_labels")
    assert load("cifar100:subset=true", tmp_path).label_sets == {}
    with pytest.raises(ValueError, match=r"need .*train_index\.npy"):
        load("cifar100:subset=true,human=true", tmp_path)
    np.save(folder / "train_index.npy", kept)
    data = load("cifar100:subset=true", tmp_path)
    assert np.array_equal(data.label_sets["noisy_label"].numpy(), sets["noisy_label"][kept])

    for wrong, message in (
        (kept + 20, r"train_index\.npy must be 3 positions in 0\.\.49"),
        (kept[:2], "must be 3 positions"),
        (kept - 1, "differs"),
    ):
        np.save(folder / "train_index.npy", wrong)
        with pytest.raises(ValueError, match=message):
            load("cifar100:subset=true", tmp_path)


def test_a_subset_may_lack_files(tmp_path, ten):
    for k in (1, 2, 4, 5):
        (tmp_path / "cifar-10-batches-bin" / f"data_batch_{k}.bin").unlink()
    data = cifar10(tmp_path, subset=True)
    assert np.array_equal(as_tensor(data.train.x).flatten(1).numpy(), records(COUNT, 0, [10])[1][20:30])
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(ValueError, match=r"data_batch_1\.bin is missing"):
        cifar10(tmp_path, subset=True)
