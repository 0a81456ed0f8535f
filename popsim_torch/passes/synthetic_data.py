"""Inputs that the device makes by itself, so that a run reads nothing of the host's."""

from __future__ import annotations

import enum
from typing import Any

import torch

from popsim_torch.dtypes import dtype_name
from popsim_torch.ir import Op, Phase, Program, Tensor, TensorKind, Uses


class SyntheticData(enum.IntEnum):
    """What the device makes as inputs; the values of the back end's ``syntheticDataMode``."""

    NONE = 0
    """It reads the host's tensors."""
    ZEROS = 1
    NORMAL = 2


_FIRST_STREAM = 2**30
"""Streams of the model's own random calls are counted from 0."""


def make_inputs(program: Program, data: SyntheticData) -> None:
    """Let a program draw its inputs, in place.

    Floating-point inputs get numbers of the normal distribution, new ones for every micro-batch
    and keyed like other random numbers; or zeros. Others are 0 and False, which every table of an
    embedding and every loss accepts, but for ``ctc_loss`` with concatenated targets: their lengths
    have to add up.

    Args:
        program: Its inputs become values and constants; what forward changes of them is not
            brought back.
        data: What inputs hold.
    """
    if data == SyntheticData.NONE:
        return
    uses = Uses(program.graph)
    draws = []
    inputs = [t for t in program.graph.tensors if t.kind == TensorKind.INPUT]
    for position, tensor in enumerate(inputs):
        if data == SyntheticData.NORMAL and tensor.dtype.is_floating_point:
            stages = [op.stage for op in uses.readers(tensor.id) if op.phase == Phase.FORWARD]
            tensor.kind = TensorKind.VALUE
            draws.append(_draw(tensor, _FIRST_STREAM + position, min(stages, default=0)))
        else:
            tensor.kind = TensorKind.CONSTANT
            tensor.value = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    ops = program.graph.ops
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
