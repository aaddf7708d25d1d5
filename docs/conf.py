"""Sphinx configuration: `sphinx-build -W -b html docs build/docs`."""

from __future__ import annotations

from elsa_core.base.version import __version__

project = "elsa"
author = "The elsa authors"
release = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
html_theme = "furo"
html_title = f"elsa {release}"
suppress_warnings = ["myst.header", "docutils"]
