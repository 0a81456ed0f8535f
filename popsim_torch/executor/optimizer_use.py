"""An executor's optimizer: whose values it uses, and when they are read."""

from __future__ import annotations

import torch

from popsim_torch import optim
from popsim_torch.enums import MeanReductionStrategy
from popsim_torch.errors import Error, UsageValueError
from popsim_torch.executor.numerics import scales_automatically
from popsim_torch.executor.restaging import Restaging
from popsim_torch.executor.updates import lacks_running_mean, make_plan
from popsim_torch.optim.captures import GradientCapture, unwrapped
from popsim_torch.optim.planning import OptimizerSettings, read_optimizer

__all__ = ["OptimizerUse"]


class OptimizerUse(Restaging):
    """The part of an executor that deals with its optimizer."""

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use another optimizer, or new values of the same one, from the next call on.

        After compilation only values of variable attributes can change; nothing is compiled again.
        Those of ``torch.optim`` are all variable. Where one of its optimizers has other groups,
        begins to have momentum, or turns Nesterov's on or off, the next call compiles anew; weights
        and the states that the optimizer has go on.

        Args:
            optimizer: From ``poptorch.optim`` or ``torch.optim``.

        Raises:
            Error: It would need another program, also one that enqueues other gradients, or this is
                an inference model.
            UsageAssertionError: Its type is not supported.
        """
        if self._optimizer is None:
            raise Error("setOptimizer: an inference model has no optimizer.")
        optimizer, captures = unwrapped(optimizer)
        settings = self._read_optimizer(optimizer)
        if self._state is None or self._state.plan is None:
            self._optimizer, self._settings, self._captures = optimizer, settings, captures
            return
        if captures != self._captures:
            raise Error(
                "setOptimizer: the model was compiled with "
                f"{_capture_text(self._captures)}, the new optimizer has {_capture_text(captures)}."
                " Pass an OutfeedOptimizer with the same queue and mode, or compile a new model."
            )
        trained = [update.parameter for update in self._state.plan.updates]
        self._state.check_weights(trained)
        previous = self._optimizer
        known, compiled = settings, self._settings
        if compiled is not None and (_is_torchs(optimizer) or _is_torchs(previous)):
            # One of the two does not say what is constant: what the program has as such.
            known = settings.as_constant_as(compiled)
        scale = self._state.plan.loss_scaling.name
        plan = make_plan(known, self._options, self._traced_model, trained, scale)
        try:
            self._state.plan.check_replaceable(plan)
        except Error:
            rule = None if compiled is None else compiled.rule
            if settings.rule != rule or not _is_torchs(optimizer) or not _is_torchs(previous):
                raise
            self._let_go(settings)
            self._optimizer, self._settings = optimizer, settings
            return
        if isinstance(optimizer, optim.Optimizer):
            optimizer._hand_over()
        if optimizer is not previous and isinstance(previous, optim.Optimizer):
            previous._unlink()
        self._state.replace_plan(plan)
        self._optimizer, self._settings = optimizer, known
        if optimizer is not previous and isinstance(optimizer, optim.Optimizer):
            optimizer._link(self._state)

    def _read_optimizer(self, optimizer: torch.optim.Optimizer) -> OptimizerSettings:
        """Copy an optimizer's values; half accumulators make the mean a running one.

        Automatic loss scaling makes the loss scale a variable.
        """
        automatic = scales_automatically(self._options)
        if automatic and isinstance(optimizer, optim.Optimizer):
            optimizer.variable_attrs.markAsVariable("loss_scaling")
        settings = read_optimizer(
            optimizer,
            automatic_loss_scaling=automatic,
            relax_checks=bool(self._options.relax_optimizer_checks),
            known_attributes=None if self._settings is None else self._settings.attributes,
        )
        if lacks_running_mean(settings, self._options):
            if self._compiled is not None:
                raise UsageValueError(
                    "setOptimizer: this optimizer's float16 accumulators would require changing "
                    "the mean reduction strategy to Running, but the model is already compiled."
                )
            options = self._options.clone()
            options.Training.setMeanAccumulationAndReplicationReductionStrategy(
                MeanReductionStrategy.Running
            )
            self._options = options.freeze()
        return settings


def _is_torchs(optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether an optimizer says nothing of what is constant: those of PyTorch do not."""
    return optimizer is not None and not isinstance(optimizer, optim.Optimizer)


def _capture_text(captures: tuple[GradientCapture, ...]) -> str:
    modes = " and ".join(capture.mode.name for capture in captures)
    return f"OutfeedOptimizer ({modes})" if captures else "no OutfeedOptimizer"
