"""Runs one op on images, contiguous or with their channels last."""

from collections.abc import Sequence

import torch

from popsim_torch import _native, ir
from popsim_torch.passes.native_graph import to_native
from tests.ops.one_op import infer_types

TypeAndShape = tuple[torch.dtype, Sequence[int]]


def run_image_op(
    kind: str,
    inputs: Sequence[torch.Tensor | None],
    outputs: Sequence[TypeAndShape | None],
    attributes: dict,
    *,
    channels_last: bool = False,
) -> list[torch.Tensor]:
    """Return what an op writes.

    Args:
        kind: Its name.
        inputs: Operands, with the strides they are given with.
        outputs: Types and shapes that the results have in eager PyTorch, as the op's shape rule
            must say, too.
        attributes: Of the op.
        channels_last: Results with spatial axes have their channels last.
    """
    graph = ir.Graph()
    written = []

    def add_input(value: torch.Tensor | None) -> ir.Tensor | None:
        if value is None:
            return None
        count = value.untyped_storage().nbytes() // value.element_size()
        base = graph.add_tensor(ir.TensorKind.VARIABLE, value.dtype, (count,))
        written.append((base, value.as_strided((count,), (1,), 0)))
        return graph.add_view(base, value.shape, value.stride(), value.storage_offset())

    def add_output(dtype: torch.dtype, shape: Sequence[int]) -> ir.Tensor:
        if not channels_last or len(shape) < 3:
            return graph.add_tensor(ir.TensorKind.VARIABLE, dtype, shape)
        base = graph.add_tensor(ir.TensorKind.VARIABLE, dtype, (shape[0], *shape[2:], shape[1]))
        batch, *positions, channel = base.strides
        return graph.add_view(base, shape, (batch, channel, *positions), 0)

    operands = [add_input(value) for value in inputs]
    op = graph.add_op(kind, operands, [], attributes, phase=ir.Phase.FORWARD, name="op")
    inferred = infer_types(graph)
    assert inferred == [None if out is None else (out[0], tuple(out[1])) for out in outputs]
    results = [add_output(*out) for out in inferred if out is not None]
    op.outputs = [result.id for result in results]
    with _native.translated_errors():
        config = _native.RunConfig(1, 1, False, "sequential")
        executable = _native.Executable(to_native(graph), config)
        executable.load()
        for base, memory in written:
            executable.write(base.id, memory)
        executable.run([])
        roots = [executable.read(graph.root(result).id) for result in results]
    return [
        memory.as_strided(result.shape, result.strides)
        for memory, result in zip(roots, results, strict=True)
    ]


def convolution_attributes(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int = 1
) -> dict:
    """Return the attributes that a convolution and its gradients share."""
    return {
        "stride": list(stride),
        "padding": list(padding),
        "dilation": list(dilation),
        "output_padding": [0] * len(stride),
        "transposed": False,
        "groups": groups,
    }


def with_channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 2 else x


def random(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tuple(shape), dtype=torch.float64).to(dtype)
