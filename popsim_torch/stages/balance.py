"""Computes stages that take about equally long, from measured times of a model's layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.stages.assignment import get_pipeline_stage_assignment
from popsim_torch.stages.layers import PipelineStageRecord, leaves

__all__ = ["LayerTime", "TimedOp", "balanced_pipeline_stages", "layer_times"]

_BALANCED = "balanced_pipeline_stages"


class TimedOp(Protocol):
    """The attributes that the ops of a profile must have."""

    @property
    def phase(self) -> str:
        """``forward``, ``backward`` or ``update``."""

    @property
    def scope(self) -> str:
        """Path of the modules that the op belongs to."""

    @property
    def seconds(self) -> float:
        """The time of the op in one call."""


@dataclass
class LayerTime:
    """The time of a layer in one call, in seconds."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        """The time of both passes."""
        return self.forward + self.backward


def layer_times(
    records: Sequence[PipelineStageRecord], profile: Iterable[TimedOp], prefix: str = ""
) -> list[LayerTime]:
    """Return the time of each layer that has its own stage, in order.

    Args:
        records: The layers.
        profile: The result of ``executor.profile``.
        prefix: The name of their model in the profiled model; empty if it is the profiled model.
    """
    layers = list(leaves(records))
    times = [LayerTime() for _ in layers]
    start = f"{prefix}." if prefix else ""
    place = {f"{start}{record.name}": number for number, record in enumerate(layers)}
    for op in profile:
        path = op.scope.split("/")
        names = itertools.accumulate(path, "{}.{}".format)
        number = next((place[name] for name in names if name in place), None)
        if number is None:
            continue
        if op.phase == "forward":
            times[number].forward += op.seconds
        elif op.phase == "backward":
            times[number].backward += op.seconds
    return times


def balanced_pipeline_stages(
    model: nn.Module, profile: Iterable[TimedOp], num_stages: int, *, prefix: str = ""
) -> list[PipelineStageRecord]:
    """Return stages for the layers of a model so that the slowest stage is as fast as possible.

    A stage is a sequence of layers; the time of a layer is that of its forward and backward pass. A
    fused op counts for one of its layers, and ops outside of all layers do not count.

    Args:
        model: The model, or an executor of it.
        profile: The result of ``executor.profile(...)`` for it.
        num_stages: The number of stages.
        prefix: The name of ``model`` in the profiled model, such as ``"net"``; empty if it is the
            profiled model.

    Returns:
        The records of ``get_pipeline_stage_assignment`` with other stages, for
        ``set_pipeline_stage_assignment``. A nested model may be divided.

    Raises:
        UsageTypeError: ``model`` is not a model, or ``num_stages`` is not an int.
        UsageValueError: There are fewer layers than stages, or the profile has no times of the
            layers.
    """
    if isinstance(num_stages, bool) or not isinstance(num_stages, int):
        raise UsageTypeError(f"{_BALANCED}: num_stages is {num_stages!r}. Pass an int.")
    records = get_pipeline_stage_assignment(model)
    layers = list(leaves(records))
    if not 1 <= num_stages <= len(layers):
        raise UsageValueError(
            f"{_BALANCED}: num_stages is {num_stages}, and the model has {len(layers)} layers. "
            f"Each stage has at least one layer: pass 1 to {len(layers)}."
        )
    seconds = [time.total for time in layer_times(records, profile, prefix)]
    if not any(seconds):
        raise UsageValueError(
            f"{_BALANCED}: the profile has no op of the layers "
            f"{', '.join(record.name for record in layers[:4])} ... Pass the result of "
            "executor.profile(...) for this model, and prefix= if the model is a part of the "
            "profiled one."
        )
    for record, stage in zip(layers, _shares(seconds, num_stages), strict=True):
        record.stage = stage
    return records


def _shares(seconds: Sequence[float], num_stages: int) -> list[int]:
    """Return the stage of each layer, for the smallest possible time of the slowest stage."""
    sums = [0.0, *itertools.accumulate(seconds)]
    count = len(seconds)
    # best[i]: for the first i layers, the time of the slowest stage so far, and where the last
    # stage begins.
    best: list[tuple[float, int]] = [(sums[i], 0) for i in range(count + 1)]
    begins = []
    for stage in range(1, num_stages):
        longer = [(float("inf"), 0)] * (count + 1)
        for end in range(stage + 1, count + 1):
            longer[end] = min(
                (max(best[begin][0], sums[end] - sums[begin]), begin) for begin in range(stage, end)
            )
        begins.append(longer)
        best = longer
    stages = [0] * count
    end = count
    for stage in range(num_stages - 1, 0, -1):
        begin = begins[stage - 1][end][1]
        stages[begin:end] = [stage] * (end - begin)
        end = begin
    return stages
