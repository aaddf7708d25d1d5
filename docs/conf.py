"""Sphinx configuration: `sphinx-build -W -b html docs build/docs`."""

from __future__ import annotations

import inspect
from html import escape
from operator import attrgetter
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

import elsa_core
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
myst_fence_as_directive = ["mermaid"]
exclude_patterns = ["_build"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
smartquotes_action = "qe"  # not D: the two dashes of an option stay two
html_theme = "furo"
html_title = f"elsa {release}"
html_static_path = ["static"]
html_css_files = ["wide.css"]
suppress_warnings = ["myst.header", "docutils"]


class Api(Directive):
    """`.. api:: attention State`: what autodoc says of these names of elsa_core."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        lines = StringList()
        for name in self.arguments[0].split():
            kind = "class" if inspect.isclass(attrgetter(name)(elsa_core)) else "function"
            lines.append(f".. auto{kind}:: elsa_core.{name}", "api.md")
        parent = nodes.Element()
        self.state.nested_parse(lines, 0, parent)
        return parent.children


class Mermaid(Directive):
    """A picture: drawn in the browser, its text where there is no network."""

    has_content = True
    _DRAW = (
        '<script type="module">import mermaid from '
        '"https://cdn.jsdelivr.net/npm/mermaid@11/dist/mermaid.esm.min.mjs";</script>'
    )

    def run(self) -> list[nodes.Node]:
        text = escape("\n".join(self.content))
        return [nodes.raw("", f'<pre class="mermaid">{text}</pre>{self._DRAW}', format="html")]


def setup(app: Any) -> None:
    app.add_directive("api", Api)
    app.add_directive("mermaid", Mermaid)
