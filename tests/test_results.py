"""Results and failures: written, read back, and refused when they are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from disk import everything_in

from logitclip import files
from logitclip.runs import checkpoints, results

ROWS = [{"epoch": 0, "loss": 1.5, "val_accuracy": None}, {"epoch": 1, "loss": 0.1 + 0.2, "val_accuracy": None}]


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
    files.write_json(folder / "noise.json", {"rule": "none"})
    result = results.Result(id=folder.name, **RESULT)
    results.finish(folder, result, {"w": torch.arange(4.0)})
    return folder


def test_a_finished_run_keeps_one_set_of_weights(tmp_path):
    folder = finished(tmp_path / "run")
    assert sorted(everything_in(folder)) == ["metrics.jsonl", "noise.json", "result.json", "weights.safetensors"]
    result = results.read_result(folder)
    assert result is not None
    assert result.rows == ROWS
    assert result.noise == {"rule": "none"}
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
    content = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**content, **change}))
    failure = results.read_outcome(folder)
    assert isinstance(failure, results.Failure)
    assert "result.json cannot be read" in failure.error
    assert failure.error in caplog.text


@pytest.mark.parametrize("content", ["3", "null", "[]", '"text"', "{", '{"id": 1}'])
def test_json_of_another_type_is_no_outcome(tmp_path, content):
    (tmp_path / "failure.json").write_text(content)
    assert results.read_outcome(tmp_path) is None
    (tmp_path / "result.json").write_text(content)
    assert isinstance(results.read_outcome(tmp_path), results.Failure)
