"""Checks of shapes that PyTorch's operators assume without a check.

Autograd calls a gradient operator with tensors that fit its forward operator. A file may contain
other calls, and PyTorch's code for the CPU then reads and writes outside of the tensors. These
cases were found by calling each operator of ``operators.py`` with other shapes, on memory that ends
where its tensors end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["SHAPES", "Check"]

Check = Callable[[list[Any]], "str | None"]
"""Gets the arguments of a call, with tensors without data; returns the problem, or None."""


def _same(*positions: int) -> Check:
    """Return a check that some tensors among the arguments have the same shape."""

    def check(arguments: list[Any]) -> str | None:
        shapes = [tuple(arguments[i].shape) for i in positions]
        return None if len(set(shapes)) == 1 else f"with tensors of the shapes {shapes}"

    return check


def _as_result(forward: Callable[..., torch.Tensor]) -> Check:
    """Return a check that the first argument has the shape of a function's result.

    Args:
        forward: The function, which gets all arguments.
    """

    def check(arguments: list[Any]) -> str | None:
        shape = tuple(arguments[0].shape)
        try:
            results: Any = forward(*arguments)
            expected = tuple((results[0] if isinstance(results, tuple) else results).shape)
        except (RuntimeError, TypeError, ValueError) as error:
            return f"with numbers that its forward does not take ({error})"
        return None if shape == expected else f"with a gradient of {shape}, not {expected}"

    return check


def _all(*checks: Check) -> Check:
    """Return a check that runs several checks, and returns the first problem."""

    def check(arguments: list[Any]) -> str | None:
        found = (one(arguments) for one in checks)
        return next((problem for problem in found if problem is not None), None)

    return check


def _has_elements(arguments: list[Any]) -> str | None:
    empty = any(isinstance(a, torch.Tensor) and a.numel() == 0 for a in arguments)
    return "with a tensor without elements" if empty else None


def _batch_norm_vectors(arguments: list[Any]) -> str | None:
    gradient, x, *vectors = arguments[:7]
    if x.dim() < 2 or gradient.shape != x.shape:
        return f"with a gradient of {tuple(gradient.shape)} for {tuple(x.shape)}"
    sizes = {tuple(v.shape) for v in vectors if v is not None}
    return None if sizes <= {(x.shape[1],)} else f"with {sizes} for {x.shape[1]} channels"


def _grid_gradient(arguments: list[Any]) -> str | None:
    """Return the problem with the gradient of a sampled image, which has the shape of the grid."""
    gradient, x, grid = arguments[:3]
    rank = x.dim() - 2
    fits = (
        grid.dim() == x.dim()
        and grid.shape[-1] == rank
        and gradient.shape == (*x.shape[:2], *grid.shape[1:-1])
        and grid.shape[0] == x.shape[0]
    )
    shapes = [tuple(t.shape) for t in arguments[:3]]
    return None if fits else f"with tensors of the shapes {shapes}"


def _distances(arguments: list[Any]) -> str | None:
    """Return the problem with distances of rows and their gradient: both need one per pair."""
    gradient, x, _, distances = arguments
    rows = x.shape[0] if x.dim() == 2 else 0
    pairs = (rows * (rows - 1) // 2,)
    shapes = [tuple(t.shape) for t in (gradient, distances)]
    return None if shapes == [pairs, pairs] else f"with {shapes} for {rows} rows"


def _labels(arguments: list[Any]) -> str | None:
    """Return the problem with labels: one per sample is needed, and one weight per class."""
    x, labels, weight = arguments[1:4]
    axis = 0 if x.dim() == 1 else 1
    samples = [size for i, size in enumerate(x.shape) if i != axis]
    fits = x.dim() > 0 and list(labels.shape) in (samples, samples or [1])
    fits = fits and (weight is None or tuple(weight.shape) == (x.shape[axis],))
    return None if fits else f"with labels of {tuple(labels.shape)} for {tuple(x.shape)}"


def _transform(arguments: list[Any]) -> str | None:
    """Return the problem with a Fourier transform: its axes must exist, each once."""
    x, axes, norm = arguments[:3]
    rank = x.dim()
    places = [axis % rank if -rank <= axis < rank else None for axis in axes] if rank else [None]
    if None in places or len(set(places)) < len(places) or not places:
        return f"along the axes {axes} of a tensor of {rank}"
    return None if norm in (0, 1, 2) else f"with the norm {norm}"


def _transform_to_real(arguments: list[Any]) -> str | None:
    """Return the problem with a transform to real numbers, of which half the numbers are given."""
    x, axes, _, size = arguments
    given = x.shape[axes[-1]]
    fits = size >= 1 and given == size // 2 + 1
    return None if fits else f"to {size} numbers from {given}"


def _shape_checks() -> Iterator[tuple[str, Check]]:
    aten: Any = torch.ops.aten
    for name in ("_softmax", "_log_softmax"):
        yield f"{name}_backward_data", _same(0, 1)
    for name in ("reflection_pad", "replication_pad"):
        for rank in (1, 2, 3):
            forward = getattr(aten, f"{name}{rank}d").default
            yield f"{name}{rank}d_backward", _as_result(lambda _, *rest, f=forward: f(*rest))
    for rank in (2, 3):
        average = getattr(aten, f"avg_pool{rank}d").default
        yield f"avg_pool{rank}d_backward", _as_result(lambda _, *rest, f=average: f(*rest))
        adaptive = getattr(aten, f"_adaptive_avg_pool{rank}d").default
        yield (
            f"_adaptive_avg_pool{rank}d_backward",
            _all(_has_elements, _as_result(lambda g, x, f=adaptive, r=rank: f(x, g.shape[-r:]))),
        )
        largest = getattr(aten, f"max_pool{rank}d_with_indices").default
        yield (
            f"max_pool{rank}d_with_indices_backward",
            _all(_same(0, -1), _as_result(lambda _, *rest, f=largest: f(*rest[:-1]))),
        )
        adaptive = getattr(aten, f"adaptive_max_pool{rank}d").default
        yield (
            f"adaptive_max_pool{rank}d_backward",
            _all(_same(0, -1), _as_result(lambda g, x, _, f=adaptive, r=rank: f(x, g.shape[-r:]))),
        )
        yield f"grid_sampler_{rank}d_backward", _all(_has_elements, _grid_gradient)
    yield (
        "unfold_backward",
        _as_result(
            lambda _, sizes, *rest: aten.unfold.default(torch.empty(sizes, device="meta"), *rest)
        ),
    )
    yield "_fft_c2c", _transform
    yield "_fft_r2c", _transform
    yield "_fft_c2r", _all(_transform, _transform_to_real)
    yield "native_batch_norm_backward", _batch_norm_vectors
    yield "_pdist_backward", _all(_has_elements, _distances)
    yield "nll_loss_backward", _labels
    yield "nll_loss2d_backward", _labels


SHAPES: dict[str, Check] = {f"aten::{name}": check for name, check in _shape_checks()}
"""The checks, by operator."""
