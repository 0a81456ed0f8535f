"""Where a node comes from: the modules being called, the pipeline stage, the user's line of code.

The current origin travels on torch.fx's own channel for node metadata, so that every node made
while it is set carries it, and passes that rebuild nodes copy it along.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch.fx
import torch.fx.traceback as fx_traceback

from popsim_torch.ir import NOWHERE, Origin

_CHANNEL = "custom"
_KEY = "popsim"
_DRAW = "popsim_draw"
_GRADIENT = "popsim_gradient"
_IN_HOOK = "popsim_hook"
_KEPT = "popsim_kept"
_OWN_PATHS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


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


def current_origin() -> Origin:
    """Return the origin that new nodes get now."""
    origin: Origin = fx_traceback.get_current_meta().get(_CHANNEL, {}).get(_KEY, NOWHERE)
    return origin


def origin_of(node: torch.fx.Node) -> Origin:
    """Return the origin of a node; an empty one for nodes made outside of ``recording``."""
    origin: Origin = node.meta.get(_CHANNEL, {}).get(_KEY, NOWHERE)
    return origin


def copy_channel() -> dict[str, Any]:
    """Return the metadata that new nodes get now: the current origin, and all on its channel."""
    channel = fx_traceback.get_current_meta().get(_CHANNEL)
    return {} if channel is None else {_CHANNEL: dict(channel)}


def number_draw(node: torch.fx.Node, numbers: Iterator[int]) -> None:
    """Mark a node that draws random numbers: its copies draw the same ones."""
    channel = node.meta.get(_CHANNEL, {})
    if _DRAW not in channel:
        node.meta[_CHANNEL] = {**channel, _DRAW: next(numbers)}


def draw_of(node: torch.fx.Node) -> object:
    """Return what a node that draws random numbers has in common with its copies."""
    return node.meta.get(_CHANNEL, {}).get(_DRAW, node)


def note_gradient(node: torch.fx.Node, key: int) -> None:
    """Let a node of a body say which mark shows the gradient of its result."""
    node.meta[_CHANNEL] = {**node.meta.get(_CHANNEL, {}), _GRADIENT: key}


def gradient_key_of(node: torch.fx.Node) -> int | None:
    """Return the key of the mark that shows the gradient of a node of a body, if one does."""
    key: int | None = node.meta.get(_CHANNEL, {}).get(_GRADIENT)
    return key


def note_hook(node: torch.fx.Node) -> None:
    """Let a node say that a hook of a gradient has made it."""
    node.meta[_CHANNEL] = {**node.meta.get(_CHANNEL, {}), _IN_HOOK: True}


def note_kept(node: torch.fx.Node) -> None:
    """Let a node stay in the program, also if nobody reads its result."""
    node.meta[_CHANNEL] = {**node.meta.get(_CHANNEL, {}), _KEPT: True}


def is_kept(node: torch.fx.Node) -> bool:
    """Whether a node is to stay in the program, also if nobody reads its result."""
    return _KEPT in node.meta.get(_CHANNEL, {})


def is_of_hook(node: torch.fx.Node) -> bool:
    """Whether a hook of a gradient has made a node."""
    return _IN_HOOK in node.meta.get(_CHANNEL, {})


@contextmanager
def origin_kept() -> Iterator[None]:
    """Let new nodes have the origin again that they have now, after this scope."""
    meta = fx_traceback.get_current_meta()
    before = meta.get(_CHANNEL)
    try:
        yield
    finally:
        meta.pop(_CHANNEL, None)
        if before is not None:
            meta[_CHANNEL] = before


def is_user_code(frame: FrameType) -> bool:
    """Whether a frame is neither of PyTorch nor of this package nor of Python's start."""
    path = frame.f_code.co_filename
    # torch.fx calls functions through a lambda that it evaluates from a string.
    is_evaluated = path == "<string>" and "__name__" not in frame.f_globals
    return not is_evaluated and not path.startswith((*_OWN_PATHS, "<frozen "))


def user_line(before: str = "", excludes: Sequence[str] = ()) -> str:
    """Return ``file:line`` of the innermost frame outside of torch and of this package.

    Args:
        before: Put in front of it.
        excludes: Pieces of paths. A frame whose path contains one is returned only where all do.

    Returns:
        An empty string when there is no such frame.
    """
    excluded = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if is_user_code(frame):
            line = f"{before}{path}:{frame.f_lineno}"
            if not any(piece in path for piece in excludes):
                return line
            excluded = excluded or line
        frame = frame.f_back
    return excluded
