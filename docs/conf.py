"""The documentation site: `make docs` builds it offline, and a warning is an error."""

import logitclip

project = "logitclip"
author = "The logitclip developers"
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
html_title = f"logitclip {version}"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
nitpicky = False
default_role = "code"
