"""Results and failures: written, read back, and refused when they are damaged."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from disk import everything_in

from logitclip import files
from logitclip.runs import checkpoints, results

ROWS = [
    {
        "epoch": epoch,
        "lr": 0.1,
        "loss": 0.1 + 0.2,
        "train_accuracy": None,
        "test_accuracy": 90.0,
        "val_accuracy": None,
        "memorised": 3.5,
        "recovered": 80,
        "clipped": 12.5,
        "norm_quantiles": [1, 2, 3, 4, 5],
    }
    for epoch in range(2)
]
VALIDATION = ("index", "label", "prediction")
EXAMPLES = ("loss", "margin", "mean_margin", "prediction", "other", "first_learnt", "label")
NOISE = {"rule": "none", "num_classes": 2, "class_names": ["a", "b"], "transition": [[1, 0], [0, 1]]}


RESULT = {
    "config": {"runs": "elsewhere"},
    "last10_accuracy": 90.0,
    "best_accuracy": 91.0,
    "val_accuracy": None,
    "memorised": 3.5,
    "recovered": 80,
    "noise_rate": 50.0,
    "clip": "none",
    "epochs": 2,
    "seconds": 1.0,
    "versions": {"torch": "2.6"},
    "device": "cpu",
    "commit": None,
}


def finished(folder: Path) -> Path:
    """A folder with a finished run."""
    checkpoints.save_checkpoint(folder, {"w": torch.zeros(4)}, {}, ROWS, folder.name)
    checkpoints.write_rows(folder / "metrics.jsonl", ROWS)
    files.write_json(folder / "noise.json", NOISE)
    result = results.Result(id=folder.name, **RESULT)
    for name, keys in (("validation.npz", VALIDATION), ("examples.npz", EXAMPLES)):
        np.savez(folder / name, **{key: np.arange(3) for key in keys})
    results.finish(folder, result, {"w": torch.arange(4.0)})
    return folder


def test_a_finished_run_keeps_one_set_of_weights(tmp_path):
    folder = finished(tmp_path / "run")
    assert sorted(everything_in(folder)) == [
        *("examples.npz", "metrics.jsonl", "noise.json", "result.json", "validation.npz", "weights.safetensors")
    ]
    result = results.read_result(folder)
    assert result is not None
    assert result.rows == ROWS
    assert result.noise == NOISE
    assert result.weights()["w"].tolist() == [0, 1, 2, 3]
    assert result.folder == folder  # though it was written elsewhere: folders may be moved


@pytest.mark.parametrize("name", ["metrics.jsonl", "noise.json", "weights.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_result_without_its_files_is_a_failure_that_is_logged(tmp_path, caplog, name, damage):
    folder = finished(tmp_path / "run")
    result = results.read_result(folder)
    file = folder / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-3] if damage == "cut" else content[:-2] + b"!" + content[-1:])
    if name == "weights.safetensors" and damage != "missing":  # large: checked when they are loaded
        assert isinstance(result, results.Result)
        with pytest.raises(results.Damaged, match="has been changed"):
            result.weights()
        return
    reason = "is missing" if damage == "missing" else "has been changed"
    sentence = f"The result in {folder} is not used: {name} {reason}. Repeat the command to train it again."
    assert results.read_outcome(folder) == results.Failure("run", sentence, "", 0, False)
    assert results.read_result(folder) is None
    assert sentence in caplog.text


def test_the_result_of_another_folder_is_refused(tmp_path, caplog):
    one, other = finished(tmp_path / "one"), finished(tmp_path / "other")
    one.rename(tmp_path / "swap")
    other.rename(one)
    (tmp_path / "swap").rename(other)
    for folder in (one, other):
        assert results.read_result(folder) is None
    assert "result.json belongs to the run other" in caplog.text
    assert "result.json belongs to the run one" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"last10_accuracy": "90"},
        {"last10_accuracy": None},
        {"last10_accuracy": True},
        {"best_accuracy": float("nan")},
        {"epochs": 2.5},
        {"config": []},
        {"config": {"runs": 3}},
        {"config": {"unknown": 3}},
        {"versions": "2.6"},
        {"sha256": {}},
        {"sha256": None},
        {"more": 1},
    ],
)
def test_a_result_with_other_types_is_refused(tmp_path, caplog, change):
    folder = finished(tmp_path / "run")
    content = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    (folder / "result.json").write_text(json.dumps({**content, **change}), encoding="utf-8")
    failure = results.read_outcome(folder)
    assert isinstance(failure, results.Failure)
    assert "result.json cannot be read" in failure.error
    assert failure.error in caplog.text


@pytest.mark.parametrize("content", ["3", "null", "[]", '"text"', "{", '{"id": 1}'])
def test_json_of_another_type_is_no_outcome(tmp_path, content):
    (tmp_path / "failure.json").write_text(content, encoding="utf-8")
    assert results.read_outcome(tmp_path) is None
    (tmp_path / "result.json").write_text(content, encoding="utf-8")
    assert isinstance(results.read_outcome(tmp_path), results.Failure)


# -- changed and crafted files -----------------------------------------------------------------------------------------


def test_a_changed_number_is_noticed(tmp_path, caplog):
    folder = finished(tmp_path / "run")
    text = (folder / "result.json").read_text(encoding="utf-8")
    assert '"last10_accuracy": 90.0' in text
    (folder / "result.json").write_text(
        text.replace('"last10_accuracy": 90.0', '"last10_accuracy": 99.99'), encoding="utf-8"
    )
    failure = results.read_outcome(folder)
    assert isinstance(failure, results.Failure)
    assert "result.json has been changed" in failure.error


def test_results_of_an_older_version_are_read_with_one_warning(tmp_path, caplog):
    for name in ("one", "two"):
        folder = finished(tmp_path / name)
        content = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        del content["digest"]
        (folder / "result.json").write_text(json.dumps(content), encoding="utf-8")
    for name in ("one", "two", "one"):
        found = results.read_result(tmp_path / name)
        assert found is not None
        assert found.last10_accuracy == 90
        assert len(found.rows) == 2
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith(f"Results in {tmp_path} are of an older version, without a digest")


def sign(folder: Path, **files_of_it: bytes) -> None:
    """Put other files into a finished run, and digests that match them, as somebody who means harm can."""
    content = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    for name, data in files_of_it.items():
        (folder / name).write_bytes(data)
        content["sha256"][name] = hashlib.sha256(data).hexdigest()
    (folder / "result.json").write_text(
        json.dumps({**content, "digest": files.object_digest(content)}), encoding="utf-8"
    )


def npz(**arrays: object) -> bytes:
    content = io.BytesIO()
    np.savez(content, **{name: np.asarray(array) for name, array in arrays.items()})
    return content.getvalue()


def lines(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


READERS = {
    "metrics.jsonl": lambda result: result.rows,
    "noise.json": lambda result: result.noise,
    "validation.npz": lambda result: result.validation,
    "examples.npz": lambda result: result.examples,
    "weights.safetensors": lambda result: result.weights(),
}
CRAFTED = {
    "metrics.jsonl": [
        *(b"", b"{}", b"\xff", b"[" * 100_000, lines(*ROWS, ROWS[0]), lines(1, 2), lines({}, {}), lines([], [])),
        lines(ROWS[0], {**ROWS[1], "loss": "low"}),
        lines(ROWS[0], {**ROWS[1], "loss": float("nan")}),
        lines(ROWS[0], {**ROWS[1], "test_accuracy": True}),
        lines(ROWS[0], {**ROWS[1], "norm_quantiles": [1, "2"]}),
    ],
    "noise.json": [
        *(b"", b"[]", b"3", b"{}", lines({**NOISE, "class_names": 3}), lines({**NOISE, "class_names": ["a"]})),
        *(
            lines({**NOISE, "transition": value})
            for value in (3, [[1, 0]], [["a", "b"], ["c", "d"]], {}, [[1], [0, 1]])
        ),
        lines({**NOISE, "num_classes": "two"}),
    ],
    "validation.npz": [
        *(
            b"",
            b"PK",
            npz(index=[1]),
            npz(index=[1], label=[1], prediction=[1, 2]),
            npz(index=1, label=1, prediction=1),
        ),
        npz(index=[1], label=["a"], prediction=[1]),
    ],
    "examples.npz": [b"", npz(row=[1]), npz(**{key: ["text"] for key in EXAMPLES})],
    "weights.safetensors": [b"", b"\xff" * 64],
}


@pytest.mark.parametrize(("name", "data"), [(name, data) for name, datas in CRAFTED.items() for data in datas])
def test_a_crafted_file_with_its_digest_is_a_sentence(tmp_path, name, data):
    folder = finished(tmp_path / "run")
    assert READERS[name](results.read_result(folder)) is not None
    sign(folder, **{name: data})
    result = results.read_result(folder)
    assert result is not None
    with pytest.raises(
        results.Damaged, match=f"^The result in .* is not used: {name} cannot be read .*again\\.$"
    ) as caught:
        READERS[name](result)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["result.json", "failure.json", "metrics.jsonl", "noise.json", "weights.safetensors"])
@pytest.mark.timeout(20)
def test_a_fifo_in_place_of_a_file_is_not_waited_for(tmp_path, name):
    folder = finished(tmp_path / "run")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    found = results.read_outcome(folder)
    assert isinstance(found, results.Result if name == "failure.json" else results.Failure)
