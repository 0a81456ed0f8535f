"""The executor that ``trainingModel`` and ``inferenceModel`` return."""

from __future__ import annotations

import copy
import sys
import time
import weakref
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from popsim_torch import _native, logs, optim, profiling
from popsim_torch.errors import Error
from popsim_torch.executor import host_weights
from popsim_torch.executor.compile import CompiledModel, compile_model
from popsim_torch.executor.connection import Connection
from popsim_torch.executor.device_state import DeviceState
from popsim_torch.executor.files import Files
from popsim_torch.executor.inspection import Inspection
from popsim_torch.executor.no_backward import explain_backward
from popsim_torch.executor.optimizer_use import OptimizerUse
from popsim_torch.executor.parameter_proxy import ParameterProxy
from popsim_torch.executor.profile import Profile, profile
from popsim_torch.executor.random_state import MAX_SEED
from popsim_torch.executor.reach import failures_told
from popsim_torch.executor.report import promise_report
from popsim_torch.executor.restaging import Restaging
from popsim_torch.executor.timing import Timing
from popsim_torch.executor.weight_sync import WeightSync
from popsim_torch.optim.captures import unwrapped
from popsim_torch.options import Options
from popsim_torch.stages import module_repr, num_assignments

__all__ = ["PoplarExecutor"]

_SHOWN = ("copyWeightsToHost", "copyWeightsToDevice", "setOptimizer", "compile", "destroy")
_COPIED = (
    *("_user_model", "_traced_model", "_options", "_optimizer", "_settings", "_captures"),
    "_rng_start",
)


class PoplarExecutor(Files, OptimizerUse, Inspection, Timing, Restaging):
    """A model on the device. Made by ``trainingModel`` and ``inferenceModel``.

    Attributes that it does not have are those of the user's model.
    """

    def __init__(
        self, model: nn.Module, options: Options, optimizer: torch.optim.Optimizer | None
    ) -> None:
        explain_backward()
        self._options = options
        # The same parameters and sub-modules, but attributes (``training``) of its own.
        self._traced_model = copy.copy(model)
        self._user_model = self._traced_model if optimizer is None else model
        seed = options.random_seed if options.exists("random_seed") else time.time_ns()
        # Where the device's random numbers begin, in the form of ``rng_state``.
        self._rng_start = [int(seed) & MAX_SEED, 0]
        self._settings = None
        self._start_without_device()
        self._optimizer, self._captures = None, ()
        if optimizer is not None:
            self._optimizer, self._captures = unwrapped(optimizer)
            self._settings = self._read_optimizer(self._optimizer)
            self._wrap_host_model()
        self._options.freeze()
        self._show_calls()

    def _start_without_device(self) -> None:
        """Set the attributes that belong to the device, and that no copy takes along."""
        self._compiled = None
        self._state = None
        self._carried = None
        self._ready: CompiledModel | None = None  # compiled and attached
        self._connection = Connection(self._options)
        self._last_complete_run = 0  # of the executable's runs, counted from 1
        self._fitted_anchors = None
        self._options._take_anchors(True)
        self._weights = WeightSync(self._traced_model)
        self._num_assignments = num_assignments()
        self._warned: set[str] = set()
        self._report: weakref.finalize[Any, Any] | None = None  # writes profile.pop
        self._wrapping: host_weights.Wrapping | None = None  # of the user's model, in training

    def _show_calls(self) -> None:
        """Show calls of some methods in PopVision's trace, if one is written."""
        kind = "inferenceModel" if self._optimizer is None else "trainingModel"
        self._channel = profiling.Channel(f"poptorch.{kind}")
        self._channel.instrument(self, *_SHOWN)

    def _wrap_host_model(self) -> None:
        """Let reads of the user's model see the weights that the device has trained."""
        self._wrapping = host_weights.wrap(
            self._user_model, self.copyWeightsToHostIfNeeded, self.destroy
        )
        self._weights.announce()

    def _wrap_again(self) -> None:
        """Wrap the user's model if it was unwrapped since.

        Raises:
            UsageRuntimeError: Another executor trains it now.
        """
        if self._optimizer is not None and self._wrapping is None:
            self._wrap_host_model()

    # Properties

    @property
    def model(self) -> nn.Module:
        """The module: the user's for training, for inference the executor's shallow copy of it.

        The copy shares parameters, buffers and sub-modules with the user's module, and has other
        attributes, such as the training flag, of its own.
        """
        return self._user_model

    @property
    def options(self) -> Options:
        """The frozen options in use."""
        return self._options

    def __getattr__(self, name: str) -> Any:
        # What Python asks of an object by itself, such as to copy it, is not the model's to answer.
        is_pythons = name.startswith("__") and name.endswith("__")
        if is_pythons or "_user_model" not in self.__dict__:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        model = self._user_model
        if model._parameters.get(name) is not None:
            return ParameterProxy(self, name)
        try:
            return getattr(model, name)
        except AttributeError as error:
            # The class of a wrapped model is not one that the user wrote.
            wrapped = type(model)
            own = getattr(wrapped, "_popsim_class", wrapped)
            error.args = tuple(
                str(part).replace(f"'{wrapped.__name__}'", f"'{own.__name__}'")
                for part in error.args
            )
            raise

    def __repr__(self) -> str:
        return module_repr(self._user_model)

    def __del__(self) -> None:
        # The device goes away; its training progress must not. The garbage collector may come at
        # any time, also while another model is being traced.
        if self.__dict__.get("_optimizer") is not None and not sys.is_finalizing():
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self._release()

    # Copies

    def __copy__(self) -> PoplarExecutor:
        """Return the executor itself: a device has one, and lives as long as anyone holds it."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return what a deep copy or a saved executor consists of: all but the compiled program.

        The copy has a model, options and an optimizer of its own, goes on from the weights,
        optimizer state and random numbers that this executor has now, and compiles when it is
        called.
        """
        self.copyWeightsToHostIfNeeded()
        state = {name: self.__dict__[name] for name in _COPIED}
        if self._compiled is not None:
            state["_rng_start"] = self.rng_state
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._options.freeze()
        self._start_without_device()
        if self._optimizer is not None:
            self._wrap_host_model()
        self._show_calls()

    # Life cycle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a combined batch; compile and attach it first where that is needed.

        Args:
            *args: As forward takes them. The first dimension of every tensor is the combined batch.
            **kwargs: The same.

        Returns:
            What forward returns, in new CPU tensors, one entry per micro-batch that the output mode
            keeps.

        Raises:
            Error: The call differs from the one that compiled the model, or no device is free, or
                the device failed, or another thread is using the executor.
            UsageAssertionError: The model never attaches to a device.
            KeyboardInterrupt: Ctrl-C ends the call within moments. Weights, optimizer state and
                random numbers are then those behind a finished device iteration; anchors are not
                to be read before the next call.
        """
        compiled, inputs = self._prepare_call(args, kwargs)
        return self._run(compiled, inputs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model for arguments like these, attach, and upload weights, without a run.

        Raises:
            Error: The model cannot be compiled, or no device is free. The executor can be called
                again.
        """
        if self._compiled is not None:
            logs.python.warning("compile: the model is compiled already; the call is ignored.")
            return
        self._compile(args, kwargs)

    def attachToDevice(self) -> None:
        """Take a device again, and upload weights, optimizer state and random numbers.

        Raises:
            Error: The model is not compiled, or already attached, or no device is free.
            UsageAssertionError: The model never attaches.
        """
        self._require_compiled("attachToDevice")
        self._connection.check_online("attach a model")
        if self._connection.attached:
            raise Error(
                "attachToDevice: the model is already attached to a device. It is from compilation "
                "on, until detachFromDevice()."
            )
        self._attach()

    def detachFromDevice(self) -> None:
        """Bring weights and optimizer state to the host, and let others have the device.

        The next call, or ``attachToDevice()``, goes on where this one stopped, with the weights
        that the host has then.

        Raises:
            Error: The model is not compiled or not attached, or another thread is in a call.
        """
        self._require_compiled("detachFromDevice")
        if not self._connection.attached:
            raise Error(
                "detachFromDevice: the model is not attached to a device. isAttachedToDevice() "
                "tells whether it is."
            )
        if self._weights.ahead:
            self._weights.download()
        if isinstance(self._optimizer, optim.Optimizer):
            self._optimizer._read_back()
        self._log_random_state(leaving=True)
        self._ready = None
        self._connection.detach()

    def destroy(self) -> None:
        """Bring weights and optimizer state to the host, free the device, unwrap the model.

        The executor can be called again and then compiles anew. Does nothing when the model is not
        compiled.
        """
        if self._compiled is not None:
            self._release()

    def _release(self) -> None:
        """Bring everything to the host and let go of device and model."""
        self._weights.fetch(what_fits=True)
        if self._compiled is not None and isinstance(self._optimizer, optim.Optimizer):
            self._optimizer._unlink()
        if self._report is not None:
            self._report()
        self._ready = None
        self._compiled = None
        self._state = None
        self._options._take_anchors(True)
        self._last_complete_run = 0
        self._weights.detach()
        self._connection.detach()
        if self._wrapping is not None:
            self._wrapping.undo()
            self._wrapping = None

    # Looking inside

    def profile(self, *args: Any, repeats: int = 1, **kwargs: Any) -> Profile:
        """Call the model several times and return how long each op of the program took.

        These are calls like any other: weights train, random numbers move on. What they return is
        dropped.

        Args:
            *args: As for a call.
            repeats: How many calls (count); the time of an op is the median over them.
            **kwargs: As for a call.

        Raises:
            Error: ``repeats`` is less than 1, or a call fails.
        """
        compiled, given = self._prepare_call(args, kwargs)
        inputs = self._device_inputs(compiled, given)
        queues = nullcontext() if compiled.queues is None else compiled.queues.running()
        with queues, _native.translated_errors():
            measured = profile(compiled, inputs, repeats)
        self._last_complete_run = compiled.executable.num_runs
        return measured

    # Internals

    def _compile(self, args: Any, kwargs: Any) -> CompiledModel:
        return self._take(self._compile_model(args, kwargs))

    def _compile_model(self, args: Any, kwargs: Any) -> CompiledModel:
        """Return the compiled model; nothing of it is on the device yet."""
        self._check_before_compilation()
        with (
            host_weights.without_sync(),
            self._channel.tracepoint("modelCompilation"),
            failures_told(self._traced_model),
        ):
            return compile_model(
                self._traced_model,
                self._options,
                args,
                kwargs,
                optimizer=self._settings,
                captures=self._captures,
                warned=self._warned,
                channel=self._channel,
            )

    def _check_before_compilation(self) -> None:
        """Check what does not depend on the program, and wrap the user's model if it is not."""
        self._connection.check_settings(self._options)
        self._warn_of_missing_cycles()
        self._check_updatable_buffers()
        self._wrap_again()

    def _take(self, compiled: CompiledModel) -> CompiledModel:
        """Bring a compiled model to the device, with weights, optimizer and random numbers."""
        compiled.executable.seed, compiled.executable.step = self._rng_start
        state = DeviceState(self._traced_model, compiled)
        self._connection.attach_compiled(compiled.run.num_ipus)
        try:
            if self._connection.attached:
                self._weights.let_trainers_catch_up()
                state.upload_weights()
            state.initialise_optimizer()
            if isinstance(self._optimizer, optim.Optimizer):
                self._optimizer._link(state)
        except BaseException:
            self._connection.detach()
            raise
        # Nothing before this line leaves a trace if it fails.
        self._compiled, self._state = compiled, state
        self._options._take_anchors(False)
        self._note_assignment()
        self._report = promise_report(self, compiled, self._options)
        self._weights.attach(state)
        if self._connection.attached:
            self._ready = compiled
            self._log_random_state(leaving=False)
        return compiled

    def _attach(self) -> CompiledModel:
        """Take a device for the compiled model, and go on with the host's weights."""
        compiled, state = self._compiled, self._state
        assert compiled is not None and state is not None
        self._connection.attach(compiled.run.num_ipus)
        try:
            self._weights.let_trainers_catch_up()
            state.upload_weights()
        except BaseException:
            self._connection.detach()
            raise
        state.log_optimizer_upload()
        self._log_random_state(leaving=False)
        self._ready = compiled
        return compiled

    def _become_ready(self, args: Any, kwargs: Any) -> CompiledModel:
        """Compile or attach what a call is about to run."""
        self._connection.check_online("run a model")
        return self._compile(args, kwargs) if self._compiled is None else self._attach()

    def _prepare_call(self, args: Any, kwargs: Any) -> tuple[CompiledModel, list[torch.Tensor]]:
        """Return the compiled model and the inputs of a call, all weights up to date."""
        if self._num_assignments != num_assignments():
            self._follow_assignment()
        compiled = self._ready
        if compiled is None:
            compiled = self._become_ready(args, kwargs)
        inputs = compiled.arguments.flatten(args, kwargs)
        optimizer = self._optimizer
        if optimizer is None or self._weights.has_loops:
            self._weights.pull(loops_alone=optimizer is not None)
        # The cheaper question first: there is seldom anything to hand over.
        if getattr(optimizer, "_pending", None) is not None and isinstance(
            optimizer, optim.Optimizer
        ):
            optimizer._hand_over()
        return compiled, inputs

    def _run(self, compiled: CompiledModel, inputs: list[torch.Tensor]) -> Any:
        # What a call costs beyond the native program: nothing here may depend on the model's size.
        program, optimizer = compiled.program, self._optimizer
        given = self._device_inputs(compiled, inputs) if compiled.converts_inputs else inputs
        if self._channel.is_shown or compiled.queues is not None:
            results = self._run_shown(compiled, given)
        else:
            results = _run_program(compiled, given)
        self._last_complete_run = compiled.executable.num_runs
        self._fitted_anchors = None
        if optimizer is not None:
            # Schedulers of torch warn when they believe that no update came before theirs.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        num_outputs = len(program.outputs)
        if len(results) == num_outputs:
            return compiled.outputs.unflatten(results)
        for position, value in zip(program.changed_inputs, results[num_outputs:], strict=False):
            inputs[position].copy_(value)
        return compiled.outputs.unflatten(results[:num_outputs])

    def _run_shown(self, compiled: CompiledModel, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run a program, and let those know of it who are to."""
        with ExitStack() as stack:
            if compiled.queues is not None:
                stack.enter_context(compiled.queues.running())
            if self._channel.is_shown:
                stack.enter_context(self._channel.tracepoint("modelExecution"))
            return _run_program(compiled, given)

    @staticmethod
    def _device_inputs(compiled: CompiledModel, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the inputs in the types that the device takes; none if it makes them itself."""
        if not compiled.converts_inputs:
            return inputs
        if not compiled.run.reads_inputs:
            return []
        return [
            tensor.to(dtype) for tensor, dtype in zip(inputs, compiled.input_dtypes, strict=True)
        ]


def _run_program(compiled: CompiledModel, given: list[torch.Tensor]) -> list[torch.Tensor]:
    try:
        return compiled.executable.run(given, compiled.host_code)
    except _native.ERRORS as error:
        raise _native.translated(error) from error
