"""Runs an op of the device on host tensors, for calls outside of a compiled model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from popsim_torch import _native
from popsim_torch.dtypes import dtype_name

__all__ = ["run_one_op"]

_NO_TENSOR = -1


def run_one_op(
    kind: str,
    inputs: Sequence[torch.Tensor | None],
    results: Sequence[tuple[torch.dtype, Sequence[int]]],
    attributes: Mapping[str, Any],
) -> list[torch.Tensor]:
    """Run an op once, and return its results.

    Args:
        kind: Name in the op registry.
        inputs: Tensors on the host that are not empty; None for an input that is left out.
        results: Dtype and shape of each result.
        attributes: The attributes that the registry entry needs.

    Raises:
        Error: The op refuses the given values.
    """
    graph = _native.Graph()

    def add(place: _native.TensorKind, dtype: torch.dtype, shape: Sequence[int]) -> int:
        strides = torch.empty(tuple(shape), device="meta").stride()
        return graph.add_tensor("", place, dtype_name(dtype), list(shape), list(strides))

    given = [None if tensor is None else tensor.contiguous() for tensor in inputs]
    sources = [
        _NO_TENSOR if tensor is None else add(_native.TensorKind.INPUT, tensor.dtype, tensor.shape)
        for tensor in given
    ]
    targets = [add(_native.TensorKind.VARIABLE, *result) for result in results]
    graph.add_op(kind, kind, sources, targets, attributes, _native.Phase.FORWARD, 0)
    config = _native.RunConfig(1, 1, False, "sequential")
    with _native.translated_errors():
        executable = _native.Executable(graph, config)
        executable.load()
        executable.run([tensor for tensor in given if tensor is not None])
        return [executable.read(target) for target in targets]
