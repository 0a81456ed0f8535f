"""The options of a pipeline as data: the settings that they become, and their explanation.

Package private: the public names are in ``pipelining``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from popsim_torch.enums import (
    MeanReductionStrategy,
    NamedIntEnum,
    OutputMode,
    PipelineSchedule,
    ReductionType,
)
from popsim_torch.errors import UsageValueError
from popsim_torch.options.locations import TensorLocationSettings
from popsim_torch.options.options import Options
from popsim_torch.stages import (
    ConcurrentExecution,
    PipelinedExecution,
    Stage,
    count_rule,
    in_flight_rule,
)


class GradientAccumulationReductionMethod(NamedIntEnum):
    """How the gradients of the micro-batches of an update are combined."""

    SUM = 0
    """Added up. For a mean over the batch, divide the loss by the count."""
    MEAN = 1
    """Added up, then divided by the count."""
    RUNNING_MEAN = 2
    """The accumulator always holds the mean of the gradients so far."""


class RecomputationMode(NamedIntEnum):
    """Which forward values of a stage the backward pass rebuilds; it changes no values."""

    Auto = 0
    """The same values as in PopTorch's pipelines; none if one micro-batch is in flight."""
    RecomputeThenBackpropagate = 1
    """All but the inputs of the stage, for ``Grouped`` and ``Interleaved``."""
    RecomputeAndBackpropagateInterleaved = 2
    """The same, each rebuilt where it is needed, for ``Grouped`` and ``Sequential``."""


_REDUCTIONS = {
    GradientAccumulationReductionMethod.SUM: (ReductionType.Sum, MeanReductionStrategy.Post),
    GradientAccumulationReductionMethod.MEAN: (ReductionType.Mean, MeanReductionStrategy.Post),
    GradientAccumulationReductionMethod.RUNNING_MEAN: (
        ReductionType.Mean,
        MeanReductionStrategy.Running,
    ),
}
_REBUILD_STAGE = 3
"""The ``autoRecomputation`` of pipelines."""

_SHARD = "useReplicatedTensorSharding"
# For each hint about memory: the kind of tensor, and the setting of its location.
LOCATIONS = {
    "offload_activations": ("setActivationLocation", "onChip"),
    "offload_weights": ("setWeightLocation", "onChip"),
    "replicated_weight_sharding": ("setWeightLocation", _SHARD),
    "offload_weight_update_variables": ("setOptimizerLocation", "onChip"),
    "replicated_optimizer_state_sharding": ("setOptimizerLocation", _SHARD),
    "offload_gradient_accumulation_buffers": ("setAccumulatorLocation", "onChip"),
}
COMPUTE_HINTS = (
    "forward_propagation_stages_poplar_options",
    "backward_propagation_stages_poplar_options",
    "weight_update_poplar_options",
)


@dataclass(frozen=True)
class Change:
    """One setting of ``Options``: its new value, and how to set it."""

    setter: str
    read: Callable[[Options], Any]
    value: Any
    write: Callable[[Options], object]


@dataclass(frozen=True)
class PipeliningOptions:
    """The result of ``set_pipelining_options`` or ``set_gradient_accumulation_options``.

    Attributes:
        values: The arguments by name; None means no choice.
        schedule: When stages run; None for a model that is not a pipeline.
        positions: The position of each stage in the pipeline; empty if no stages are concurrent.
    """

    values: Mapping[str, Any]
    schedule: PipelineSchedule | None
    positions: tuple[int, ...] = ()

    def explain(self) -> str:
        """Return a string with a line for each option: its value and its effect."""
        rows = [
            (name, shown(self.values[name]), effect)
            for name, effect in self._effects()
            if name in self.values
        ]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(
            f"{name:<{widths[0]}}  {value:<{widths[1]}}  {effect}" for name, value, effect in rows
        )

    def apply(self, options: Options) -> None:
        """Apply the settings to the user's options, and check that they do not contradict.

        Args:
            options: Changed in place.

        Raises:
            UsageValueError: The options have an output mode other than ``Sum``.
        """
        changes = list(self.changes(training=True))
        for change in changes:
            now = change.read(options)
            if change.setter == "outputMode" and now not in (change.value, OutputMode.Default):
                raise UsageValueError(
                    f"Options.{change.setter} has set {shown(now)}, and the pipelining options "
                    f"{shown(change.value)}. Leave one of the two out."
                )
        for change in changes:
            change.write(options)

    def changes(self, training: bool) -> Iterator[Change]:
        """Yield the changes to make to options.

        Args:
            training: Whether the program trains; otherwise counts and reductions are left out.
        """
        values = self.values
        if training:
            yield from self._count()
            yield from self._reduction()
        if self.schedule is not None:
            schedule = self.schedule
            yield Change(
                "pipelineSchedule",
                lambda o: o.pipeline_schedule,
                schedule,
                lambda o: o.pipelineSchedule(schedule),
            )
        if training and values.get("gradient_accumulation_dtype") is not None:
            dtype = values["gradient_accumulation_dtype"]
            yield Change(
                "Training.gradientAccumulationDtype",
                lambda o: o.Training.gradient_accumulation_dtype,
                dtype,
                lambda o: o.Training.gradientAccumulationDtype(dtype),
            )
        if values.get("device_mapping") is not None:
            strategy = self._strategy()
            yield Change(
                "setExecutionStrategy",
                lambda o: repr(o.execution_strategy),
                repr(strategy),
                lambda o: o.setExecutionStrategy(strategy),
            )
        if values.get("accumulate_outfeed"):
            yield Change(
                "outputMode",
                lambda o: OutputMode(o.output_mode),
                OutputMode.Sum,
                lambda o: o.outputMode(OutputMode.Sum),
            )
        if values.get("recomputation_mode") and training:
            yield Change(
                '_Popart.set("autoRecomputation")',
                lambda o: o._Popart.options.get("autoRecomputation"),
                _REBUILD_STAGE,
                lambda o: o._Popart.set("autoRecomputation", _REBUILD_STAGE),
            )
        yield from self._locations()

    def _strategy(self) -> PipelinedExecution:
        mapping = self.values["device_mapping"]
        if self.positions:
            return ConcurrentExecution(mapping, self.positions)
        return PipelinedExecution(*(Stage().ipu(ipu) for ipu in mapping))

    def _count(self) -> Iterator[Change]:
        count = self.values["gradient_accumulation_steps_per_replica"]
        if count is not None:
            yield Change(
                "Training.gradientAccumulation",
                lambda o: o.Training.gradient_accumulation,
                count,
                lambda o: o.Training.gradientAccumulation(count),
            )

    def _reduction(self) -> Iterator[Change]:
        method = self.values.get("gradient_accumulation_reduction_method")
        if method is None:
            return
        kind, mean = _REDUCTIONS[method]
        yield Change(
            "Training.accumulationAndReplicationReductionType",
            lambda o: o.Training.accumulation_and_replication_reduction_type,
            kind,
            lambda o: o.Training.accumulationAndReplicationReductionType(kind),
        )
        if kind == ReductionType.Mean:
            yield Change(
                "Training.setMeanAccumulationAndReplicationReductionStrategy",
                lambda o: o.Training.meanAccumulationAndReplicationReductionStrategy,
                mean,
                lambda o: o.Training.setMeanAccumulationAndReplicationReductionStrategy(mean),
            )

    def _locations(self) -> Iterator[Change]:
        places: dict[str, TensorLocationSettings] = {}
        for name, (setter, what) in LOCATIONS.items():
            value = self.values.get(name)
            if value is None or (what == _SHARD and not value):
                continue
            place = places.setdefault(setter, TensorLocationSettings())
            if what == _SHARD:
                place.useReplicatedTensorSharding(True)
            else:
                place.useOnChipStorage(not value)
        for setter, place in places.items():
            key = f"location_{setter.removeprefix('set').removesuffix('Location').lower()}"
            yield Change(
                f"TensorLocations.{setter}",
                lambda o, key=key: o.TensorLocations.toDict().get(key),  # type: ignore[misc]
                place.toDict(),
                lambda o, setter=setter, place=place: getattr(  # type: ignore[misc]
                    o.TensorLocations, setter
                )(place),
            )

    def _effects(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the effect of each option."""
        values = self.values
        count = values["gradient_accumulation_steps_per_replica"]
        counted = (
            "as set in the options" if count is None else f"an update every {count} micro-batches"
        )
        yield "gradient_accumulation_steps_per_replica", f"in effect: {counted}"
        kind = _REDUCTIONS[values["gradient_accumulation_reduction_method"]][0]
        combined = "added up" if kind == ReductionType.Sum else "averaged"
        yield "gradient_accumulation_reduction_method", f"in effect: gradients are {combined}"
        if self.schedule is not None:
            yield "pipeline_schedule", f"in effect: {_in_flight(self.schedule, values)}"
            mapping = values["device_mapping"]
            placed = "stage i is on IPU i" if mapping is None else _placed(mapping)
            yield "device_mapping", f"in effect: {placed}"
            summed = (
                "as one sum over a call"
                if values["accumulate_outfeed"]
                else "as set in the options"
            )
            yield "accumulate_outfeed", f"in effect: outputs are returned {summed}"
            is_auto = values["recomputation_mode"] == RecomputationMode.Auto
            rebuilt = (
                "the values that the options choose" if is_auto else "all but the inputs of a stage"
            )
            yield "recomputation_mode", f"in effect: the backward pass rebuilds {rebuilt}"
        for name in LOCATIONS:
            yield name, "hint about memory: kept in Options.TensorLocations, no effect on values"
        for name in COMPUTE_HINTS:
            yield name, "hint about compute: kept here, no effect"
        chosen = values["gradient_accumulation_dtype"] is not None
        dtypes = (
            "accumulators have this type" if chosen else "accumulators are as set in optimizers"
        )
        yield "gradient_accumulation_dtype", f"in effect: {dtypes}"
        yield "accumulate_outfeed_dtype", "not supported: sums have the dtype of the outputs"
        yield "batch_serialization_iterations", "must be 1"
        yield "continuous_weight_updates", "must be False"


def _in_flight(schedule: PipelineSchedule, values: Mapping[str, Any]) -> str:
    mapping = values["device_mapping"]
    if schedule == PipelineSchedule.Sequential:
        return "one micro-batch at a time"
    if mapping is None:
        return f"{in_flight_rule(schedule)} micro-batches are in flight, for n stages"
    return f"{count_rule(schedule, len(mapping), training=True)} micro-batches are in flight"


def _placed(mapping: tuple[int, ...]) -> str:
    return ", ".join(f"stage {stage} on IPU {ipu}" for stage, ipu in enumerate(mapping))


def shown(value: Any) -> str:
    """Return a value as the user writes it."""
    if isinstance(value, IntEnum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, tuple):
        return str(list(value))
    return str(value)
