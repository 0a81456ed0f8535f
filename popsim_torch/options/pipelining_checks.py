"""Checks the options of a pipeline when they are set. Package private."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeVar

from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import UsageTypeError, UsageValueError, not_supported_yet
from popsim_torch.options.groups import check_accumulation_dtype
from popsim_torch.options.pipelining_settings import (
    COMPUTE_HINTS,
    LOCATIONS,
    GradientAccumulationReductionMethod,
    PipeliningOptions,
    RecomputationMode,
)
from popsim_torch.stages import check_schedule, in_flight_rule

E = TypeVar("E", bound=IntEnum)


def checked(
    function: str,
    known_count: int | None,
    given: dict[str, Any],
    *,
    pipelined: bool,
    training: bool = True,
    num_stages: int | None = None,
    positions: tuple[int, ...] = (),
) -> PipeliningOptions:
    """Check and return the options of a pipeline, or of gradient accumulation without one.

    Args:
        function: The call, for messages.
        known_count: The gradient accumulation count that is already set, if any.
        given: The arguments by name; arguments that the function does not have are missing.
        pipelined: Whether there is a pipeline.
        training: Whether there are backward stages.
        num_stages: The number of stages; None if only ``device_mapping`` may show it.
        positions: The position of each stage in the pipeline; empty if no stages are concurrent.

    Raises:
        UsageTypeError: An argument has a wrong type.
        UsageValueError: An argument is out of range, or two contradict each other.
        Error: An option is not supported by this version.
    """
    values = dict(given)
    name = "gradient_accumulation_reduction_method"
    values[name] = checked_member(function, name, given[name], GradientAccumulationReductionMethod)
    for name in LOCATIONS:
        if name in given and not (given[name] is None or isinstance(given[name], bool)):
            raise UsageTypeError(f"{function}: {name}={given[name]!r}. Pass True, False or None.")
    _check_dtype(function, given)
    count = checked_count(
        function, "gradient_accumulation_steps_per_replica", given[_COUNT], optional=True
    )
    if not pipelined:
        return PipeliningOptions(values, None)
    schedule = checked_schedule(function, given["pipeline_schedule"])
    values["pipeline_schedule"] = schedule
    mapping = checked_mapping(function, given["device_mapping"])
    values["device_mapping"] = mapping
    values["recomputation_mode"] = _checked_recomputation(
        function, given["recomputation_mode"], schedule
    )
    _check_flags(function, given)
    _check_hints(function, given, mapping)
    needed = schedule in (PipelineSchedule.Grouped, PipelineSchedule.Interleaved)
    if count is None and known_count is None and needed:
        raise UsageValueError(
            f"{function}: PipelineSchedule.{schedule.name} needs "
            "gradient_accumulation_steps_per_replica: pipelines accumulate gradients, and the "
            "stages work on several micro-batches of one update. Pass a multiple of "
            f"{in_flight_rule(schedule)} for n stages."
        )
    num_stages = len(mapping) if mapping is not None else num_stages
    if num_stages is not None:
        check_schedule(
            schedule,
            dict(enumerate(range(num_stages) if mapping is None else mapping)),
            num_stages=positions[-1] + 1 if positions else num_stages,
            training=training,
            count=count or known_count or 1,
        )
    return PipeliningOptions(values, schedule, positions)


_COUNT = "gradient_accumulation_steps_per_replica"


def checked_count(function: str, name: str, value: object, *, optional: bool = False) -> int | None:
    """Check and return a count, which is 1 or more.

    Args:
        function: The call, for messages.
        name: The argument.
        value: The value from the user.
        optional: Whether None is allowed, and means no choice.

    Raises:
        UsageTypeError: The value is not an int.
        UsageValueError: The value is less than 1.
    """
    if value is None and optional:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageTypeError(f"{function}: {name}={value!r}. Pass an int, 1 or more.")
    if value < 1:
        raise UsageValueError(f"{function}: {name}={value}. Pass 1 or more.")
    return value


def checked_member(function: str, name: str, value: object, enum: type[E]) -> E:
    """Check and return a member of an enum.

    Args:
        function: The call, for messages.
        name: The argument.
        value: The value from the user.
        enum: The enum.

    Raises:
        UsageTypeError: The argument is something else.
    """
    if not isinstance(value, enum):
        members = ", ".join(f"{enum.__name__}.{member.name}" for member in enum)
        raise UsageTypeError(f"{function}: {name}={value!r}. Use one of {members}.")
    return value


def checked_schedule(function: str, value: object) -> PipelineSchedule:
    """Check and return a schedule; None means ``Grouped``.

    Args:
        function: The call, for messages.
        value: The value from the user.

    Raises:
        UsageTypeError: The argument is something else.
    """
    if value is None:
        return PipelineSchedule.Grouped
    return checked_member(function, "pipeline_schedule", value, PipelineSchedule)


def checked_mapping(function: str, value: object) -> tuple[int, ...] | None:
    """Check and return the IPU of each stage; None means no choice.

    Args:
        function: The call, for messages.
        value: The value from the user.

    Raises:
        UsageTypeError: The value is not a sequence of ints.
        UsageValueError: The value is empty, or an IPU is negative.
    """
    if value is None:
        return None
    ids = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else None
    if ids is None or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise UsageTypeError(f"{function}: device_mapping={value!r}. Pass a list with an int each.")
    if not ids or min(ids) < 0:
        raise UsageValueError(
            f"{function}: device_mapping={value!r}. Pass the IPU of each stage, 0 or more."
        )
    return tuple(ids)


def _checked_recomputation(
    function: str, value: object, schedule: PipelineSchedule
) -> RecomputationMode:
    if value is None:
        return RecomputationMode.Auto
    mode = checked_member(function, "recomputation_mode", value, RecomputationMode)
    wrong = {
        RecomputationMode.RecomputeThenBackpropagate: PipelineSchedule.Sequential,
        RecomputationMode.RecomputeAndBackpropagateInterleaved: PipelineSchedule.Interleaved,
    }
    if wrong.get(mode) == schedule:
        raise UsageValueError(
            f"{function}: RecomputationMode.{mode.name} does not go with PipelineSchedule."
            f"{schedule.name}. Use RecomputationMode.Auto, or PipelineSchedule.Grouped."
        )
    return mode


def _check_dtype(function: str, given: dict[str, Any]) -> None:
    accumulated = given.get("gradient_accumulation_dtype")
    if accumulated is not None and not callable(accumulated):
        check_accumulation_dtype(f"{function}: gradient_accumulation_dtype", accumulated)
    if given.get("accumulate_outfeed_dtype") is not None:
        raise not_supported_yet(
            f"{function}(accumulate_outfeed_dtype={given['accumulate_outfeed_dtype']!r})",
            "another dtype than that of the values",
            "Convert the output in forward.",
        )


def _check_flags(function: str, given: dict[str, Any]) -> None:
    if not (given["accumulate_outfeed"] is None or isinstance(given["accumulate_outfeed"], bool)):
        raise UsageTypeError(
            f"{function}: accumulate_outfeed={given['accumulate_outfeed']!r}. Pass True or False."
        )
    iterations = checked_count(
        function, "batch_serialization_iterations", given["batch_serialization_iterations"]
    )
    if iterations != 1:
        raise not_supported_yet(
            f"{function}(batch_serialization_iterations={iterations})",
            "running each stage for several micro-batches in a row",
            "Leave it at 1.",
        )
    if given["continuous_weight_updates"] is not False:
        raise not_supported_yet(
            f"{function}(continuous_weight_updates={given['continuous_weight_updates']!r})",
            "an update while micro-batches are in flight",
            "Leave it at False.",
        )


def _check_hints(function: str, given: dict[str, Any], mapping: tuple[int, ...] | None) -> None:
    for name in COMPUTE_HINTS:
        value = given[name]
        of_stages = name != "weight_update_poplar_options"
        dicts = value if of_stages else [value]
        if value is None:
            continue
        if not isinstance(dicts, list | tuple) or not all(isinstance(one, dict) for one in dicts):
            wanted = "a list with a dict for each stage" if of_stages else "a dict"
            raise UsageTypeError(f"{function}: {name}={value!r}. Pass {wanted}.")
        if of_stages and mapping is not None and len(dicts) != len(mapping):
            raise UsageValueError(
                f"{function}: {name} has {len(dicts)} dicts, and device_mapping {len(mapping)} "
                "stages. Pass one dict for each stage."
            )
