"""An executor's optimizer: which values are used, and when they are read."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from popsim_torch import optim
from popsim_torch.enums import MeanReductionStrategy
from popsim_torch.errors import Error, UsageValueError
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.device_state import DeviceState
from popsim_torch.executor.numerics import scales_automatically
from popsim_torch.executor.optimizer_states import OptimizerStates
from popsim_torch.executor.torch_states import moved_by_device
from popsim_torch.executor.updates import lacks_running_mean, make_plan
from popsim_torch.executor.value_watch import ValueWatch
from popsim_torch.optim.captures import GradientCapture, unwrapped
from popsim_torch.optim.momentum import check_momentum
from popsim_torch.optim.planning import OptimizerSettings, read_optimizer

__all__ = ["OptimizerUse"]


class OptimizerUse:
    """The part of an executor that holds its optimizer.

    Args:
        device: The executor's program. It gets other options if the optimizer needs them.
        optimizer: The optimizer that the user passes; None for inference.
        copied: Settings and captures of the executor that this one is a copy of; the values of its
            optimizer may have changed since then.

    Attributes:
        captures: The gradients that go into queues.
        states: The states of an optimizer that keeps its own on the host; None without a program.
        watch: Finds values that changed without a call of ``setOptimizer``.
        let_go: Releases the program; the next program gives the states of this one to an optimizer
            with these settings. Set by the part that makes programs.
    """

    def __init__(
        self,
        device: DeviceProgram,
        optimizer: torch.optim.Optimizer | None,
        copied: tuple[OptimizerSettings | None, tuple[GradientCapture, ...]] | None = None,
    ) -> None:
        self._device = device
        self.optimizer = optimizer
        self.watch: ValueWatch | None = None
        self.settings = None
        self.captures: tuple[GradientCapture, ...] = ()
        self.states: OptimizerStates | None = None
        self.let_go: weakref.WeakMethod[Callable[[OptimizerSettings], None]] | None = None
        if copied is not None:
            self.settings, self.captures = copied
        elif optimizer is not None:
            self.optimizer, self.captures = unwrapped(optimizer)
            self.settings = self._read(self.optimizer)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer in use, without the wrapper that captures gradients; None for inference."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._device.optimizers = () if optimizer is None else (optimizer,)

    @property
    def settings(self) -> OptimizerSettings | None:
        """The optimizer's values in use."""
        return self._settings

    @settings.setter
    def settings(self, settings: OptimizerSettings | None) -> None:
        self._settings = settings
        self.watch = None
        if self._optimizer is not None and settings is not None:
            self.watch = ValueWatch(self._optimizer, settings)

    @property
    def _synced(self) -> optim.Optimizer | None:
        """The optimizer, if it can show the state of the device."""
        return self.optimizer if isinstance(self.optimizer, optim.Optimizer) else None

    def link(self, state: DeviceState) -> None:
        """Connect the optimizer with the state of a program on the device."""
        if self._synced is not None:
            self._synced._link(state)
        elif self.optimizer is not None:
            self.states = self._states_on(state, self.optimizer)
            self.states.take()

    def _states_on(self, state: DeviceState, optimizer: torch.optim.Optimizer) -> OptimizerStates:
        parameters = dict(self._device.module.named_parameters())
        return OptimizerStates(state, parameters, (optimizer,))

    def unlink(self) -> None:
        """Copy the optimizer's state to the host, and disconnect the optimizer from the device."""
        if self._synced is not None:
            self._synced._unlink()
        if self.states is not None:
            self.states.leave()
            self.states = None

    def read_back(self) -> None:
        """Copy the optimizer's state to the host."""
        if self._synced is not None:
            self._synced._read_back()
        if self.states is not None:
            self.states.give_to_host()

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use another optimizer, or new values of the same one, from the next call on.

        After compilation only the values of variable attributes can change; the program stays the
        same. All values of a ``torch.optim`` optimizer are variable. If such an optimizer has other
        groups, starts to use momentum, or turns Nesterov momentum on or off, the next call compiles
        again; weights and the existing states of the optimizer are kept.

        Args:
            optimizer: An optimizer from ``poptorch.optim`` or ``torch.optim``.

        Raises:
            Error: The optimizer needs another program, for example because it enqueues other
                gradients, or this is an inference model.
            UsageAssertionError: Its type is not supported.
        """
        if self.optimizer is None:
            raise Error("setOptimizer: an inference model has no optimizer.")
        optimizer, captures = unwrapped(optimizer)
        settings, state = self._read(optimizer), self._device.state
        if state is None or state.plan is None:
            self.optimizer, self.settings, self.captures = optimizer, settings, captures
            return
        if captures != self.captures:
            raise Error(
                "setOptimizer: the model was compiled with "
                f"{_capture_text(self.captures)}, the new optimizer has {_capture_text(captures)}."
                " Pass an OutfeedOptimizer with the same queue and mode, or compile a new model."
            )
        trained = [update.parameter for update in state.plan.updates]
        state.check_weights(trained)
        scale = state.plan.loss_scaling.name
        previous, compiled, known = self.optimizer, self.settings, settings
        if compiled is not None and (_is_torchs(optimizer) or _is_torchs(previous)):
            # One of the two does not say what is constant: use the choice of the program.
            known = settings.as_constant_as(compiled)
        plan = make_plan(known, self._device.options, self._device.module, trained, scale)
        try:
            state.plan.check_replaceable(plan)
        except Error:
            rule = None if compiled is None else compiled.rule
            if settings.rule != rule or not _is_torchs(optimizer) or not _is_torchs(previous):
                raise
            let_go = None if self.let_go is None else self.let_go()
            assert let_go is not None
            let_go(settings)
            self.optimizer, self.settings = optimizer, settings
            return
        if compiled is not None:
            check_momentum(compiled, settings)
        if isinstance(optimizer, optim.Optimizer):
            optimizer._hand_over()
        if optimizer is not previous and isinstance(previous, optim.Optimizer):
            previous._unlink()
        state.replace_plan(plan)
        replaced = weakref.ref(previous)
        self.optimizer, self.settings = optimizer, known
        if optimizer is previous:
            return
        del previous
        if replaced() is not None and self.states is not None:
            self.states.give_to_host()  # someone may still read them there
        self.states = None
        if isinstance(optimizer, optim.Optimizer):
            optimizer._link(state)
        else:
            self.states = self._states_on(state, optimizer)
            self.states.adopt()

    def _read(self, optimizer: torch.optim.Optimizer) -> OptimizerSettings:
        """Copy an optimizer's values; float16 accumulators change the mean reduction to Running.

        With automatic loss scaling, the loss scale is a variable.
        """
        automatic = scales_automatically(self._device.options)
        if automatic and isinstance(optimizer, optim.Optimizer):
            optimizer.variable_attrs.markAsVariable("loss_scaling")
        known = None if self.settings is None else self.settings.attributes
        if known is not None:
            known = known.knowing(moved_by_device(optimizer))
        settings = read_optimizer(
            optimizer,
            automatic_loss_scaling=automatic,
            relax_checks=bool(self._device.options.relax_optimizer_checks),
            known_attributes=known,
        )
        if lacks_running_mean(settings, self._device.options):
            if self._device.compiled is not None:
                raise UsageValueError(
                    "setOptimizer: this optimizer's float16 accumulators would require changing "
                    "the mean reduction strategy to Running, but the model is already compiled."
                )
            options = self._device.options.clone()
            options.Training.setMeanAccumulationAndReplicationReductionStrategy(
                MeanReductionStrategy.Running
            )
            self._device.options = options.freeze()
        return settings


def _is_torchs(optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether an optimizer is PyTorch's, which does not say what is constant."""
    return optimizer is not None and not isinstance(optimizer, optim.Optimizer)


def _capture_text(captures: tuple[GradientCapture, ...]) -> str:
    modes = " and ".join(capture.mode.name for capture in captures)
    return f"OutfeedOptimizer ({modes})" if captures else "no OutfeedOptimizer"
