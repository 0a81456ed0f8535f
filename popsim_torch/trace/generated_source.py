"""The Python source that torch.fx generates for every graph."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import graph_module


@contextmanager
def forgotten_source() -> Iterator[None]:
    """Take back the source of the graphs that are made inside, which nobody calls.

    torch.fx keeps it for as long as the process lives, for the sake of tracebacks: a program that
    compiles one model after the other would grow by it.
    """
    kept = graph_module._loader.eval_cache
    before = set(kept)
    try:
        yield
    finally:
        for name in set(kept) - before:
            kept.pop(name, None)
            linecache.cache.pop(name, None)
