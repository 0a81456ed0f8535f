"""Recurrent layers for packed sequences, if their lengths are known during the trace.

The rows of a packed sequence are those of all sequences that have a first step, then those of all
that have a second one, and so on. Steps with the same number of sequences are a padded sequence of
their own. So a layer is ``popsim::recurrent`` for each of these blocks; its states go from block to
block, and those of sequences that end (or, backwards, begin) are split off (or added).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

import torch

from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.trace.graph.traced_tensors import host_computation, is_traced

__all__ = ["KnownValue", "blocks_of", "known_sizes", "packing_call", "run_blocks"]

KnownValue = Callable[[torch.Tensor], torch.Tensor | None]
Layer = Callable[[torch.Tensor, tuple[torch.Tensor, ...]], tuple[Any, tuple[torch.Tensor, ...]]]


def packing_call(
    known_value: KnownValue, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a replacement for a call that packs or unpacks sequences of known lengths; else None.

    Args:
        known_value: Returns the values of a tensor; None if they differ from run to run.
        name: The called function's name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if name not in _CALLS or kwargs or not is_traced(args[0]):
        return None
    sizes = known_sizes(known_value, args[1])
    return None if sizes is None else functools.partial(_CALLS[name], args[0], sizes, *args[2:])


def known_sizes(known_value: KnownValue, tensor: Any) -> list[int] | None:
    """Return the values of a tensor of integers; None if only a run knows them."""
    known = known_value(tensor) if isinstance(tensor, torch.Tensor) else None
    if known is None:
        return None
    with host_computation(), DisableTorchFunction():
        found: list[int] = known.tolist()
    return found


def _on_host(numbers: list[int]) -> torch.Tensor:
    with host_computation(), DisableTorchFunction():
        return torch.tensor(numbers, dtype=torch.int64)


def _pack(
    padded: torch.Tensor, lengths: list[int], batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``torch._pack_padded_sequence`` for lengths in descending order."""
    x = padded.transpose(0, 1) if batch_first else padded
    if len(lengths) != x.shape[1]:
        raise RuntimeError(
            f"Expected `len(lengths)` to be equal to batch_size, but got {len(lengths)} "
            f"(batch_size={x.shape[1]})"
        )
    if not lengths or lengths[-1] <= 0:
        raise RuntimeError(
            "Length of all samples has to be greater than 0, but found an element in 'lengths' "
            "that is <= 0"
        )
    if any(a < b for a, b in pairwise(lengths)):
        raise RuntimeError(
            "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. You "
            "can pass `enforce_sorted=False` to pack_padded_sequence and/or pack_sequence to "
            "sidestep this requirement if you do not need ONNX exportability."
        )
    if lengths[0] > x.shape[0]:
        raise RuntimeError(
            f"The longest of the lengths, {lengths[0]}, is more than the {x.shape[0]} steps of the "
            "padded sequence."
        )
    sizes = [sum(length > step for length in lengths) for step in range(lengths[0])]
    rows = [x[step, :size] for step, size in enumerate(sizes)]
    return torch.cat(rows), _on_host(sizes)


def _pad(
    data: torch.Tensor,
    sizes: list[int],
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``torch._pad_packed_sequence``."""
    steps = len(sizes)
    if total_length > 0:
        if total_length < steps:
            raise RuntimeError(
                "Expected total_length to be at least the length of the longest sequence in "
                f"input, but got total_length={total_length} and max sequence length being {steps}"
            )
        steps = total_length
    padding = data.new_full((1, *data.shape[1:]), padding_value)
    starts = [sum(sizes[:step]) for step in range(len(sizes))]
    places = [
        starts[step] + row if step < len(sizes) and row < sizes[step] else data.shape[0]
        for step in range(steps)
        for row in range(sizes[0])
    ]
    index = torch.tensor(places, device=data.device)
    padded = torch.cat([data, padding]).index_select(0, index)
    padded = padded.reshape(steps, sizes[0], *data.shape[1:])
    lengths = [sum(size > row for size in sizes) for row in range(sizes[0])]
    return padded.transpose(0, 1) if batch_first else padded, _on_host(lengths)


_CALLS: dict[str, Callable[..., Any]] = {
    "_pack_padded_sequence": _pack,
    "_pad_packed_sequence": _pad,
}


def blocks_of(sizes: list[int]) -> list[tuple[int, int]]:
    """Return the number of steps of each block, and how many sequences they have."""
    return [(len(list(steps)), size) for size, steps in groupby(sizes)]


def run_blocks(
    data: torch.Tensor,
    states: tuple[torch.Tensor, ...],
    blocks: list[tuple[int, int]],
    layer: Layer,
    *,
    reverse: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the packed results of a layer in one direction, and its final states.

    Args:
        data: The rows of a packed sequence.
        states: The initial states of all sequences.
        blocks: See ``blocks_of``.
        layer: Computes a padded sequence and final states from such.
        reverse: Whether the layer begins with the last step.
    """
    counts = [steps * size for steps, size in blocks]
    parts = list(zip(torch.split(data, counts), blocks, strict=True))
    results: list[torch.Tensor] = []
    ended: list[tuple[torch.Tensor, ...]] = []
    present = tuple(state[: blocks[-1 if reverse else 0][1]] for state in states)
    for part, (steps, size) in reversed(parts) if reverse else parts:
        given = present[0].shape[0]
        if size < given:
            ended.append(tuple(state[size:] for state in present))
            present = tuple(state[:size] for state in present)
        elif size > given:
            pairs = zip(present, states, strict=True)
            present = tuple(torch.cat([now, first[given:size]]) for now, first in pairs)
        y, present = layer(part.reshape(steps, size, -1), present)
        results.append(y.reshape(steps * size, -1))
    rows = torch.cat(results[::-1] if reverse else results)
    final = [present, *reversed(ended)]
    return rows, tuple(torch.cat(pieces) for pieces in zip(*final, strict=True))
