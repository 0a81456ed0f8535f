"""Phased execution: stages that share IPUs, and are moved on and off the chip by turns.

Package private: the public names are in ``stages``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from popsim_torch.enums import Liveness
from popsim_torch.errors import Error, UsageAssertionError
from popsim_torch.stages.strategies import ExecutionStrategy, Stage, as_stage, names_of

if TYPE_CHECKING:
    from typing_extensions import Self

_SERIAL_ONLY = (Liveness.OffChipAfterFwdNoOverlap, Liveness.OffChipAfterEachPhase)
# The difference between the numbers of neighbouring phases: tensors move in the phases between.
_STRIDES = {Liveness.OffChipAfterFwdNoOverlap: 2, Liveness.OffChipAfterEachPhase: 4}
# Between the phases all tensors are kept off the chip, unless the user chooses otherwise.
_LOCATIONS = tuple(
    f"location_{kind}" for kind in ("activation", "weight", "optimizer", "accumulator")
)


class Phase:
    """Stages that run at the same time in phased execution.

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
                f"Phase({names_of(stages_or_block_ids)}): pass Stage objects, or the ids of the "
                "blocks of one stage as strings; at least one, and not both kinds."
            )
        self._stages = tuple(stages) or (Stage(*block_ids),)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in the order given."""
        return self._stages

    def stage(self, index: int) -> Stage:
        """Return a stage by its position in the phase.

        Args:
            index: The position, from 0.

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
            UsageAssertionError: The number of ids differs from the number of stages, or an id is
                not an int.
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
        return f"Phase({names_of(self._stages)})"


class _PhasedExecution(ExecutionStrategy):
    """The base of the strategies that move weights and tensors on and off the chip.

    The phases run one after another, and change no values.
    """

    _execution_mode = 2
    _is_serial = True

    def __init__(
        self, *phases: Phase | Sequence[Phase] | Sequence[Stage] | Sequence[str] | Stage | str
    ) -> None:
        name = type(self).__name__
        listed: Sequence[object] = phases
        if len(phases) == 1 and _are_all(Phase, phases[0]):
            listed = phases[0]  # type: ignore[assignment]
        if not listed:
            raise UsageAssertionError(f"{name}: at least one phase is required.")
        self._phases = tuple(_as_phase(name, item) for item in listed)
        super().__init__([stage for phase in self._phases for stage in phase.stages])
        self._separate_backward_phase = False
        self._liveness = Liveness.AlwaysLive

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases, in the order given."""
        return self._phases

    @property
    def num_phases(self) -> int:
        """The number of phases on a real machine, including those that move tensors."""
        last = self.phase_id(len(self._phases) - 1)
        if self._liveness != Liveness.AlwaysLive:
            return last + 1 + 3
        return last + 1 + int(self._separate_backward_phase)

    def phase(self, index: int) -> Phase:
        """Return a phase by its position.

        Args:
            index: The position, from 0.

        Raises:
            IndexError: There are fewer phases.
        """
        return self._phases[index]

    def phase_id(self, index: int) -> int:
        """Return the number of a phase on a real machine, in the forward pass.

        Args:
            index: The position of the phase in the strategy, from 0.
        """
        return index * _STRIDES.get(self._liveness, 1)

    def useSeparateBackwardPhase(self, use: bool = True) -> Self:
        """Begin the backward pass in a separate phase; no effect on values.

        Args:
            use: Whether to do so.

        Returns:
            The strategy itself.

        Raises:
            UsageAssertionError: The argument is not a bool.
        """
        _require_bool(f"{type(self).__name__}.useSeparateBackwardPhase", use)
        self._separate_backward_phase = use
        return self

    def setTensorsLiveness(self, liveness: Liveness) -> Self:
        """Choose how long tensors stay on the chip; no effect on values.

        Args:
            liveness: When tensors leave the chip. ``OffChipAfterFwdNoOverlap`` and
                ``OffChipAfterEachPhase`` are for serial phases only.

        Returns:
            The strategy itself.

        Raises:
            UsageAssertionError: The argument is not a ``Liveness``, or is only for serial phases.
        """
        allowed = [m for m in Liveness if self._is_serial or m not in _SERIAL_ONLY]
        if not isinstance(liveness, Liveness) or liveness not in allowed:
            members = ", ".join(f"Liveness.{member.name}" for member in allowed)
            raise UsageAssertionError(
                f"{type(self).__name__}.setTensorsLiveness({liveness!r}): use one of {members}."
            )
        self._liveness = liveness
        return self

    def place(
        self, block_id: str, ipu_id: int | None, known: Mapping[str, tuple[int, int]]
    ) -> tuple[int, int]:
        """Return the stage and the IPU of a block; see the base class."""
        stage_id, stage = self.find_stage(block_id)
        ipu = ipu_id if stage.ipu_id is None else stage.ipu_id
        if ipu is None:
            raise UsageAssertionError(
                f"Block '{block_id}' has no IPU, and the stages of phases are not numbered. Give "
                "the block an ipu_id, or call ipu() of its Stage or ipus() of its Phase."
            )
        return stage_id, ipu

    def backend_options(self) -> dict[str, object]:
        """Return the strategy as the flat settings that ``Options.toDict`` reports."""
        return {
            **super().backend_options(),
            "separate_backward_phase": self._separate_backward_phase,
            "tensors_liveness": int(self._liveness),
            "serial_phases_execution": self._is_serial,
        }

    def computed_options(self) -> dict[str, object]:
        """Return the settings of the back end that follow from the phases, for the log."""
        return {
            "executionPhaseSettings.phases": self.num_phases,
            "executionPhaseSettings.stages": 1 if self._is_serial else 2,
            **dict.fromkeys(_LOCATIONS, "useOnChipStorage(False)"),
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({names_of(self._phases)})"


class SerialPhasedExecution(_PhasedExecution):
    """Run phases one after another on the same IPUs; values are the same in every strategy.

    Args:
        *phases: The phases in order, each a ``Phase``, a list of stages, a list of block ids, a
            ``Stage`` or a block id. Every block needs an IPU, from its stage or its own ``ipu_id``.

    Raises:
        UsageAssertionError: No phase is given, an argument is something else, or a block is in two
            stages.

    Example:
        ``SerialPhasedExecution(Phase("front").ipus(0), [Stage("a").ipu(0), Stage("b").ipu(1)])``
    """


class ParallelPhasedExecution(_PhasedExecution):
    """Run phases alternately on even and odd IPUs; values are the same in every strategy.

    Args:
        *phases: As for :class:`SerialPhasedExecution`. Phases 0, 2, ... use even IPUs, the others
            odd ones.

    Raises:
        UsageAssertionError: As for :class:`SerialPhasedExecution`.
    """

    _is_serial = False

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> Self:
        """Move tensors off the chip after the forward phases; no effect on values.

        Args:
            off_chip: Whether to do so.

        Returns:
            The strategy itself.

        Raises:
            UsageAssertionError: The argument is not a bool.
        """
        _require_bool("ParallelPhasedExecution.sendTensorsOffChipAfterFwd", off_chip)
        self._liveness = Liveness.OffChipAfterFwd if off_chip else Liveness.AlwaysLive
        return self

    def place(
        self, block_id: str, ipu_id: int | None, known: Mapping[str, tuple[int, int]]
    ) -> tuple[int, int]:
        """Return the stage and the IPU of a block; see the base class."""
        stage_id, ipu = super().place(block_id, ipu_id, known)
        stage = self._stages[stage_id]
        phase = next(i for i, phase in enumerate(self._phases) if stage in phase.stages)
        if ipu % 2 != phase % 2:
            kind = "odd" if phase % 2 else "even"
            raise Error(
                f"Block '{block_id}' of phase {phase} is on IPU {ipu}. Phases of a "
                f"ParallelPhasedExecution take turns on even and odd IPUs: put it on an {kind} one."
            )
        return stage_id, ipu


def _are_all(kind: type, items: object) -> bool:
    return (
        isinstance(items, (list, tuple))
        and bool(items)
        and all(isinstance(item, kind) for item in items)
    )


def _as_phase(strategy: str, item: object) -> Phase:
    if isinstance(item, Phase):
        return item
    if isinstance(item, (list, tuple)) and _are_all(Stage, item):
        return Phase(*item)
    return Phase(as_stage(strategy, item))


def _require_bool(call: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageAssertionError(f"{call}({value!r}): pass True or False.")
