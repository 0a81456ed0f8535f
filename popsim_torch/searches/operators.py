"""The operators that the search functions call: each becomes one op of the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from popsim_torch.searches.one_op import run_one_op
from popsim_torch.trace.graph.markers import NAMESPACE
from popsim_torch.typed_torch import new_library

__all__ = ["CTC_BEAM_SEARCH", "FPS", "NEAREST"]

_Tensor = torch.Tensor


def _fps(
    points: _Tensor, _starts: _Tensor | None, _bounds: Sequence[int], counts: Sequence[int]
) -> _Tensor:
    return points.new_empty((sum(counts),), dtype=torch.int64)


def _fps_on_host(
    points: _Tensor, starts: _Tensor | None, bounds: Sequence[int], counts: Sequence[int]
) -> _Tensor:
    attributes = {"bounds": list(bounds), "counts": list(counts)}
    (rows,) = run_one_op("fps", [points, starts], [(torch.int64, (sum(counts),))], attributes)
    return rows


def _nearest(x: _Tensor, _y: _Tensor, _of_x: _Tensor | None, _of_y: _Tensor | None) -> _Tensor:
    return x.new_empty((x.shape[0],), dtype=torch.int64)


def _nearest_on_host(
    x: _Tensor, y: _Tensor, batch_x: _Tensor | None, batch_y: _Tensor | None
) -> _Tensor:
    inputs = [x, y, batch_x, batch_y]
    (rows,) = run_one_op("nearest", inputs, [(torch.int64, (x.shape[0],))], {})
    return rows


def _beam_search(
    log_probs: _Tensor, _lengths: _Tensor, _blank: int, _beam_width: int, top_paths: int
) -> tuple[_Tensor, _Tensor, _Tensor]:
    steps, items, _classes = log_probs.shape
    of_paths = (items, top_paths)
    return (
        log_probs.new_empty(of_paths),
        log_probs.new_empty(of_paths, dtype=torch.int64),
        log_probs.new_empty((*of_paths, steps), dtype=torch.int64),
    )


def _beam_search_on_host(
    log_probs: _Tensor, lengths: _Tensor, blank: int, beam_width: int, top_paths: int
) -> tuple[_Tensor, ...]:
    steps, items, _classes = log_probs.shape
    of_paths = (items, top_paths)
    results = [
        (log_probs.dtype, of_paths),
        (torch.int64, of_paths),
        (torch.int64, (*of_paths, steps)),
    ]
    attributes = {"blank": blank, "beam_width": beam_width, "top_paths": top_paths}
    return tuple(run_one_op("ctc_beam_search", [log_probs, lengths], results, attributes))


def _define(name: str, schema: str, shapes: Callable[..., Any], on_host: Callable[..., Any]) -> Any:
    """Define ``popsim::<name>``, which is called with tensors that need no gradient.

    Args:
        name: The name of the operator.
        schema: The arguments and results of the operator.
        shapes: Returns empty results.
        on_host: Computes the results from host tensors.

    Returns:
        An object to keep: the operator exists as long as this object.
    """
    library = new_library(NAMESPACE, "FRAGMENT")
    library.define(f"{name}{schema}")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=library)
    library.impl(name, on_host, "CPU")
    return library


# Keep these objects, because the operators exist as long as they do.
_libraries = (
    _define(
        "fps",
        "(Tensor points, Tensor? starts, int[] bounds, int[] counts) -> Tensor",
        _fps,
        _fps_on_host,
    ),
    _define(
        "nearest",
        "(Tensor x, Tensor y, Tensor? batch_x, Tensor? batch_y) -> Tensor",
        _nearest,
        _nearest_on_host,
    ),
    _define(
        "ctc_beam_search_decoder",
        "(Tensor log_probs, Tensor lengths, int blank, int beam_width, int top_paths) -> "
        "(Tensor, Tensor, Tensor)",
        _beam_search,
        _beam_search_on_host,
    ),
)

FPS = torch.ops.popsim.fps.default
NEAREST = torch.ops.popsim.nearest.default
CTC_BEAM_SEARCH = torch.ops.popsim.ctc_beam_search_decoder.default
