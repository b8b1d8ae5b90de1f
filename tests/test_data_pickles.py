"""Label files: official files open, and no file can execute code."""

import hashlib
import pickle
import re
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitclip.data._pickles import as_labels, human_labels, read_labels, read_pickle, read_torch

N, K = 500, 10


@pytest.fixture
def clean():
    return torch.randint(0, K, (N,), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def official(clean, tmp_path):
    """Write a file like CIFAR-10_human.pt: numpy arrays, saved by torch."""
    worse = ((clean + 1) % K).numpy()
    path = tmp_path / "CIFAR-10_human.pt"
    torch.save({"clean_label": clean.numpy(), "worse_label": worse, "aggre_label": clean.numpy()}, path)
    return path


def rename_numpy(path, old=b"numpy._core.multiarray", new=b"numpy.core.multiarray"):
    """Use numpy 1's module names, as in the official files."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content.replace(old, new))


def test_an_official_file_opens(official, clean):
    with pytest.raises(pickle.UnpicklingError):
        torch.load(official)  # the error without the allow-list
    sets = human_labels(official, clean, K, keys={"worse_label": None, "aggre_label": None})
    assert set(sets) == {"worse_label", "aggre_label"}
    assert sets["worse_label"].dtype == torch.int64
    assert torch.equal(sets["worse_label"], (clean + 1) % K)


def test_a_file_of_numpy_1_opens(official, clean):
    before = official.read_bytes()
    rename_numpy(official)
    assert official.read_bytes() != before
    assert np.array_equal(read_torch(official)["clean_label"], clean.numpy())


def test_a_file_of_an_old_torch_opens(tmp_path, clean):
    torch.save({"clean_label": clean.numpy()}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert np.array_equal(read_torch(tmp_path / "x.pt")["clean_label"], clean.numpy())


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i4", ">i4", "<i8", ">i8", "u2"])
def test_arrays_of_every_integer_type(tmp_path, dtype):
    array = np.arange(12).astype(dtype).reshape(3, 4)
    torch.save({"c": array, "f": np.asfortranarray(array), "n": np.int64(7), "list": [1, 2]}, tmp_path / "x.pt")
    content = read_torch(tmp_path / "x.pt")
    assert np.array_equal(content["c"], array)
    assert np.array_equal(content["f"], array)
    assert content["n"] == 7
    assert content["list"] == [1, 2]


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_pickles_of_every_protocol(tmp_path, protocol):
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    (tmp_path / "batch").write_bytes(pickle.dumps({"data": array, "labels": [1, 2]}, protocol))
    content = read_pickle(tmp_path / "batch")
    assert np.array_equal(content["data"], array)
    assert content["labels"] == [1, 2]


def test_the_global_allow_list_is_neither_used_nor_changed(official, monkeypatch):
    load, during = torch.load, []
    monkeypatch.setattr(
        torch, "load", lambda *a, **k: during.extend(torch.serialization.get_safe_globals()) or load(*a, **k)
    )
    torch.serialization.add_safe_globals([np.ndarray, (np.dtype, "numpy.dtype")])  # the usual advice in forums
    try:
        before = set(torch.serialization.get_safe_globals())
        assert len(read_torch(official)["clean_label"]) == N
        assert set(torch.serialization.get_safe_globals()) == before
        assert during
        assert not before & set(during)
    finally:
        torch.serialization.clear_safe_globals()


# -- nothing is executed ---------------------------------------------------------------------------------------------


class Attack:
    """Pickles to a call of `function(*arguments)`."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def attacks(marker):
    import builtins
    import os
    import shlex
    import subprocess

    return [
        Attack(os.system, shlex.join(["touch", str(marker)])),
        Attack(subprocess.check_call, ["touch", str(marker)]),
        Attack(builtins.eval, f"open({str(marker)!r}, 'w')"),
        Attack(builtins.exec, f"open({str(marker)!r}, 'w')"),
        Attack(builtins.open, str(marker), "w"),
        Attack(np.load, str(marker)),
        Attack(np.fromfile, str(marker)),
        Attack(builtins.__import__, "antigravity"),
    ]


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: {"clean_label": a}, lambda a: {"x": [{"y": (1, a)}]}])
def test_a_malicious_file_is_refused_and_runs_nothing(tmp_path, number, wrap):
    marker = tmp_path / "executed"
    content = wrap(attacks(marker)[number])
    torch.save(content, tmp_path / "evil.pt")
    (tmp_path / "evil").write_bytes(pickle.dumps(content, 2))
    np.save(tmp_path / "evil.npy", np.array([content], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "evil.npz", clean_label=np.array([content], dtype=object))
    for read, name in (
        (read_torch, "evil.pt"),
        (read_pickle, "evil"),
        (read_labels, "evil.npy"),
        (read_labels, "evil.npz"),
    ):
        with pytest.raises(ValueError, match=rf"{name} is damaged or") as caught:
            read(tmp_path / name)
        assert "weights_only" not in str(caught.value), "no advice to open it nevertheless"
        assert "\n" not in str(caught.value)
    assert not marker.exists(), "the file was executed"


def test_the_test_of_attacks_can_fail(tmp_path):
    """Ordinary unpickling of the same bytes does execute the code."""
    marker = tmp_path / "executed"
    pickle.loads(pickle.dumps(attacks(marker)[0], 2))
    assert marker.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("random") / "x.pt"
    path.write_bytes(content)
    for read in (read_torch, read_pickle):
        try:
            assert isinstance(read(path), dict)  # b"}." is a pickle of an empty one
        except ValueError as error:
            assert re.search(r"x\.pt (is damaged|holds a)", str(error))  # noqa: PT017 (both outcomes are right)


def test_arrays_of_objects_are_refused(tmp_path):
    torch.save({"x": np.array(["a", None], dtype=object)}, tmp_path / "x.pt")
    with pytest.raises(
        ValueError, match=r"x\.pt is damaged or unsafe and was not read \(it contains more than integers\)"
    ):
        read_torch(tmp_path / "x.pt")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_said(official, share):
    official.write_bytes(official.read_bytes()[: int(share * official.stat().st_size)])
    with pytest.raises(
        ValueError, match=r"CIFAR-10_human\.pt is damaged or unsafe .*\(.* .*\)\. Delete it and download"
    ):
        read_torch(official)


def test_a_corrupted_byte_is_found(official, clean):
    """All labels stay in range, so only the checksum of the label set can detect the change."""
    digest = hashlib.md5(((clean + 1) % K).byte().numpy()).hexdigest()
    human_labels(official, clean, K, keys={"worse_label": digest})
    content = {name: array.copy() for name, array in read_torch(official).items()}
    content["worse_label"][7] = (content["worse_label"][7] + 1) % K
    torch.save(content, official)
    with pytest.raises(ValueError, match="worse_label is not the published label set"):
        human_labels(official, clean, K, keys={"worse_label": digest})


# -- the labels fit the data -----------------------------------------------------------------------------------------


def test_label_files_that_do_not_fit(official, clean):
    with pytest.raises(ValueError, match=r"CIFAR-10_human\.pt: clean_label has 500 labels for 400 examples"):
        human_labels(official, clean[:400], K, keys={})
    with pytest.raises(ValueError, match=r"CIFAR-10_human\.pt: clean_label has the class 9, outside 0\.\.8"):
        human_labels(official, clean, 9, keys={})
    with pytest.raises(ValueError, match=r"clean_label differs from the dataset's labels"):
        human_labels(official, clean.roll(1), K, keys={})
    with pytest.raises(ValueError, match=r"has no 'noisy_label', only aggre_label, clean_label, worse_label"):
        human_labels(official, clean, K, keys={"noisy_label": None})


def test_positions_pick_the_labels_of_a_subset(official, clean):
    positions = torch.tensor([7, 3, 400])
    sets = human_labels(official, clean[positions], K, keys={"worse_label": None}, positions=positions)
    assert torch.equal(sets["worse_label"], (clean[positions] + 1) % K)
    with pytest.raises(ValueError, match="500 labels, none at position 900"):
        human_labels(official, clean[:1], K, keys={}, positions=torch.tensor([900]))


def test_npz_and_npy_are_read_too(tmp_path, clean):
    np.savez(tmp_path / "a.npz", clean_label=clean.numpy(), worse_label=clean.numpy())
    np.save(tmp_path / "b.npy", clean.numpy())
    assert set(read_labels(tmp_path / "a.npz")) == {"clean_label", "worse_label"}
    assert np.array_equal(read_labels(tmp_path / "b.npy")["b"], clean.numpy())
    with pytest.raises(ValueError, match=r"must be \.pt, \.npz or \.npy"):
        read_labels(tmp_path / "c.txt")
    with pytest.raises(FileNotFoundError):
        read_labels(tmp_path / "absent.npy")
    (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:200])
    with pytest.raises(ValueError, match=r"a\.npz is damaged"):
        read_labels(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([0, 1, -1]), r"source has the class -1, outside 0\.\.9"),
        (np.array([0, 1, 10]), r"source has the class 10, outside 0\.\.9"),
        (np.array([0, 1]), "source has 2 labels for 3 examples"),
        (np.array([0.0, 1, 2]), "source must be a list of class numbers, got shape .* float64"),
        (np.zeros((3, 1), int), "source must be a list of class numbers, got shape"),
    ],
)
def test_labels_are_checked(array, message):
    with pytest.raises(ValueError, match=message):
        as_labels(array, "source", length=3, num_classes=10)
