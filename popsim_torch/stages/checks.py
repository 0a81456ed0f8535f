"""Checks a model that is divided into stages. Package private."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import Error
from popsim_torch.stages.schedules import WrongNumberOfMicroBatches, micro_batches_in_flight
from popsim_torch.stages.strategies import ExecutionStrategy

_logger = logging.getLogger("poptorch::python")

MAX_IPUS = 64
"""The largest number of IPUs that one process may use."""


def check_pipeline(
    num_stages: int,
    ipu_ids: Sequence[int],
    strategy: ExecutionStrategy,
    training: bool,
    gradient_accumulation: int,
    device_iterations: int,
    auto_round: bool,
    replicas: int = 1,
) -> int:
    """Check that a model with stages can run, and return the number of IPUs that it needs.

    Args:
        num_stages: The forward stages, see :func:`count_stages`.
        ipu_ids: The IPU of each block; IPU 0 is always counted.
        strategy: The strategy in use; only a pipeline needs enough micro-batches to fill it.
        training: Whether the backward stages run, too.
        gradient_accumulation: Micro-batches per weight update (count).
        device_iterations: How often the device repeats the step per call (count).
        auto_round: Whether to reserve more IPUs if their number is not a power of two.
        replicas: Copies of the model (count), each on IPUs of its own.

    Raises:
        Error: The model needs more than 64 IPUs, or, if ``auto_round`` is off, a number that is not
            a power of two; or there are too few micro-batches to fill the pipeline.
    """
    num_ipus = _count_ipus(ipu_ids, replicas, auto_round)
    if num_stages > 1 and strategy.is_pipelined:
        _check_fills(num_stages, training, gradient_accumulation, device_iterations)
    return num_ipus


def _count_ipus(ipu_ids: Sequence[int], replicas: int, auto_round: bool) -> int:
    of_one = 1 + max(ipu_ids, default=0)
    num_ipus = of_one * replicas
    rounded = 1 << (num_ipus - 1).bit_length()
    if rounded > MAX_IPUS:
        raise Error(
            f"Too many IPUs requested ({num_ipus}): one process can use {MAX_IPUS}. "
            + (
                f"Use IPU ids below {MAX_IPUS}."
                if replicas == 1
                else f"There are {replicas} replicas of {of_one} IPU{'s' if of_one > 1 else ''} "
                "each: use fewer, or divide them among several processes."
            )
        )
    if num_ipus != rounded:
        found = f"highest IPU id {of_one - 1}"
        advice = f"Place the blocks on {rounded // 2} or {rounded} IPUs"
        if replicas > 1:
            found = f"{replicas} replicas of {of_one}"
            advice = "Use another number of replicas or IPUs"
        if not auto_round:
            raise Error(
                f"The model specifies the use of {num_ipus} IPUs ({found}), "
                f"and only powers of two can be reserved: it has to reserve a minimum of {rounded}."
                f" {advice}, or call poptorch.Options().autoRoundNumIPUs(True)."
            )
        _logger.warning(
            "The model specifies the use of %d IPUs; %d are reserved, the next power of two "
            "(Options.autoRoundNumIPUs is on).",
            num_ipus,
            rounded,
        )
    return rounded


def _check_fills(
    num_stages: int, training: bool, gradient_accumulation: int, device_iterations: int
) -> None:
    """Check that there is at least one micro-batch for every stage of the filled pipeline."""
    needed = micro_batches_in_flight(PipelineSchedule.Default, num_stages, training=training)
    if training:
        given = gradient_accumulation
        setter = "poptorch.Options().Training.gradientAccumulation"
        stages = (
            f"{num_stages} stages of the model and the {num_stages - 1} that training adds for "
            "their backward passes"
        )
    else:
        given = device_iterations
        setter = "poptorch.Options().deviceIterations"
        stages = "those of the model"
    if given < needed:
        raise WrongNumberOfMicroBatches(
            f"at least {needed}",
            needed,
            f"{setter}({given}) must be greater than or equal to the number of pipeline stages "
            f"({needed}): {stages}. Call {setter}({needed}) or more, use fewer stages, or choose "
            "poptorch.ShardedExecution, which has no minimum.",
        )
