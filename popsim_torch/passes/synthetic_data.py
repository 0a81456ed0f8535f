"""Inputs that the device makes itself, so that a run reads nothing from the host."""

from __future__ import annotations

import enum
import math
from typing import Any

import torch

from popsim_torch.dtypes import dtype_name, is_continuous
from popsim_torch.ir import Op, Phase, Program, Tensor, TensorKind, Uses


class SyntheticData(enum.IntEnum):
    """The kind of inputs that the device makes; the values of the option ``syntheticDataMode``."""

    NONE = 0
    """The device reads the host's tensors."""
    ZEROS = 1
    NORMAL = 2


_CHECK = "aten::_assert_async"
_RANGE_CHECK = "within"
_FIRST_STREAM = 2**30
"""The first stream for inputs; the streams of the model's random calls start at 0."""


def make_inputs(program: Program, data: SyntheticData) -> None:
    """Make a program draw its inputs, in place.

    Real and complex inputs get normally distributed numbers, new ones for every micro-batch and
    keyed like other random numbers; or zeros. Other inputs are 0 and False, which every embedding
    table and every loss accepts, except ``ctc_loss`` with concatenated targets, whose lengths must
    add up. Checks of values (``torch._assert_async``) are not made if there are such numbers: the
    probabilities that ``binary_cross_entropy`` needs are not normally distributed.

    Args:
        program: The program; its inputs become values and constants. Changes that forward makes to
            them are not returned.
        data: The kind of the inputs.
    """
    if data == SyntheticData.NONE:
        return
    uses = Uses(program.graph)
    draws = []
    inputs = [t for t in program.graph.tensors if t.kind == TensorKind.INPUT]
    for position, tensor in enumerate(inputs):
        if data == SyntheticData.NORMAL and is_continuous(tensor.dtype):
            stages = [op.stage for op in uses.readers(tensor.id) if op.phase == Phase.FORWARD]
            tensor.kind = TensorKind.VALUE
            stream, stage = _FIRST_STREAM + position, min(stages, default=0)
            draw = _draw(program.graph.as_real(tensor), stream, stage)
            if tensor.dtype.is_complex:  # whose two parts have the variance together
                draw.attributes["std"] = math.sqrt(0.5)
            draws.append(draw)
        else:
            tensor.kind = TensorKind.CONSTANT
            tensor.value = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    ops = program.graph.ops
    if draws:
        ops[:] = [
            op for op in ops if op.kind != _RANGE_CHECK and op.attributes.get("operator") != _CHECK
        ]
    num_setup = sum(op.phase == Phase.SETUP for op in ops)
    ops[num_setup:num_setup] = draws
    program.changed_inputs.clear()


def _draw(tensor: Tensor, stream: int, stage: int) -> Op:
    attributes: dict[str, Any] = {
        "distribution": "normal",
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "mean": 0.0,
        "std": 1.0,
        "stream": stream,
    }
    return Op("random", [], [tensor.id], attributes, Phase.FORWARD, stage, tensor.name)
