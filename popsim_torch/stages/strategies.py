"""Stages, phases and the execution strategies made of them, and the checks of a whole pipeline.

Package private: the public names are those of ``stages``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar

from popsim_torch.enums import AutoStage
from popsim_torch.errors import (
    Error,
    UsageAssertionError,
    closest_names,
    not_supported_yet,
)

_logger = logging.getLogger("poptorch::python")

MAX_IPUS = 64
"""The most IPUs one process may use."""


def _names(items: Sequence[object]) -> str:
    return ", ".join(repr(item) for item in items)


class Stage:
    """One or more blocks that run together on one IPU.

    Args:
        *block_ids: The ids of the blocks.

    Raises:
        UsageAssertionError: An id is not a string.
    """

    def __init__(self, *block_ids: str) -> None:
        for block_id in block_ids:
            if not isinstance(block_id, str):
                raise UsageAssertionError(
                    f"Stage: block id {block_id!r} is a {type(block_id).__name__}. Pass strings "
                    "only."
                )
        self._blocks = block_ids
        self._ipu_id: int | None = None

    @property
    def blocks(self) -> tuple[str, ...]:
        """The ids of the blocks, in the order given."""
        return self._blocks

    @property
    def ipu_id(self) -> int | None:
        """The IPU chosen with :meth:`ipu`, or None."""
        return self._ipu_id

    def ipu(self, ipu: int) -> Stage:
        """Choose the IPU to run on, whatever the blocks themselves ask for.

        Args:
            ipu: The IPU's id, from 0.

        Returns:
            The stage itself.

        Raises:
            UsageAssertionError: ``ipu`` is not an int, or it is negative.
        """
        if not isinstance(ipu, int) or ipu < 0:
            raise UsageAssertionError(f"Stage.ipu({ipu!r}): pass an int, 0 or more.")
        self._ipu_id = ipu
        return self

    def __repr__(self) -> str:
        ipu = "" if self._ipu_id is None else f".ipu({self._ipu_id})"
        return f"Stage({_names(self._blocks)}){ipu}"


class Phase:
    """Stages that run at the same time in a phased execution.

    Args:
        *stages_or_block_ids: Stages, or the ids of the blocks of a single stage.

    Raises:
        UsageAssertionError: Nothing is given, or something other than only stages or only strings.
    """

    def __init__(self, *stages_or_block_ids: Stage | str) -> None:
        stages = [item for item in stages_or_block_ids if isinstance(item, Stage)]
        block_ids = [item for item in stages_or_block_ids if isinstance(item, str)]
        if len(stages_or_block_ids) not in (len(stages), len(block_ids)) or not stages_or_block_ids:
            raise UsageAssertionError(
                f"Phase({_names(stages_or_block_ids)}): pass Stage objects, or the ids of the "
                "blocks of one stage as strings; at least one, and not both kinds."
            )
        self._stages = tuple(stages) or (Stage(*block_ids),)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in the order given."""
        return self._stages

    def stage(self, index: int) -> Stage:
        """Return a stage by its place in the phase.

        Args:
            index: Its place, from 0.

        Raises:
            IndexError: The phase has fewer stages.
        """
        return self._stages[index]

    def ipus(self, *ids: int) -> Phase:
        """Choose the IPUs of all stages.

        Args:
            *ids: One IPU id per stage, in order.

        Returns:
            The phase itself.

        Raises:
            UsageAssertionError: The number of ids is not the number of stages, or an id is no int.
        """
        if len(ids) != len(self._stages):
            raise UsageAssertionError(
                f"Phase.ipus: got {len(ids)} IPU id(s) for {len(self._stages)} stage(s). "
                "Pass one id per stage."
            )
        for stage, ipu in zip(self._stages, ids, strict=True):
            stage.ipu(ipu)
        return self

    def __repr__(self) -> str:
        return f"Phase({_names(self._stages)})"


class ExecutionStrategy:
    """The base of all strategies; a strategy says which blocks form which stage."""

    _execution_mode: ClassVar[int]

    def backend_options(self) -> dict[str, object]:
        """Return the strategy as the flat settings that ``Options.toDict`` reports.

        ``execution_mode`` is 0 for a pipeline, 1 for sharding and 2 for phases.
        """
        return {"execution_mode": self._execution_mode}


class PipelinedExecution(ExecutionStrategy):
    """Run all stages at the same time, each on another micro-batch.

    Args:
        *args: One ``AutoStage``, or the stages in order, each as a ``Stage``, the id of its only
            block or a list of block ids. Nothing stands for ``AutoStage.SameAsIpu``.

    Raises:
        UsageAssertionError: An argument is something else, an ``AutoStage`` has company, or a block
            is in two stages.

    Example:
        ``PipelinedExecution("front", ["middle", "back"], Stage("loss").ipu(1))`` has three stages,
        on the IPUs 0, 1 and 1 if the blocks name no others.
    """

    _execution_mode = 0

    def __init__(self, *args: AutoStage | Stage | str | Sequence[str]) -> None:
        self._auto_stage: AutoStage | None = None
        self._stages: tuple[Stage, ...] = ()
        name = type(self).__name__
        if not args:
            self._auto_stage = AutoStage.SameAsIpu
        elif isinstance(args[0], AutoStage) and len(args) == 1:
            self._auto_stage = args[0]
        else:
            self._stages = tuple(_as_stage(name, arg) for arg in args)
        self._stage_ids: dict[str, int] = {}
        for stage_id, stage in enumerate(self._stages):
            for block_id in stage.blocks:
                other = self._stage_ids.setdefault(block_id, stage_id)
                if other != stage_id:
                    raise UsageAssertionError(
                        f"{name}: block '{block_id}' is in the stages {other} and {stage_id}. "
                        "A block belongs to one stage: remove it from the other."
                    )

    @property
    def auto_stage(self) -> AutoStage | None:
        """How stages are found for blocks, or None if the stages are listed."""
        return self._auto_stage

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages listed, in order; empty with an ``AutoStage``."""
        return self._stages

    def stage(self, block_id: str) -> Stage:
        """Return the listed stage that a block belongs to.

        Args:
            block_id: The block's id.

        Raises:
            UsageAssertionError: No stage lists the block.
        """
        return self.find_stage(block_id)[1]

    def find_stage(self, block_id: str) -> tuple[int, Stage]:
        """Return the listed stage that a block belongs to, after its number.

        Args:
            block_id: The block's id.

        Raises:
            UsageAssertionError: No stage lists the block.
        """
        if block_id not in self._stage_ids:
            close = closest_names(block_id, self._stage_ids)
            hint = f" Closest name: '{close[0]}'." if close else ""
            raise UsageAssertionError(
                f"Unknown Block '{block_id}': {self!r} does not list it.{hint} "
                "Add it to a stage given to Options.setExecutionStrategy."
            )
        stage_id = self._stage_ids[block_id]
        return stage_id, self._stages[stage_id]

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._auto_stage is not None:
            return f"{name}(AutoStage.{self._auto_stage.name})"
        return f"{name}({_names(self._stages)})"


class ShardedExecution(PipelinedExecution):
    """Run the stages one after another, each on its own IPU.

    Args:
        *args: As for :class:`PipelinedExecution`.

    Raises:
        UsageAssertionError: As for :class:`PipelinedExecution`.
    """

    _execution_mode = 1


def _as_stage(strategy: str, arg: object) -> Stage:
    if isinstance(arg, Stage):
        return arg
    if isinstance(arg, str):
        return Stage(arg)
    if isinstance(arg, (list, tuple)):
        return Stage(*arg)
    raise UsageAssertionError(
        f"{strategy}: cannot make a stage of {arg!r}. Pass one AutoStage alone, or for each stage "
        "a Stage, a block id or a list of block ids."
    )


class _PhasedExecution(ExecutionStrategy):
    """The base of the strategies that move weights and tensors on and off the chip."""

    _execution_mode = 2

    def __init__(self, *phases: Phase | Sequence[Stage] | Sequence[str] | Stage | str) -> None:
        name = type(self).__name__
        if not phases:
            raise UsageAssertionError(f"{name}: at least one phase is required.")
        raise not_supported_yet(
            name,
            "phased execution",
            "Use PipelinedExecution or ShardedExecution: they compute the same values.",
        )


class SerialPhasedExecution(_PhasedExecution):
    """Run phases one after another on the same IPUs.

    Args:
        *phases: The phases in order, each a ``Phase``, a list of stages, a list of block ids, a
            ``Stage`` or a block id.

    Raises:
        UsageAssertionError: No phase is given.
        Error: Always otherwise; this version has no phased execution.
    """


class ParallelPhasedExecution(_PhasedExecution):
    """Run phases in turn on even and odd IPUs.

    Args:
        *phases: As for :class:`SerialPhasedExecution`.

    Raises:
        UsageAssertionError: No phase is given.
        Error: Always otherwise; this version has no phased execution.
    """


def count_stages(ipu_ids: Sequence[int]) -> int:
    """Return the number of forward pipeline stages of a model.

    It is 1 plus the number of times the IPU changes from one block to the next, beginning on IPU 0:
    neighbouring blocks on one IPU count once, coming back to an IPU counts again.

    Args:
        ipu_ids: The IPU of each block in the order the blocks are entered.
    """
    return 1 + sum(before != after for before, after in zip([0, *ipu_ids], ipu_ids, strict=False))


def check_pipeline(
    num_stages: int,
    ipu_ids: Sequence[int],
    strategy: ExecutionStrategy,
    training: bool,
    gradient_accumulation: int,
    device_iterations: int,
    auto_round: bool,
) -> int:
    """Check that a model cut into stages can run, and return the number of IPUs it takes.

    Args:
        num_stages: The forward stages, see :func:`count_stages`.
        ipu_ids: The IPU of each block; IPU 0 is always counted.
        strategy: The strategy in use; only a pipeline needs enough micro-batches to fill.
        training: Whether the backward stages run too.
        gradient_accumulation: Micro-batches per weight update (count).
        device_iterations: How often the device repeats the step per call (count).
        auto_round: Whether to take more IPUs when their number is not a power of two.

    Raises:
        Error: Too few micro-batches to fill the pipeline, more than 64 IPUs, or a number of IPUs
            that is not a power of two while ``auto_round`` is off.
    """
    if num_stages > 1 and not isinstance(strategy, ShardedExecution):
        _check_fills(num_stages, training, gradient_accumulation, device_iterations)
    num_ipus = 1 + max(ipu_ids, default=0)
    rounded = 1 << (num_ipus - 1).bit_length()
    if num_ipus != rounded:
        if not auto_round:
            raise Error(
                f"The model uses {num_ipus} IPUs (highest IPU id {num_ipus - 1}), and only powers "
                f"of two can be reserved. Place the blocks on {rounded // 2} or {rounded} IPUs, or "
                f"call Options.autoRoundNumIPUs(True) to reserve {rounded}."
            )
        _logger.warning(
            "The model uses %d IPUs; %d are reserved, the next power of two "
            "(Options.autoRoundNumIPUs is on).",
            num_ipus,
            rounded,
        )
    if rounded > MAX_IPUS:
        raise Error(
            f"The model needs {rounded} IPUs, and one process can use {MAX_IPUS}. "
            f"Use IPU ids below {MAX_IPUS}."
        )
    return rounded


def _check_fills(
    num_stages: int, training: bool, gradient_accumulation: int, device_iterations: int
) -> None:
    """Check that there is at least one micro-batch for every stage of the filled pipeline."""
    if training:
        needed, given = 2 * num_stages - 1, gradient_accumulation
        setter, unit = "Options.Training.gradientAccumulation", "micro-batches per weight update"
        reason = f"2 * {num_stages} - 1, one for each forward and backward stage"
    else:
        needed, given = num_stages, device_iterations
        setter, unit = "Options.deviceIterations", "device iterations per call"
        reason = "one for each stage"
    if given < needed:
        raise Error(
            f"{setter}({given}): the number of pipeline stages is {num_stages}, which needs at "
            f"least {needed} {unit} ({reason}). Call {setter}({needed}) or more, use fewer stages, "
            "or choose ShardedExecution, which has no minimum."
        )
