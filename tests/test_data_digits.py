"""The digits: always the same split of the same images."""

import hashlib
from typing import cast

import numpy as np
import pytest
import torch
from tensors import as_tensor

from logitclip.data import load
from logitclip.data.digits import digits


def test_shapes_types_and_classes():
    data = load("digits")
    images = as_tensor(data.train.x)
    assert images.shape == (1400, 1, 8, 8)
    assert as_tensor(data.test.x).shape == (397, 1, 8, 8)
    assert images.dtype == torch.uint8
    assert data.train.labels.dtype == torch.int64
    assert data.num_classes == 10
    assert data.asymmetric is None
    assert int(data.train.labels.bincount(minlength=10).min()) > 100


def test_the_split_never_changes():
    """Results are compared across machines and versions, so this test freezes the split."""
    data = digits()
    content = b"".join(as_tensor(t).numpy().tobytes() for s in (data.train, data.test) for t in (s.x, s.labels))
    assert hashlib.sha256(content).hexdigest()[:16] == "42d3e46b89451aa0"


def test_every_image_is_there_once():
    from sklearn.datasets import load_digits
    from sklearn.utils import Bunch

    data, original = digits(), cast(Bunch, load_digits())
    ours = torch.cat([data.train.x, data.test.x]).flatten(1).numpy()
    labels = torch.cat([data.train.labels, data.test.labels]).numpy()
    rows = {(*(15 * image.astype(int)), label) for image, label in zip(original.data, original.target, strict=True)}
    assert rows == {(*image, label) for image, label in zip(ours.astype(int), labels, strict=True)}
    assert len(ours) == len(original.data)


def test_inputs_are_the_17_grey_levels():
    data = digits()
    assert as_tensor(data.train.x).unique().tolist() == list(range(0, 241, 15))
    assert data.mean == data.std == ()  # the network sees them in [0, 1]


def test_the_global_generators_are_left_alone():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    digits()
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'logitclip\[train\]'"):
        digits()


def test_without_its_file_scikit_learn_is_asked(monkeypatch):
    before = digits()
    monkeypatch.setattr("pathlib.Path.exists", lambda path: False)
    after = digits()
    assert torch.equal(before.train.x, after.train.x)
    assert torch.equal(before.test.labels, after.test.labels)
