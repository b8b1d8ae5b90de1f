"""Fashion-MNIST from tiny IDX files, written by the tests."""

import gzip
import hashlib
import struct

import numpy as np
import pytest
import torch
from tensors import as_tensor

from logitclip.data import defaults_of, load
from logitclip.data import fashion_mnist as module
from logitclip.data._download import Remote
from logitclip.data.fashion_mnist import fashion_mnist


def idx(array):
    return struct.pack(f">4B{array.ndim}i", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def files(monkeypatch):
    """Write the four files, and patch the module to expect their checksums; return them by name."""
    rng = np.random.default_rng(0)
    content = {}
    for part, n in (("train", 30), ("t10k", 20)):
        content[f"{part}-images-idx3-ubyte"] = idx(rng.integers(0, 256, (n, 28, 28), dtype=np.uint8))
        content[f"{part}-labels-idx1-ubyte"] = idx((np.arange(n) % 10).astype(np.uint8))
    packed = {name: gzip.compress(raw) for name, raw in content.items()}
    monkeypatch.setattr(module, "CONTENT", {name: hashlib.md5(raw).hexdigest() for name, raw in content.items()})
    remotes = {
        name: Remote(f"{module.ADDRESS}/{name}.gz", len(raw), hashlib.md5(raw).hexdigest())
        for name, raw in packed.items()
    }
    monkeypatch.setattr(module, "REMOTES", remotes)
    monkeypatch.setattr(module, "DEBIAN", module.Path("/nowhere"))
    return content


def write(folder, files, packed=True):
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in files.items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(raw) if packed else raw)
    return folder


def check(data, files):
    for split, part in ((data.train, "train"), (data.test, "t10k")):
        assert split.x.dtype == torch.uint8
        assert split.x.shape[1:] == (1, 28, 28)
        assert split.x.numpy().tobytes() == files[f"{part}-images-idx3-ubyte"][16:]
        assert split.labels.byte().numpy().tobytes() == files[f"{part}-labels-idx1-ubyte"][8:]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("place", ["", "fashion-mnist", "fashion_mnist", "FashionMNIST/raw"])
def test_the_files_are_found(tmp_path, files, place, packed):
    write(tmp_path / place, files, packed)
    check(load("fashion_mnist", tmp_path), files)


def test_the_debian_package_is_found(tmp_path, files, monkeypatch):
    monkeypatch.setattr(module, "DEBIAN", write(tmp_path / "debian", files))
    check(fashion_mnist(tmp_path / "empty"), files)


def test_download_from_a_mirror(tmp_path, files):
    mirror = write(tmp_path / "mirror", files)
    root = tmp_path / "root"
    check(load("fashion_mnist", root, download=True, mirror=mirror), files)
    assert sorted(p.name for p in (root / "fashion-mnist").glob("*.gz")) == sorted(f"{name}.gz" for name in files)


def test_nothing_there(tmp_path, files):
    with pytest.raises(ValueError, match=r"Fashion-MNIST is not in .*: put train-images-idx3-ubyte\.gz"):
        fashion_mnist(tmp_path)
    write(tmp_path, files)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ValueError, match="Fashion-MNIST is not in"):
        fashion_mnist(tmp_path)


@pytest.mark.parametrize("damage", ["byte", "truncated", "empty", "not gzip"])
def test_a_damaged_file(tmp_path, files, damage):
    path = write(tmp_path, files) / "train-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"byte": content, "truncated": content[:-20], "empty": b"", "not gzip": b"<html>"}[damage])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is .* download it again"):
        fashion_mnist(tmp_path)


@pytest.mark.parametrize("subset", [True, False])
def test_a_file_of_another_shape(tmp_path, files, subset):
    for raw in (files["train-labels-idx1-ubyte"], files["train-images-idx3-ubyte"][:-1], b"\0\0\x0d\3" + bytes(12)):
        write(tmp_path, files | {"train-images-idx3-ubyte": raw})
        with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is not a complete IDX file"):
            fashion_mnist(tmp_path, subset=subset)


def test_mnist_is_not_taken_for_fashion_mnist(tmp_path, files):
    """MNIST's files have the same names, shapes and classes."""
    other = idx(np.zeros((30, 28, 28), np.uint8))
    write(tmp_path, files | {"train-images-idx3-ubyte": other}, packed=False)
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte is not Fashion-MNIST's: .* such as MNIST's"):
        fashion_mnist(tmp_path)
    assert not as_tensor(load("fashion_mnist:subset=true", tmp_path).train.x).any()


def test_labels_that_do_not_fit(tmp_path, files):
    write(tmp_path, files | {"train-labels-idx1-ubyte": idx(np.zeros(29, np.uint8))})
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte\.gz has 29 labels for 30 examples"):
        fashion_mnist(tmp_path, subset=True)
    write(tmp_path, files | {"train-labels-idx1-ubyte": idx(np.full(30, 10, np.uint8))})
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte\.gz has the class 10, outside 0\.\.9"):
        fashion_mnist(tmp_path, subset=True)


def test_what_it_is_trained_with(tmp_path, files):
    write(tmp_path, files)
    data = fashion_mnist(tmp_path)
    assert data.class_names[9] == "Ankle boot"
    assert defaults_of("fashion_mnist")["augment"] == "flip_crop:padding=2"
