"""The executor that ``trainingModel`` and ``inferenceModel`` return."""

from __future__ import annotations

import copy
import datetime
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from popsim_torch import _native, optim
from popsim_torch.enums import ConnectionType, MeanReductionStrategy, ReductionType
from popsim_torch.errors import (
    Error,
    UsageAssertionError,
    UsageValueError,
    closest_names,
)
from popsim_torch.executor import host_weights
from popsim_torch.executor.compile import CompiledModel, compile_model, make_plan
from popsim_torch.executor.device_state import DeviceState
from popsim_torch.executor.profile import Profile, profile
from popsim_torch.executor.weight_sync import WeightSync
from popsim_torch.ir import program_text
from popsim_torch.optim.planning import OptimizerSettings, read_optimizer
from popsim_torch.options import Options
from popsim_torch.stages import module_repr

__all__ = ["PoplarExecutor"]

_logger = logging.getLogger("poptorch::python")

_MAX_SEED = 2**64 - 1
_MAX_STEP = 2**63 - 1
_COPIED = ("_user_model", "_traced_model", "_options", "_optimizer", "_settings", "_rng_start")


class PoplarExecutor:
    """A model on the device. Made by ``trainingModel`` and ``inferenceModel``.

    Attributes that it does not have are those of the user's model.
    """

    def __init__(
        self, model: nn.Module, options: Options, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._user_model = model
        self._options = options
        self._optimizer = optimizer
        # The same parameters and sub-modules, but attributes (``training``) of its own.
        self._traced_model = copy.copy(model)
        seed = options.random_seed if options.exists("random_seed") else time.time_ns()
        # Where the device's random numbers begin, in the form of ``rng_state``.
        self._rng_start = [int(seed) & _MAX_SEED, 0]
        self._settings: OptimizerSettings | None = None
        self._start_without_device()
        if optimizer is not None:
            self._settings = self._read_optimizer(optimizer)
            self._wrap_host_model()
        self._options.freeze()

    def _start_without_device(self) -> None:
        """Set the attributes that belong to the device, and that no copy takes along."""
        self._compiled: CompiledModel | None = None
        self._state: DeviceState | None = None
        self._last_complete_run = 0  # of the executable's runs, counted from 1
        self._weights = WeightSync(self._traced_model)
        self._warned: set[str] = set()
        self._never_connects = self._options.connection_type == ConnectionType.Never

    def _wrap_host_model(self) -> None:
        """Let reads of the user's model see the weights that the device has trained."""
        host_weights.wrap(self._user_model, self.copyWeightsToHostIfNeeded, self.destroy)
        self._weights.announce()

    # Properties

    @property
    def model(self) -> nn.Module:
        """The user's module."""
        return self._user_model

    @property
    def options(self) -> Options:
        """The frozen options in use."""
        return self._options

    @property
    def training_mode(self) -> bool:
        """Whether this executor trains."""
        return self._optimizer is not None

    @property
    def rng_state(self) -> list[int]:
        """The seed and the number of micro-batches run, which random numbers are keyed with.

        Raises:
            Error: On reading and writing, when the model is not compiled, or runs in another
                thread.
        """
        executable = self._require_compiled("rng_state").executable
        with _native.translated_errors():
            return [executable.seed, executable.step]

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        executable = self._require_compiled("rng_state").executable
        numbers = [int(number) for number in state]
        limits = (_MAX_SEED, _MAX_STEP)
        if len(numbers) != 2 or not all(
            0 <= number <= limit for number, limit in zip(numbers, limits, strict=True)
        ):
            raise Error(
                f"rng_state: needs [seed, step] as read from it, two ints from 0 to {_MAX_SEED} "
                f"and {_MAX_STEP}; got {state!r}."
            )
        with _native.translated_errors():
            executable.seed, executable.step = numbers

    def __getattr__(self, name: str) -> Any:
        # What Python asks of an object by itself, such as to copy it, is not the model's to answer.
        is_pythons = name.startswith("__") and name.endswith("__")
        if is_pythons or "_user_model" not in self.__dict__:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        try:
            return getattr(self._user_model, name)
        except AttributeError as error:
            # The class of a wrapped model is not one that the user wrote.
            wrapped = type(self._user_model)
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

    # Life cycle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a combined batch; compile it first if that has not happened.

        Args:
            *args: As forward takes them. The first dimension of every tensor is the combined batch.
            **kwargs: The same.

        Returns:
            What forward returns, in new CPU tensors, one entry per micro-batch that the output mode
            keeps.

        Raises:
            Error: The call differs from the one that compiled the model, or the device failed, or
                another thread is using the executor.
            KeyboardInterrupt: Ctrl-C ends the call within moments. Weights, optimizer state and
                random numbers are then those behind a finished device iteration; anchors are not
                to be read before the next call.
        """
        compiled, inputs = self._prepare_call(args, kwargs)
        return self._run(compiled, inputs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model for arguments like these, and upload the weights, without running it.

        Raises:
            Error: The model cannot be compiled. The executor can be called again.
        """
        if self._compiled is not None:
            _logger.warning("compile: the model is compiled already; the call is ignored.")
            return
        self._compile(args, kwargs)

    def isCompiled(self) -> bool:
        """Return whether there is a program for the model."""
        return self._compiled is not None

    def isAttachedToDevice(self) -> bool:
        """Return whether the program is on the device: as soon as it is compiled."""
        return self._compiled is not None

    def compilationTime(self) -> datetime.timedelta:
        """Return how long compilation took.

        Raises:
            Error: The model is not compiled, or the progress bar is off.
        """
        if not self._options.show_compilation_progress_bar:
            raise Error(
                "compilationTime: not measured while the progress bar is off. Remove "
                "Options.showCompilationProgressBar(False)."
            )
        return self._require_compiled("compilationTime").duration

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
        self._compiled = None
        self._state = None
        self._last_complete_run = 0
        self._weights.detach()
        if self._optimizer is not None:
            host_weights.unwrap(self._user_model)
            host_weights.unwrap(self._traced_model)

    # Weights

    def copyWeightsToHost(self) -> None:
        """Copy the parameters and buffers that the device changes into the host's tensors.

        Raises:
            Error: The model is not compiled.
        """
        self._require_compiled("copyWeightsToHost")
        self._weights.download()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights to the host if the device has newer ones; return whether it did."""
        return self._weights.fetch()

    def copyWeightsToDevice(self) -> None:
        """Copy the host's parameters and floating-point buffers to the device.

        Training progress on the device that was not copied to the host is lost.

        Raises:
            Error: The model is not compiled.
        """
        self._require_compiled("copyWeightsToDevice")
        self._weights.upload()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state dictionary into the user's model, and upload it if the model is compiled.

        Returns:
            Torch's tuple of missing and unexpected keys.
        """
        result = self._user_model.load_state_dict(state_dict, strict=strict)
        if self._compiled is not None:
            self.copyWeightsToDevice()
        return result

    # Optimizer

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use another optimizer, or new values of the same one, from the next call on.

        After compilation only values of variable attributes can change; nothing is compiled again.

        Args:
            optimizer: From ``poptorch.optim`` or ``torch.optim``.

        Raises:
            Error: It would need another program, or this is an inference model.
            UsageAssertionError: Its type is not supported.
        """
        if self._optimizer is None:
            raise Error("setOptimizer: an inference model has no optimizer.")
        settings = self._read_optimizer(optimizer)
        if self._state is None or self._state.plan is None:
            self._optimizer, self._settings = optimizer, settings
            return
        trained = [update.parameter for update in self._state.plan.updates]
        self._state.check_weights(trained)
        plan = make_plan(settings, self._options, self._traced_model, trained)
        self._state.plan.check_replaceable(plan)
        previous = self._optimizer
        if optimizer is not previous and isinstance(previous, optim.Optimizer):
            previous._unlink()
        self._state.replace_plan(plan)
        self._optimizer, self._settings = optimizer, settings
        if optimizer is not previous and isinstance(optimizer, optim.Optimizer):
            optimizer._link(self._state)

    def _read_optimizer(self, optimizer: torch.optim.Optimizer) -> OptimizerSettings:
        """Copy an optimizer's values; half accumulators make the mean a running one."""
        settings = read_optimizer(
            optimizer,
            relax_checks=bool(self._options.relax_optimizer_checks),
            known_attributes=None if self._settings is None else self._settings.attributes,
        )
        training = self._options.Training
        if (
            settings.forces_running_mean
            and training.accumulation_and_replication_reduction_type == ReductionType.Mean
            and training.meanAccumulationAndReplicationReductionStrategy
            != MeanReductionStrategy.Running
        ):
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

    # Observing

    def getTensorNames(self) -> list[str]:
        """Return the names of all tensors of the compiled graph.

        Raises:
            UsageAssertionError: The model is not compiled.
        """
        if self._compiled is None:
            raise UsageAssertionError(
                "getTensorNames: the model is not compiled. Call it once, or model.compile(...)."
            )
        return list(self._compiled.program.graph.names)

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """Return what an anchor recorded in the last call.

        Args:
            short_name: The first argument of ``Options.anchorTensor``.

        Returns:
            A new CPU tensor; its first dimension holds one entry per micro-batch that the anchor's
            mode keeps.

        Raises:
            UsageAssertionError: There is no such anchor, or the model has not run, or its last call
                was not completed.
        """
        compiled = self._compiled
        if compiled is None or compiled.executable.num_runs == 0:
            raise UsageAssertionError(
                f"getAnchoredTensor: No tensor with name '{short_name}' yet: the model has not run."
            )
        if compiled.executable.num_runs != self._last_complete_run:
            raise UsageAssertionError(
                f"getAnchoredTensor: '{short_name}' is not complete: the last call was interrupted "
                "or failed, or another thread is in it. Call the model again."
            )
        anchors = compiled.program.anchors
        if short_name not in anchors:
            close = closest_names(short_name, anchors)
            hint = f" Closest name: '{close[0]}'." if close else ""
            raise UsageAssertionError(
                f"getAnchoredTensor: No tensor with name '{short_name}' among the "
                f"{len(anchors)} anchors.{hint} Register it with Options.anchorTensor before the "
                "model is wrapped."
            )
        anchor = anchors[short_name]
        executable = compiled.executable
        with _native.translated_errors():
            if anchor.kept is None:
                return anchor.of(executable.read(anchor.tensor))
            return anchor.of(executable.read_kept(anchor.kept))

    # Looking inside

    @property
    def compiled(self) -> CompiledModel:
        """The compiled model, for tools that look inside: its programs and the executable.

        What it is made of may change from one version to the next.

        Raises:
            Error: The model is not compiled.
        """
        return self._require_compiled("compiled")

    def program(self, *, host: bool = False) -> str:
        """Return the program of the compiled model as text.

        It has a line for each tensor that the program is given, for each op - result, inputs,
        attributes, and the modules and the line of code that it comes from - and for what comes
        back.

        Args:
            host: The program as it was fitted to this machine: fused, with its layouts. Otherwise
                the one that is the same on every machine.

        Raises:
            Error: The model is not compiled.
        """
        compiled = self._require_compiled("program")
        return program_text(compiled.host_program if host else compiled.program)

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
        with _native.translated_errors():
            measured = profile(compiled, inputs, repeats)
        self._last_complete_run = compiled.executable.num_runs
        return measured

    # Internals

    def _compile(self, args: Any, kwargs: Any) -> CompiledModel:
        if self._optimizer is not None and not host_weights.is_wrapped(self._user_model):
            self._wrap_host_model()
        with host_weights.without_sync():
            compiled = compile_model(
                self._traced_model,
                self._options,
                args,
                kwargs,
                optimizer=self._settings,
                warned=self._warned,
            )
        compiled.executable.seed, compiled.executable.step = self._rng_start
        state = DeviceState(self._traced_model, compiled)
        self._weights.let_trainers_catch_up()
        state.upload_weights()
        state.initialise_optimizer()
        if isinstance(self._optimizer, optim.Optimizer):
            self._optimizer._link(state)
        # Nothing before this line leaves a trace if it fails.
        self._compiled, self._state = compiled, state
        self._weights.attach(state)
        return compiled

    def _prepare_call(self, args: Any, kwargs: Any) -> tuple[CompiledModel, list[torch.Tensor]]:
        """Return the compiled model and the inputs of a call, all weights up to date."""
        if self._never_connects:
            raise UsageAssertionError("Trying to run a model with ConnectionType.Never.")
        compiled = self._compiled
        if compiled is None:
            compiled = self._compile(args, kwargs)
        inputs = compiled.arguments.flatten(args, kwargs)
        if self._optimizer is None:
            self._weights.pull()
        return compiled, inputs

    def _run(self, compiled: CompiledModel, inputs: list[torch.Tensor]) -> Any:
        # What a call costs beyond the native program: nothing here may depend on the model's size.
        program, optimizer = compiled.program, self._optimizer
        device_inputs = self._device_inputs(compiled, inputs)
        try:
            results = compiled.executable.run(device_inputs)
        except _native.ERRORS as error:
            raise _native.translated(error) from error
        self._last_complete_run = compiled.executable.num_runs
        if optimizer is not None:
            # Schedulers of torch warn when they believe that no update came before theirs.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        num_outputs = len(program.outputs)
        if len(results) == num_outputs:
            return compiled.outputs.unflatten(results)
        for position, value in zip(program.changed_inputs, results[num_outputs:], strict=False):
            inputs[position].copy_(value)
        return compiled.outputs.unflatten(results[:num_outputs])

    @staticmethod
    def _device_inputs(compiled: CompiledModel, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the inputs in the types that the device takes."""
        if not compiled.converts_inputs:
            return inputs
        return [
            tensor.to(dtype) for tensor, dtype in zip(inputs, compiled.input_dtypes, strict=True)
        ]

    def _require_compiled(self, what: str) -> CompiledModel:
        if self._compiled is None:
            raise Error(
                f"{what}: the model has not been compiled or has been destroyed. Call it, or "
                "model.compile(...), first."
            )
        return self._compiled
