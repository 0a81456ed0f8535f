"""The life cycle of an executor's program: compile, attach, detach, destroy, compile again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from popsim_torch import logs
from popsim_torch.errors import Error
from popsim_torch.executor.compile_request import ModelRequest
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.device_state import DeviceState
from popsim_torch.executor.host_weights import num_switches
from popsim_torch.executor.model_watch import ModelWatch, warn_of_later_attributes
from popsim_torch.executor.optimizer_use import OptimizerUse
from popsim_torch.executor.random_state import RandomState
from popsim_torch.executor.reach import failures_told
from popsim_torch.executor.weight_copies import WeightCopies
from popsim_torch.optim.planning import OptimizerSettings
from popsim_torch.options.model_settings import SettingsThen
from popsim_torch.stages import assigned_stages, num_assignments

__all__ = ["LifeCycle"]


def _num_changes() -> tuple[int, int]:
    """Return counts that change whenever stages or trained parameters may have changed; fast."""
    return num_assignments(), num_switches()


class LifeCycle:
    """The part of an executor that compiles its program, and moves it to the device and back.

    Args:
        device: Holds the program.
        model: The user's model, which is wrapped while an executor trains it.
        use: The part that holds the executor's optimizer.
        random: The part that holds the executor's random numbers.
        copies: The part that copies weights.
        settings: The settings of ``set_pipelining_options`` on the model when the options were
            made.
    """

    def __init__(
        self,
        device: DeviceProgram,
        model: nn.Module,
        use: OptimizerUse,
        random: RandomState,
        copies: WeightCopies,
        settings: SettingsThen,
    ) -> None:
        self._device = device
        self._model = model
        self._use = use
        self._random = random
        self._copies = copies
        # A weak reference: an executor without references is freed at once, and its report is
        # written.
        use.let_go = weakref.WeakMethod(self._let_go)
        self._settings = settings
        self._watch: ModelWatch | None = None
        self._num_changes = _num_changes()
        self._structure_then = self._structure()
        # The optimizer's states from the previous program, and the settings of their optimizer.
        self._carried: tuple[OptimizerSettings | None, dict[str, torch.Tensor]] | None = None
        self._entering = threading.RLock()

    def wrap(self) -> None:
        """Make reads of the user's model return trained weights, if this executor trains it.

        Raises:
            UsageRuntimeError: Another executor trains the model now.
        """
        if self._use.optimizer is not None:
            self._device.wrap(self._model, self._copies.copyWeightsToHostIfNeeded, self.destroy)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model for these arguments, attach it and upload its weights, without a run.

        Raises:
            Error: The model cannot be compiled, or no device is free, or another thread is
                compiling the model. The executor can be called again.
        """
        with self._alone("compile"):
            if self._device.compiled is not None:
                logs.python.warning("compile: the model is compiled already; the call is ignored.")
                return
            self.take(self.compile_model(args, kwargs))

    def compile_model(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CompiledModel:
        """Return the compiled model; it is not on the device yet."""
        self.check_before_compilation()
        return self.compile_alone(args, kwargs)

    def compile_alone(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CompiledModel:
        """Return a compiled model; the executor and the user's model do not change."""
        with failures_told(self._device.module):
            return self._device.compile(self.request(args, kwargs))

    def request(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModelRequest:
        """Return the request to compile the model for a call."""
        device = self._device
        return ModelRequest(
            device.module,
            device.options,
            device.channel,
            args,
            kwargs,
            self._use.settings,
            self._use.captures,
            replica_groups=device.replica_groups,
            warned=device.warned,
        )

    def check_before_compilation(self) -> None:
        """Check what does not depend on the program, and wrap the user's model if necessary."""
        self._device.connection.check_settings(self._device.options)
        self._settings.check_kept()
        self._copies.check_updatable_buffers()
        warn_of_later_attributes(self._settings.attributes, self._settings.model)
        self.wrap()

    def take(self, compiled: CompiledModel) -> None:
        """Bring a compiled model to the device, with weights, optimizer and random numbers."""
        seed, step = self._random.start
        state = self._device.take(compiled, (seed, step), self._use.link)
        self._go_on(state)
        if self._device.ready is not None:
            self._random.log(leaving=False)

    def become_ready(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CompiledModel:
        """Compile or attach the model for the next call.

        Raises:
            Error: The model cannot be compiled, or no device is free, or another thread is
                compiling or attaching the model.
        """
        with self._alone("call"):
            self._device.connection.check_online("run a model")
            if self._device.compiled is None:
                self.take(self.compile_model(args, kwargs))
            elif self._device.ready is None:  # (otherwise another thread has just attached it)
                self._attach()
            assert self._device.ready is not None
            return self._device.ready

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Refuse other threads that want to compile or attach the model in this scope.

        Waiting for them could last forever: code of the user may wait for threads in ``forward``.
        """
        if not self._entering.acquire(blocking=False):
            raise Error(
                f"{what}: another thread is using the executor: it compiles the model, or attaches "
                "it to a device. A model runs in one thread at a time: call it, or "
                "model.compile(...), before the threads start, and let them take turns with a "
                "lock; or make an executor for each thread."
            )
        try:
            yield
        finally:
            self._entering.release()

    def attachToDevice(self) -> None:
        """Take a device again, and upload weights, optimizer state and random numbers.

        Raises:
            Error: The model is not compiled, or already attached, or no device is free, or another
                thread is compiling or attaching it.
            UsageAssertionError: The model never attaches.
        """
        with self._alone("attachToDevice"):
            self._device.require_compiled("attachToDevice")
            connection = self._device.connection
            connection.check_online("attach a model")
            if connection.attached:
                raise Error(
                    "attachToDevice: the model is already attached to a device. Compilation "
                    "attaches it, and it stays attached until detachFromDevice()."
                )
            self._attach()

    def detachFromDevice(self) -> None:
        """Copy weights and optimizer state to the host, and release the device.

        The next call, or ``attachToDevice()``, continues from here, with the weights that the host
        has at that time.

        Raises:
            Error: The model is not compiled or not attached, or another thread is in a call.
        """
        self._device.require_compiled("detachFromDevice")
        if not self._device.connection.attached:
            raise Error(
                "detachFromDevice: the model is not attached to a device. isAttachedToDevice() "
                "tells whether it is."
            )
        if self._device.weights.ahead:
            self._device.weights.download()
        self._use.read_back()
        self._random.log(leaving=True)
        self._device.detach()

    def destroy(self) -> None:
        """Copy weights and optimizer state to the host, free the device, unwrap the model.

        The executor can be called again; the call compiles again. The method does nothing if the
        model is not compiled.
        """
        if self._device.compiled is not None:
            self.release()

    def release(self) -> None:
        """Copy everything to the host, and release the device and the model."""
        self._carried = None
        self._device.weights.fetch(what_fits=True)
        if self._device.compiled is not None:
            self._use.unlink()
        self._device.release()

    def follow_settings(self) -> None:
        """Release a program if the stages or the trained parameters of the model have changed.

        The next call compiles a new program.

        Raises:
            UsageValueError: A setting of the model has changed since it was wrapped.
        """
        self._settings.check_kept()
        if self._watch is not None and self._device.ready is not None:
            self._watch.check()
        if self._num_changes == _num_changes():
            return
        self._num_changes = _num_changes()
        state = self._device.state
        if state is None or self._structure() == self._structure_then:
            return
        self._let_go(None if state.plan is None else self._use.settings)

    def _let_go(self, settings: OptimizerSettings | None) -> None:
        """Release the program; the next call compiles a new one, which continues from here.

        The weights go to the host; the optimizer's states and the random numbers are kept.

        Args:
            settings: The settings of the optimizer that receives the states; None to drop the
                states.
        """
        state = self._device.state
        assert state is not None
        random_state = self._random.rng_state
        resting = self._carried[1] if self._carried is not None else {}
        carried = None if settings is None else (settings, {**resting, **state.read_all_states()})
        self.destroy()
        self._random.start, self._carried = random_state, carried

    def _attach(self) -> None:
        self._device.attach()
        assert self._device.state is not None
        self._device.state.log_optimizer_upload()
        self._random.log(leaving=False)

    def _structure(self) -> tuple[list[tuple[str, int]], list[bool]]:
        """Return what a program depends on in the model: its stages, and which weights train."""
        module, optimizer = self._device.module, self._use.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        updated = {id(one) for group in groups for one in group["params"]}
        trained = [one.requires_grad for one in module.parameters() if id(one) in updated]
        return assigned_stages(module), trained

    def _go_on(self, state: DeviceState) -> None:
        """Record the structure of the compiled program; restore the previous program's state."""
        self._num_changes, self._structure_then = _num_changes(), self._structure()
        assert self._device.compiled is not None
        constants = self._device.compiled.constants
        self._watch = ModelWatch(self._device.module, self._settings.model, constants)
        if self._carried is None:
            return
        settings, states = self._carried
        if settings is not self._use.settings:
            self._carried = None
            return
        # What the host has loaded since is newer. Parameters without a state from the previous
        # program start from the initial state.
        newer = set() if self._use.states is None else self._use.states.taken
        older = {name: value for name, value in states.items() if name not in newer}
        state.write_state({**state.read_all_states(), **older})
        # States of parameters that do not train now are kept until they train again.
        resting = states.keys() - state.read_all_states().keys()
        self._carried = settings, {name: states[name] for name in resting}
