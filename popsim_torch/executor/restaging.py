"""An executor follows what changes its program: stages of layers, and torch optimizers."""

from __future__ import annotations

import torch

from popsim_torch.executor.random_state import RandomState
from popsim_torch.optim.planning import OptimizerSettings
from popsim_torch.stages import assigned_stages, num_assignments

__all__ = ["Restaging"]


class Restaging(RandomState):
    """Compiles anew where what was compiled has changed, and goes on where the program was."""

    _num_assignments: int
    _assigned_stages: list[tuple[str, int]]
    # The optimizer's states of the program before, and whose they are.
    _carried: tuple[OptimizerSettings | None, dict[str, torch.Tensor]] | None

    def _note_assignment(self) -> None:
        """Take note of the stages that the compiled program has, and go on where another was."""
        self._num_assignments = num_assignments()
        self._assigned_stages = assigned_stages(self._traced_model)
        if self._carried is None or self._state is None:
            return
        (settings, states), self._carried = self._carried, None
        if settings is self._settings:
            # What the program before had no state for begins anew.
            self._state.write_state({**self._state.read_all_states(), **states})

    def _follow_assignment(self) -> None:
        """Let go of a program whose stages are others now."""
        self._num_assignments = num_assignments()
        state = self._state
        if state is None or assigned_stages(self._traced_model) == self._assigned_stages:
            return
        self._let_go(None if state.plan is None else self._settings)

    def _let_go(self, settings: OptimizerSettings | None) -> None:
        """Let go of the program; the next call makes another, which goes on from here.

        Args:
            settings: Of the optimizer that gets the states of this one; None: nobody does.
        """
        assert self._state is not None
        random_state = self.rng_state
        carried = None if settings is None else (settings, self._state.read_all_states())
        self.destroy()
        self._rng_start, self._carried = random_state, carried

    def destroy(self) -> None:
        """Bring weights and optimizer state to the host, free the device, unwrap the model."""
        raise NotImplementedError
