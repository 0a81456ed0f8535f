"""The Sphinx extensions of the pages: public names, links to them, pages of tutorials."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def _load(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PUBLIC = _load("public")
LINKS = _load("links")
TUTORIALS = _load("tutorial_pages")
