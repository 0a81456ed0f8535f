"""Stages, and the execution strategies that consist of them.

Package private: the public names are in ``stages``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from popsim_torch.enums import AutoStage
from popsim_torch.errors import Error, UsageAssertionError, closest_names
from popsim_torch.tables import Described


def names_of(items: Sequence[object]) -> str:
    """Return the arguments of a call as a string.

    Args:
        items: The arguments.
    """
    return ", ".join(repr(item) for item in items)


class Stage(Described):
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
        """Choose the IPU to run on, which overrides the choice of the blocks.

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
        return f"Stage({names_of(self._blocks)}){ipu}"

    def _figures(self) -> dict[str, object]:
        return {"blocks": ", ".join(self._blocks), "IPU": self._ipu_id}


class ExecutionStrategy(Described):
    """The base of all strategies; a strategy assigns blocks to stages."""

    _overlaps_stages: ClassVar[bool] = False
    _execution_mode: ClassVar[int]

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = tuple(stages)
        self._stage_ids: dict[str, int] = {}
        for stage_id, stage in enumerate(self._stages):
            for block_id in stage.blocks:
                other = self._stage_ids.setdefault(block_id, stage_id)
                if other != stage_id:
                    raise UsageAssertionError(
                        f"{type(self).__name__}: block '{block_id}' is in the stages {other} and "
                        f"{stage_id}. A block belongs to one stage: remove it from the other."
                    )

    @property
    def is_pipelined(self) -> bool:
        """Whether the stages run at the same time, each on another micro-batch.

        Otherwise they run one after another.
        """
        return self._overlaps_stages

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
        """Return the number of the listed stage that a block belongs to, and the stage.

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

    def place(
        self, block_id: str, ipu_id: int | None, known: Mapping[str, tuple[int, int]]
    ) -> tuple[int, int]:
        """Return the stage and the IPU of a block.

        Args:
            block_id: The block's id.
            ipu_id: The IPU that the block asks for, if any.
            known: The stages and IPUs of the blocks so far.

        Raises:
            UsageAssertionError: The strategy does not list the block, or has no IPU for it.
            Error: The strategy cannot use that IPU.
        """
        raise NotImplementedError

    def place_stage(self, stage_id: int) -> tuple[int, int]:
        """Return a stage by its number, and its IPU.

        Args:
            stage_id: The number of a ``PipelineStage``.

        Raises:
            Error: The strategy has no numbered stages, or no stage with this number.
        """
        raise Error(
            f"PipelineStage({stage_id}): {self!r} has no numbered stages. Call "
            "Options.setExecutionStrategy with poptorch.PipelinedExecution() or "
            "poptorch.ShardedExecution(), or use Block."
        )

    def position(self, stage_id: int) -> int:
        """Return the position of a stage in the pipeline; concurrent stages have the same one.

        Args:
            stage_id: The number of a stage.
        """
        return stage_id

    def check_num_stages(self, num_stages: int) -> None:
        """Check the number of stages that a model has after tracing.

        Args:
            num_stages: The number of forward stages.

        Raises:
            Error: The strategy has devices for another number of stages.
        """

    def backend_options(self) -> dict[str, object]:
        """Return the strategy as the flat settings that ``Options.toDict`` reports.

        ``execution_mode`` is 0 for a pipeline, 1 for sharding and 2 for phases.
        """
        return {"execution_mode": self._execution_mode}

    def _figures(self) -> dict[str, object]:
        return {f"stage {number}": repr(stage) for number, stage in enumerate(self._stages)}

    def computed_options(self) -> dict[str, object]:
        """Return the settings of the back end that follow from the strategy, for the log."""
        return {}


class PipelinedExecution(ExecutionStrategy):
    """Run all stages at the same time, each on another micro-batch.

    Args:
        *args: One ``AutoStage``, or the stages in order, each as a ``Stage``, the id of its only
            block or a list of block ids. No argument means ``AutoStage.SameAsIpu``.

    Raises:
        UsageAssertionError: An argument is something else, an ``AutoStage`` is not the only
            argument, or a block is in two stages.

    Example:
        ``PipelinedExecution("front", ["middle", "back"], Stage("loss").ipu(1))`` has three stages,
        on the IPUs 0, 1 and 1 if the blocks name no others.
    """

    _overlaps_stages = True
    _execution_mode = 0

    def __init__(self, *args: AutoStage | Stage | str | Sequence[str]) -> None:
        self._auto_stage: AutoStage | None = None
        if not args:
            self._auto_stage = AutoStage.SameAsIpu
        elif isinstance(args[0], AutoStage) and len(args) == 1:
            self._auto_stage = args[0]
        name = type(self).__name__
        super().__init__([] if self._auto_stage is not None else [as_stage(name, a) for a in args])

    @property
    def auto_stage(self) -> AutoStage | None:
        """How blocks get their stages, or None if the stages are listed."""
        return self._auto_stage

    def place(
        self, block_id: str, ipu_id: int | None, known: Mapping[str, tuple[int, int]]
    ) -> tuple[int, int]:
        """Return the stage and the IPU of a block; see the base class."""
        if self._auto_stage is None:
            stage_id, stage = self.find_stage(block_id)
            if stage.ipu_id is not None:
                return stage_id, stage.ipu_id
        elif self._auto_stage == AutoStage.AutoIncrement:
            stage_id = known[block_id][0] if block_id in known else len(known) + 1
        elif ipu_id is None:
            raise UsageAssertionError(
                f"Block '{block_id}' has no ipu_id, and AutoStage.SameAsIpu uses it as the stage "
                "of a block. Give the block an ipu_id, or choose AutoStage.AutoIncrement or "
                "explicit stages with Options.setExecutionStrategy."
            )
        else:
            stage_id = ipu_id
        return stage_id, stage_id if ipu_id is None else ipu_id

    def place_stage(self, stage_id: int) -> tuple[int, int]:
        """Return a stage by its number, and its IPU, which by default has the same number."""
        if self._auto_stage is not None:
            return stage_id, stage_id
        if stage_id >= len(self._stages):
            raise Error(
                f"PipelineStage({stage_id}): {len(self._stages)} stages have a device, and "
                f"stages are numbered from 0: {self!r}. List one for each stage: device_mapping of "
                "set_pipelining_options, or the stages of the execution strategy."
            )
        ipu = self._stages[stage_id].ipu_id
        return stage_id, stage_id if ipu is None else ipu

    def check_num_stages(self, num_stages: int) -> None:
        """Check the number of stages against those that are listed without blocks."""
        listed = len(self._stages)
        if listed and num_stages != listed and not any(stage.blocks for stage in self._stages):
            raise Error(
                f"{listed} stages have a device, and the model has {num_stages} stages: {self!r}. "
                "List one for each stage: device_mapping of set_pipelining_options, or the stages "
                "of the execution strategy."
            )

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._auto_stage is not None:
            return f"{name}(AutoStage.{self._auto_stage.name})"
        return f"{name}({names_of(self._stages)})"


class ShardedExecution(PipelinedExecution):
    """Run the stages one after another, each on its own IPU.

    Args:
        *args: As for :class:`PipelinedExecution`.

    Raises:
        UsageAssertionError: As for :class:`PipelinedExecution`.
    """

    _overlaps_stages = False
    _execution_mode = 1


def as_stage(strategy: str, arg: object) -> Stage:
    """Return an argument of a strategy as a stage.

    Args:
        strategy: The name of the strategy, for messages.
        arg: A stage, the id of its only block, or a list of block ids.

    Raises:
        UsageAssertionError: The argument is something else.
    """
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


def count_stages(ipu_ids: Sequence[int]) -> int:
    """Return the number of forward pipeline stages of a model.

    It is 1 plus the number of changes of the IPU from one block to the next, starting from IPU 0:
    neighbouring blocks on one IPU count once, and a later return to an IPU counts again.

    Args:
        ipu_ids: The IPU of each block, in the order in which the blocks are entered.
    """
    return 1 + sum(before != after for before, after in zip([0, *ipu_ids], ipu_ids, strict=False))
