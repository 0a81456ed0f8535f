"""The origin of a node: the modules being called, the pipeline stage, the user's line of code.

The current origin uses torch.fx's own mechanism for node metadata. So every node that is made while
it is set has it, and passes that rebuild nodes copy it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch.fx
import torch.fx.traceback as fx_traceback

from popsim_torch.ir import NOWHERE, Origin
from popsim_torch.trace.graph.precision import FloatPrecision

_CHANNEL = "custom"
_KEY = "popsim"
_PRECISION = "popsim_precision"
_DRAW = "popsim_draw"
_GRADIENT = "popsim_gradient"
_IN_HOOK = "popsim_hook"
_KEPT = "popsim_kept"
_OWN_PATHS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


@contextmanager
def recording() -> Iterator[None]:
    """Give the current origin to nodes made in this scope."""
    with fx_traceback.preserve_node_meta():
        try:
            yield
        finally:
            fx_traceback.get_current_meta().pop(_CHANNEL, None)


def set_origin(origin: Origin) -> None:
    """Make ``origin`` the origin of new nodes, until the next call.

    They also keep the precision that PyTorch's settings have now: forward may change it, and the
    backward pass reads it when it runs.
    """
    channel: dict[str, Any] = {_KEY: origin}
    precision = FloatPrecision.now()
    if precision != FloatPrecision():
        channel[_PRECISION] = precision
    fx_traceback.get_current_meta()[_CHANNEL] = channel


def current_origin() -> Origin:
    """Return the present origin of new nodes."""
    origin: Origin = fx_traceback.get_current_meta().get(_CHANNEL, {}).get(_KEY, NOWHERE)
    return origin


def origin_of(node: torch.fx.Node) -> Origin:
    """Return the origin of a node; an empty one for nodes made outside of ``recording``."""
    origin: Origin = node.meta.get(_CHANNEL, {}).get(_KEY, NOWHERE)
    return origin


def precision_of(node: torch.fx.Node) -> FloatPrecision:
    """Return the precision of float32 products that a node was recorded with."""
    precision: FloatPrecision = node.meta.get(_CHANNEL, {}).get(_PRECISION, FloatPrecision())
    return precision


def copy_channel() -> dict[str, Any]:
    """Return the present metadata of new nodes: the origin, and torch.fx's other entries."""
    channel = fx_traceback.get_current_meta().get(_CHANNEL)
    return {} if channel is None else {_CHANNEL: dict(channel)}


def move_to_stage(node: torch.fx.Node, stage: int) -> None:
    """Change the pipeline stage in a node's origin."""
    origin = replace(origin_of(node), stage=stage)
    node.meta[_CHANNEL] = {**node.meta.get(_CHANNEL, {}), _KEY: origin}


def number_draw(node: torch.fx.Node, numbers: Iterator[int]) -> None:
    """Mark a node that draws random numbers: its copies draw the same ones."""
    channel = node.meta.get(_CHANNEL, {})
    if _DRAW not in channel:
        node.meta[_CHANNEL] = {**channel, _DRAW: next(numbers)}


def draw_of(node: torch.fx.Node) -> object:
    """Return an id that a node that draws random numbers shares with its copies."""
    return node.meta.get(_CHANNEL, {}).get(_DRAW, node)


def note_gradient(node: torch.fx.Node, key: int) -> None:
    """Record in a node of a body which mark shows the gradient of its result."""
    node.meta[_CHANNEL] = {**node.meta.get(_CHANNEL, {}), _GRADIENT: key}


def gradient_key_of(node: torch.fx.Node) -> int | None:
    """Return the key of the mark that shows the gradient of a body's node; None without one."""
    key: int | None = node.meta.get(_CHANNEL, {}).get(_GRADIENT)
    return key


def note_hook(node: torch.fx.Node) -> None:
    """Record in a node that a gradient hook has made it."""
    node.meta[_CHANNEL] = {**node.meta.get(_CHANNEL, {}), _IN_HOOK: True}


def note_kept(node: torch.fx.Node) -> None:
    """Keep a node in the program, even if nothing reads its result."""
    node.meta[_CHANNEL] = {**node.meta.get(_CHANNEL, {}), _KEPT: True}


def is_kept(node: torch.fx.Node) -> bool:
    """Return whether a node stays in the program even if nothing reads its result."""
    return _KEPT in node.meta.get(_CHANNEL, {})


def is_of_hook(node: torch.fx.Node) -> bool:
    """Return whether a gradient hook has made a node."""
    return _IN_HOOK in node.meta.get(_CHANNEL, {})


@contextmanager
def origin_kept() -> Iterator[None]:
    """Restore the present origin of new nodes after this scope."""
    meta = fx_traceback.get_current_meta()
    before = meta.get(_CHANNEL)
    try:
        yield
    finally:
        meta.pop(_CHANNEL, None)
        if before is not None:
            meta[_CHANNEL] = before


def is_user_code(frame: FrameType) -> bool:
    """Return whether a frame is user code: not PyTorch, this package or Python's start-up."""
    path = frame.f_code.co_filename
    # torch.fx calls functions through a lambda that it evaluates from a string.
    is_evaluated = path == "<string>" and "__name__" not in frame.f_globals
    return not is_evaluated and is_user_path(path)


def is_user_path(path: str) -> bool:
    """Return whether a file is the user's: not of PyTorch, this package or Python's start-up."""
    return not path.startswith((*_OWN_PATHS, "<frozen "))


def user_line(before: str = "", excludes: Sequence[str] = ()) -> str:
    """Return ``file:line`` of the innermost frame outside of torch and of this package.

    Args:
        before: Text before the result.
        excludes: Parts of paths. A frame whose path contains one is returned only if all frames do.

    Returns:
        An empty string if there is no such frame.
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
