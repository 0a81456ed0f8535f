"""Where a node comes from: the modules being called, the pipeline stage, the user's line of code.

The current origin travels on torch.fx's own channel for node metadata, so that every node made
while it is set carries it, and passes that rebuild nodes copy it along.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch.fx
import torch.fx.traceback as fx_traceback

from popsim_torch.ir import NOWHERE, Origin

_CHANNEL = "custom"
_KEY = "popsim"
_OWN_PATHS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


@contextmanager
def recording() -> Iterator[None]:
    """Let nodes made in this scope carry the current origin."""
    with fx_traceback.preserve_node_meta():
        try:
            yield
        finally:
            fx_traceback.get_current_meta().pop(_CHANNEL, None)


def set_origin(origin: Origin) -> None:
    """Make ``origin`` the one that new nodes get, until it is set again."""
    fx_traceback.get_current_meta()[_CHANNEL] = {_KEY: origin}


def origin_of(node: torch.fx.Node) -> Origin:
    """Return the origin of a node; an empty one for nodes made outside of ``recording``."""
    origin: Origin = node.meta.get(_CHANNEL, {}).get(_KEY, NOWHERE)
    return origin


def user_line(before: str = "") -> str:
    """Return ``file:line`` of the innermost frame outside of torch and of this package.

    Args:
        before: Put in front of it.

    Returns:
        An empty string when there is no such frame.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_OWN_PATHS):
            return f"{before}{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
