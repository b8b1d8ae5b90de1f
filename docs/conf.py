"""The documentation site: `make docs` builds it offline, and a warning is an error."""

import importlib
import json
import pkgutil
import re
import typing
from pathlib import Path

from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import SphinxError
from sphinx.util.logging import getLogger

import logitclip
from logitclip import integrations
from logitclip.engine import Settings

project = "logitclip"
author = copyright = "The logitclip developers"
release = version = logitclip.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",
]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
myst_links_external_new_tab = True
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_title = f"logitclip {version}"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_use_ivar = True  # or fields of named tuples would be documented twice
default_role = "code"


class NotebookParser(MystParser):
    """Shows a notebook with the outputs that are stored in it; nothing is executed."""

    supported = ("notebook",)

    def parse(self, inputstring, document):
        super().parse("\n\n".join(map(as_markdown, json.loads(inputstring)["cells"])), document)


def as_markdown(cell: dict) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        data = output.get("data", {"text/plain": output.get("text", "")})
        if "text/html" in data:
            html = re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.DOTALL)
            html = html.replace('border="1" class="dataframe"', 'class="docutils"')
            parts.append(f"````{{raw}} html\n<div class='table-wrapper'>{html}</div>\n````")
        else:
            parts.append("```text\n" + "".join(data["text/plain"]).rstrip() + "\n```")
    return "\n\n".join(parts)


def public_names() -> list[str]:
    names = [f"logitclip.{name}" for name in logitclip.__all__]
    for module in pkgutil.iter_modules(integrations.__path__, "logitclip.integrations."):
        names += [f"{module.name}.{name}" for name in importlib.import_module(module.name).__all__]
    return names


def check_reference(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn about public names that are not in the reference."""
    for name in public_names():
        if name not in env.domains.python_domain.objects:
            getLogger(__name__).warning("%s is public, but not in the reference", name, location="reference")


CODE = re.compile(r"`+[^`]+`+|--\w[\w-]*|\b\w+:\w+(?:[=,.]\w+)*")  # code that is marked, --seed, gce:q=0.7


def keep_sentences(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Keep sentences about fields, properties and what is returned whole; mark options and specs of fields as code.

    If the first line of such a text has a colon, Napoleon takes what stands before it for a type. So the first line
    becomes an empty comment. An argument that is only a letter, as K., would become an empty list.
    """
    lines[:] = [re.sub(r"^( +\w+: )(?=[A-Z]\.$)", r"\1\\", line) for line in lines]
    if what in ("attribute", "property") and lines:
        marked = [CODE.sub(lambda code: code[0] if "`" in code[0] else f"``{code[0]}``", line) for line in lines]
        lines[:] = ["..", "", *marked]
    elif "Returns:" in lines:
        start = lines.index("Returns:") + 1
        lines[start:start] = ["    ..", ""]


def shorten_numbers(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str, result: str
) -> tuple:
    """Show a default as -9.21, not with sixteen digits."""
    return re.sub(r"-?\d+\.\d{7,}", lambda number: f"{float(number[0]):.3g}", signature or "") or None, result


def hide_notes(app: Sphinx) -> None:
    """Show the types of options without bounds and other notes, which are for checks and for the command line."""
    for kind in (logitclip.RunConfig, Settings):
        kind.__annotations__ = typing.get_type_hints(kind)


def check_pages(app: Sphinx, error: Exception | None) -> None:
    """Stop the build if the reference shows the insides of an annotation."""
    for page in Path(app.outdir, "reference").glob("*.html"):
        shown = re.search(r"&lt;locals&gt;|Annotated\[", re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))
        if error is None and shown:
            raise SphinxError(f"{page} shows {shown[0]}: hide_notes in conf.py is for annotations with notes.")


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", hide_notes)
    app.connect("autodoc-process-signature", shorten_numbers)
    app.connect("autodoc-process-docstring", keep_sentences, priority=400)  # before Napoleon, which has 500
    app.connect("env-check-consistency", check_reference)
    app.connect("build-finished", check_pages)
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
