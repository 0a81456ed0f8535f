"""What docs/public.py says of the public names."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def _load():
    spec = importlib.util.spec_from_file_location("docs_public", DOCS / "public.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PUBLIC = _load()
