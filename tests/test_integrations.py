"""Extras: each has code or a page behind it, and a missing package is named together with its extra."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "package"), [("sklearn", "sklearn.base"), ("lightning", "lightning"), ("skorch", "skorch")]
)
def test_a_missing_package_is_named_with_its_extra(name, package, monkeypatch):
    importlib.import_module(f"logitclip.integrations.{name}")
    monkeypatch.delitem(sys.modules, f"logitclip.integrations.{name}")
    for loaded in [module for module in sys.modules if f"{module}.".startswith(f"{package}.")]:
        monkeypatch.setitem(sys.modules, loaded, None)
    with pytest.raises(ImportError, match=rf"pip install 'logitclip\[{name}\]'"):
        importlib.import_module(f"logitclip.integrations.{name}")


def test_hugging_face_is_not_imported_before_it_is_needed():
    import subprocess

    code = "import sys, logitclip.integrations.huggingface; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_extra_is_used():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    named = re.findall(r"(?:logitclip|\.)\[([\w,-]+)\]", text) + re.findall(r'explain_missing\(".*?", "([\w-]+)"', text)
    assert set(extras) - {"all"} <= {extra for group in named for extra in group.split(",")}
    every = {name.removesuffix("]") for name in extras["all"][0].partition("[")[2].split(",")}
    assert every == set(extras) - {"all", "timm"}  # timm needs torchvision
