"""How Sphinx builds these pages: ``make docs``."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from popsim_torch import __version__

project = "popsim_torch"
author = "The popsim_torch authors"
copyright = "the popsim_torch authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "links",
    "public",
    "rewrites",
    "surface",
    "tutorial_pages",
]
if find_spec("sphinx_copybutton"):  # (an environment that is older than this requirement)
    extensions.append("sphinx_copybutton")
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"  # code, not what it prints
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}
exclude_patterns = ["build"]

html_theme = "furo"
html_title = f"popsim_torch {release}"

autodoc_member_order = "bysource"
# Every class shows all its members; those of these bases are Python's or PyTorch's to describe.
autodoc_default_options = {
    "members": True,
    "inherited-members": "AbstractContextManager, Adam, AdamW, DataLoader, Enum, Exception, "
    "IntEnum, Module, Protocol, RMSprop, SGD",
    "special-members": "__call__, __getitem__, __iter__, __len__, __next__",
}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_use_rtype = False


def _break_after_colon(_app, what, _name, _obj, _options, lines):
    """Keep napoleon from reading "Not chosen: ..." of an attribute as a type and a text.

    It does so only if the text is on the line of the colon. Types stand in the annotations.
    """
    if what in ("attribute", "property", "data") and lines and ": " in lines[0]:
        head, _, text = lines[0].partition(": ")
        lines[:1] = [f"{head}:", text]


def setup(app):
    """Connect what the settings above cannot say."""
    app.connect("autodoc-process-docstring", _break_after_colon, priority=400)  # napoleon has 500
