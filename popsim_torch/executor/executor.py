"""The executor that ``trainingModel`` and ``inferenceModel`` return."""

from __future__ import annotations

import copy
import sys
import time
from typing import Any, Generic, cast

import torch
from torch import nn
from typing_extensions import ParamSpec, TypeVar

from popsim_torch import optim, profiling
from popsim_torch.errors import Error, closest_names, listed_names
from popsim_torch.executor.base import HasModel
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.exposed import exposed
from popsim_torch.executor.files import Files
from popsim_torch.executor.inspection import Inspection
from popsim_torch.executor.life_cycle import LifeCycle
from popsim_torch.executor.no_backward import explain_backward
from popsim_torch.executor.optimizer_use import OptimizerUse
from popsim_torch.executor.parameter_proxy import ParameterProxy
from popsim_torch.executor.profile import Profile, profile
from popsim_torch.executor.random_state import MAX_SEED, RandomState
from popsim_torch.executor.summary import ModelSummary, summarise_model
from popsim_torch.executor.tensor_details import TensorNames
from popsim_torch.executor.timing import Timing
from popsim_torch.executor.tracebacks import shortened, shows_short_tracebacks
from popsim_torch.executor.weight_copies import WeightCopies
from popsim_torch.options import Options
from popsim_torch.options.model_settings import SettingsThen
from popsim_torch.private_torch.modes import DisableTorchFunction, disable_current_modes
from popsim_torch.private_torch.module_parts import own_parameters
from popsim_torch.stages import module_repr
from popsim_torch.tables import html_table

__all__ = ["PoplarExecutor"]

P = ParamSpec("P", default=...)
R = TypeVar("R", default=Any)
_SHOWN = ("copyWeightsToHost", "copyWeightsToDevice", "setOptimizer", "compile", "destroy")


class PoplarExecutor(HasModel, Generic[P, R]):
    """A model on the device. Made by ``trainingModel`` and ``inferenceModel``.

    Attributes that it does not have are those of the user's model. To type checkers it is
    ``PoplarExecutor[P, R]``: what the model's forward takes and what it returns.
    """

    def __init__(
        self, model: nn.Module, options: Options, optimizer: torch.optim.Optimizer | None
    ) -> None:
        explain_backward()
        # The same parameters and sub-modules, but attributes (``training``) of its own.
        traced_model = copy.copy(model)
        self._user_model = traced_model if optimizer is None else model
        seed = options.random_seed if options.exists("random_seed") else time.time_ns()
        start = [int(seed) & MAX_SEED, 0]
        self._build(traced_model, options, start, optimizer, wrapped=model)

    def _build(
        self,
        traced_model: nn.Module,
        options: Options,
        start: list[int],
        optimizer: torch.optim.Optimizer | None,
        copied: Any = None,
        wrapped: nn.Module | None = None,
    ) -> None:
        """Make the parts of an executor, without a program."""
        training = optimizer is not None
        settings = SettingsThen(wrapped or self._user_model, training=training)
        channel = profiling.Channel(
            "poptorch." + ("trainingModel" if training else "inferenceModel")
        )
        self._device = device = DeviceProgram(traced_model, options, channel)
        self._use = OptimizerUse(device, optimizer, copied)
        self._random = RandomState(device, start)
        self._copies = WeightCopies(device, self._use, self._user_model)
        self._timing = Timing(device, training=training)
        self._inspection = Inspection(device)
        self._life = LifeCycle(
            device, self._user_model, self._use, self._random, self._copies, self._timing, settings
        )
        self._files = Files(device, self._life, self._use, self._random)
        self._life.wrap()
        device.options.freeze()
        channel.instrument(self, *_SHOWN)

    # What the parts do

    compile = exposed("_life", LifeCycle.compile)
    attachToDevice = exposed("_life", LifeCycle.attachToDevice)
    detachFromDevice = exposed("_life", LifeCycle.detachFromDevice)
    destroy = exposed("_life", LifeCycle.destroy)
    setOptimizer = exposed("_use", OptimizerUse.setOptimizer)
    copyWeightsToHost = exposed("_copies", WeightCopies.copyWeightsToHost)
    copyWeightsToHostIfNeeded = exposed("_copies", WeightCopies.copyWeightsToHostIfNeeded)
    copyWeightsToDevice = exposed("_copies", WeightCopies.copyWeightsToDevice)
    copyNamedBuffersToDevice = exposed("_copies", WeightCopies.copyNamedBuffersToDevice)
    load_state_dict = exposed("_copies", WeightCopies.load_state_dict)
    isCompiled = exposed("_inspection", Inspection.isCompiled)
    isAttachedToDevice = exposed("_inspection", Inspection.isAttachedToDevice)
    getTensorNames = cast(TensorNames, exposed("_inspection", Inspection.getTensorNames))
    getAnchoredTensor = exposed("_inspection", Inspection.getAnchoredTensor)
    program = exposed("_inspection", Inspection.program)
    compile_log = exposed("_inspection", Inspection.compile_log)
    compilationTime = exposed("_timing", Timing.compilationTime)
    cycleCount = exposed("_timing", Timing.cycleCount)
    getPerfCounters = exposed("_timing", Timing.getPerfCounters)
    getLatency = exposed("_timing", Timing.getLatency)
    getHostIpuLatency = exposed("_timing", Timing.getHostIpuLatency)
    getComputeLatency = exposed("_timing", Timing.getComputeLatency)
    getIpuHostLatency = exposed("_timing", Timing.getIpuHostLatency)
    save = exposed("_files", Files.save)
    compileAndExport = exposed("_files", Files.compileAndExport)
    loadExecutable = exposed("_files", Files.loadExecutable)

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
        return self._device.options

    @property
    def training_mode(self) -> bool:
        """Whether this executor trains."""
        return self._use.optimizer is not None

    @property
    def compiled(self) -> CompiledModel:
        """The compiled model, for tools that look inside: its programs and the executable.

        What it is made of may change from one version to the next.

        Raises:
            Error: The model is not compiled.
        """
        return self._inspection.compiled

    @property
    def rng_state(self) -> list[int]:
        """The seed and the number of micro-batches run, which random numbers are keyed with.

        Raises:
            Error: On reading and writing, when the model is not compiled, or runs in another
                thread.
        """
        return self._random.rng_state

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        self._random.rng_state = state

    def __getattr__(self, name: str) -> Any:
        # What Python asks of an object by itself, such as to copy it, is not the model's to answer.
        is_pythons = name.startswith("__") and name.endswith("__")
        if is_pythons or "_user_model" not in self.__dict__:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        model = self._user_model
        if own_parameters(model).get(name) is not None:
            return ParameterProxy(self._device, model, name)
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
            if str(error).endswith(f"no attribute '{name}'") and not name.startswith("_"):
                self._suggest(name, error)
                raise error.with_traceback(None)
            raise

    def __dir__(self) -> list[str]:
        # What can be asked for, so that completion reaches the layers of the model.
        return sorted({*super().__dir__(), *dir(self.__dict__.get("_user_model"))})

    def _suggest(self, name: str, error: AttributeError) -> None:
        """Add to an error which methods, and attributes of the model, look like a name."""
        names = sorted({*dir(type(self)), *dir(self._user_model)})
        close = closest_names(name, (one for one in names if not one.startswith("_")), limit=3)
        if close:
            many = "s" if len(close) > 1 else ""
            error.args = (f"{error}. Closest name{many}: {listed_names(close)}.",)
            error.obj = None  # Python would suggest some of them again

    def __repr__(self) -> str:
        if "_inspection" not in self.__dict__:
            return super().__repr__()
        facts = ", ".join(f"{name} {value}" for name, value in self._figures().items())
        return f"{self._made_by}: {facts}\n{module_repr(self._user_model)}"

    @property
    def _made_by(self) -> str:
        return "trainingModel" if self.training_mode else "inferenceModel"

    def _figures(self) -> dict[str, object]:
        """Return what matters, by name."""
        kind = type(self._user_model)
        figures: dict[str, object] = {
            "model": getattr(kind, "_popsim_class", kind).__name__,
            "state": "compiled" if self.isCompiled() else "not compiled",
            "parameters": sum(one.numel() for one in self._user_model.parameters()),
        }
        if self._use.optimizer is not None:
            figures["optimizer"] = type(self._use.optimizer).__name__
        if self.isCompiled():
            compiled = self.compiled
            figures["ops"] = len(compiled.program.graph.ops)
            figures["IPUs"] = compiled.run.num_ipus
            figures["tensor names"] = len(compiled.program.tensor_names())
        return figures

    def _repr_html_(self) -> str:
        return html_table(self._made_by, self._figures())

    def __del__(self) -> None:
        # The device goes away; its training progress must not. The garbage collector may come at
        # any time, also while another model is being traced.
        life = self.__dict__.get("_life")
        if life is not None and self._use.optimizer is not None and not sys.is_finalizing():
            with disable_current_modes(), DisableTorchFunction():
                life.release()

    # Copies

    def __copy__(self) -> PoplarExecutor[P, R]:
        """Return the executor itself: a device has one, and lives as long as anyone holds it."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return what a deep copy or a saved executor consists of: all but the compiled program.

        The copy has a model, options and an optimizer of its own, goes on from the weights,
        optimizer state and random numbers that this executor has now, and compiles when it is
        called.
        """
        self._copies.copyWeightsToHostIfNeeded()
        use, device = self._use, self._device
        return {
            "user_model": self._user_model,
            "traced_model": device.module,
            "options": device.options,
            "optimizer": use.optimizer,
            "copied": (use.settings, use.captures),
            "start": self._random.start if device.compiled is None else self.rng_state,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self._user_model = state.pop("user_model")
        self._build(**state)

    # Calls

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
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
                random numbers are then those after a finished device iteration; anchors are not
                to be read before the next call.
        """
        try:
            compiled, inputs = self._prepare_call(args, kwargs)
            result: R = self._run(compiled, inputs)
            return result
        except Exception as error:
            raise shortened(error, unless="POPSIM_TRACEBACK=full")

    # Looking inside

    @shows_short_tracebacks
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
        return self._device.use(lambda: profile(compiled, inputs, repeats))

    def summary(
        self, *args: Any, depth: int | None = None, width: int | None = None, **kwargs: Any
    ) -> ModelSummary:
        """Describe the modules of the model: shapes, parameters, bytes, stages, names to anchor.

        Nothing runs, and nothing changes: a model that is not compiled yet is compiled apart.

        Args:
            *args: As for a call; none for a model that is compiled.
            depth: How deep the printed tree goes; None for all of it.
            width: Of the printed table (characters); None for that of the terminal.
            **kwargs: As for a call.

        Returns:
            A row for each module; it prints as a table.

        Raises:
            Error: The model cannot be compiled, or is not and there are no arguments.
        """
        compiled = self._device.compiled
        if compiled is None:
            if not args and not kwargs:
                raise Error(
                    "summary: the model is not compiled, and there are no arguments to compile it "
                    "for. Pass those of a call: summary(x)."
                )
            compiled = self._life.compile_alone(args, kwargs)
        elif args or kwargs:
            compiled.arguments.flatten(args, kwargs)  # refuses what is not like the first call
        return summarise_model(self._device.module, compiled.program, depth, width)

    # Internals

    def _prepare_call(self, args: Any, kwargs: Any) -> tuple[CompiledModel, list[torch.Tensor]]:
        """Return the compiled model and the inputs of a call, all weights up to date."""
        self._life.follow_settings()
        device, optimizer = self._device, self._use.optimizer
        compiled = device.ready
        if compiled is None:
            compiled = self._life.become_ready(args, kwargs)
        inputs = compiled.arguments.flatten(args, kwargs)
        if (watch := self._use.watch) is not None:
            watch.check()
        if optimizer is None or device.weights.has_loops:
            device.weights.pull(loops_alone=optimizer is not None)
        # The cheaper question first: there is seldom anything to hand over.
        if getattr(optimizer, "_pending", None) is not None and isinstance(
            optimizer, optim.Optimizer
        ):
            optimizer._hand_over()
        return compiled, inputs

    def _run(self, compiled: CompiledModel, inputs: list[torch.Tensor]) -> Any:
        # What a call costs beyond the native program: nothing here may depend on the model's size.
        given = self._device_inputs(compiled, inputs) if compiled.converts_inputs else inputs
        results = self._device.run(given)
        program = compiled.program
        num_outputs = len(program.outputs)
        if len(results) == num_outputs:
            return compiled.outputs.unflatten(results)
        for position, value in zip(program.changed_inputs, results[num_outputs:], strict=False):
            inputs[position].copy_(value)
        return compiled.outputs.unflatten(results[:num_outputs])

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
