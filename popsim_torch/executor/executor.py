"""The executor that ``trainingModel`` and ``inferenceModel`` return."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from typing import Any, Generic, cast

import torch
from torch import nn
from typing_extensions import ParamSpec, TypeVar

from popsim_torch import optim, profiling
from popsim_torch.errors import Error, closest_names, listed_names
from popsim_torch.executor.base import HasModel
from popsim_torch.executor.changed_inputs import check_apart
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.estimating import Estimating
from popsim_torch.executor.exposed import exposed
from popsim_torch.executor.files import Files
from popsim_torch.executor.inspection import Inspection
from popsim_torch.executor.levers import Levers, measure_levers
from popsim_torch.executor.life_cycle import LifeCycle
from popsim_torch.executor.no_backward import explain_backward
from popsim_torch.executor.observing import Observing
from popsim_torch.executor.optimizer_use import OptimizerUse
from popsim_torch.executor.parameter_proxy import ParameterProxy
from popsim_torch.executor.pipeline_view import PipelineView
from popsim_torch.executor.profile import Profile, profile
from popsim_torch.executor.random_state import MAX_SEED, RandomState
from popsim_torch.executor.summary import ModelSummary, summarise_model
from popsim_torch.executor.tensor_details import TensorNames
from popsim_torch.executor.timing import Timing
from popsim_torch.executor.tracebacks import shortened, shows_short_tracebacks
from popsim_torch.executor.weight_copies import WeightCopies
from popsim_torch.options import Options
from popsim_torch.options.model_settings import SettingsThen
from popsim_torch.private_torch.functorch import temporarily_clear_interpreter_stack
from popsim_torch.private_torch.modes import DisableTorchFunction, disable_current_modes
from popsim_torch.private_torch.module_parts import own_parameters
from popsim_torch.shallow_copies import shallow_copy
from popsim_torch.stages import module_repr
from popsim_torch.tables import html_table

__all__ = ["PoplarExecutor"]

P = ParamSpec("P", default=...)
R = TypeVar("R", default=Any)
_SHOWN = ("copyWeightsToHost", "copyWeightsToDevice", "setOptimizer", "compile", "destroy")


class PoplarExecutor(HasModel, Generic[P, R]):
    """A model on the device; ``trainingModel`` and ``inferenceModel`` make it.

    Attributes that the executor does not have are read from the user's model. For type checkers the
    class is ``PoplarExecutor[P, R]``: the arguments and the result of the model's forward.
    """

    def __init__(
        self, model: nn.Module, options: Options, optimizer: torch.optim.Optimizer | None
    ) -> None:
        explain_backward()
        # The same parameters and sub-modules, but separate attributes such as ``training``.
        traced_model = shallow_copy(model)
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
        """Make the parts of an executor; there is no program yet."""
        training = optimizer is not None
        settings = SettingsThen(self._user_model if wrapped is None else wrapped, training=training)
        channel = profiling.Channel(
            "poptorch." + ("trainingModel" if training else "inferenceModel")
        )
        self._device = device = DeviceProgram(traced_model, options, channel)
        self._use = OptimizerUse(device, optimizer, copied)
        self._random = RandomState(device, start)
        self._copies = WeightCopies(device, self._use, self._user_model)
        self._timing = Timing(device, training=training)
        self._inspection = Inspection(device)
        self._observing = Observing(options)
        self._observing.join(device)
        self._view = PipelineView(device)
        self._life = LifeCycle(
            device, self._user_model, self._use, self._random, self._copies, settings
        )
        self._estimating = Estimating(device, self._life)
        self._files = Files(device, self._life, self._use, self._random)
        self._life.wrap()
        device.options.freeze()
        channel.instrument(self, *_SHOWN)

    # The methods of the parts.

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
    names = exposed("_inspection", Inspection.names)
    getAnchoredTensor = exposed("_inspection", Inspection.getAnchoredTensor)
    anchor_axes = exposed("_inspection", Inspection.anchor_axes)
    program = exposed("_inspection", Inspection.program)
    compile_log = exposed("_inspection", Inspection.compile_log)
    observing = exposed("_observing", Observing.observing)
    observations = exposed("_observing", Observing.observations)
    add_sink = exposed("_observing", Observing.add_sink)
    close_sinks = exposed("_observing", Observing.close_sinks)
    record = exposed("_observing", Observing.record)
    estimate = exposed("_estimating", Estimating.estimate)
    schedule = exposed("_view", PipelineView.schedule)
    stages = exposed("_view", PipelineView.stages)
    record_timeline = exposed("_view", PipelineView.record_timeline)
    timeline = exposed("_view", PipelineView.timeline)
    compilationTime = exposed("_timing", Timing.compilationTime)
    cycleCount = exposed("_timing", Timing.cycleCount)
    getPerfCounters = exposed("_timing", Timing.getPerfCounters)
    traffic = exposed("_timing", Timing.traffic)
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
        """The module: for training the user's, for inference the executor's shallow copy of it.

        The copy shares parameters, buffers and sub-modules with the user's module, but its other
        attributes, such as the training flag, are separate.
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

        Its attributes may change from one version to the next.

        Raises:
            Error: The model is not compiled.
        """
        return self._inspection.compiled

    @property
    def rng_state(self) -> list[int]:
        """The seed and the number of micro-batches run, which determine the random numbers.

        Raises:
            Error: The model is not compiled, or runs in another thread. Reading and writing both
                raise this error.
        """
        return self._random.rng_state

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        self._random.rng_state = state

    def __getattr__(self, name: str) -> Any:
        # Python looks up special methods on its own, for example to copy; the model must not
        # answer.
        is_pythons = name.startswith("__") and name.endswith("__")
        if is_pythons or "_user_model" not in self.__dict__:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        model = self._user_model
        if own_parameters(model).get(name) is not None:
            return ParameterProxy(self._device, model, name)
        try:
            return getattr(model, name)
        except AttributeError as error:
            # The class of a wrapped model is generated; messages name the user's class.
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
        # The names include those of the model, so that tab completion finds its layers.
        return sorted({*super().__dir__(), *dir(self.__dict__.get("_user_model"))})

    def _suggest(self, name: str, error: AttributeError) -> None:
        """Add methods, and attributes of the model, with similar names to an error message."""
        names = sorted({*dir(type(self)), *dir(self._user_model)})
        close = closest_names(name, (one for one in names if not one.startswith("_")), limit=3)
        if close:
            many = "s" if len(close) > 1 else ""
            error.args = (f"{error}. Closest name{many}: {listed_names(close)}.",)
            error.obj = None  # otherwise Python would suggest some of the names again

    def __repr__(self) -> str:
        if "_inspection" not in self.__dict__:
            return super().__repr__()
        facts = ", ".join(f"{name} {value}" for name, value in self._figures().items())
        return f"{self._made_by}: {facts}\n{module_repr(self._user_model)}"

    @property
    def _made_by(self) -> str:
        return "trainingModel" if self.training_mode else "inferenceModel"

    def _figures(self) -> dict[str, object]:
        """Return the most important properties, by name."""
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
        # The device is released here, but its training progress must not be lost. The garbage
        # collector may call this at any time, also during the trace of another model, or while a
        # transform of torch.func runs.
        life = self.__dict__.get("_life")
        if life is not None and self._use.optimizer is not None and not sys.is_finalizing():
            without = temporarily_clear_interpreter_stack
            with without(), disable_current_modes(), DisableTorchFunction():
                life.release()

    # Copies.

    def __copy__(self) -> PoplarExecutor[P, R]:
        """Return the executor itself: only one object can hold the device."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a deep copy or a pickle: everything except the compiled program.

        The copy has its own model, options and optimizer. It continues from the present weights,
        optimizer state and random numbers of this executor, and compiles at its first call.
        """
        self._copies.copyWeightsToHostIfNeeded()
        use, device = self._use, self._device
        use.read_back()
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

    # Calls.

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the model on a combined batch; compile it and attach it first if necessary.

        Args:
            *args: The arguments of forward. The first dimension of every tensor is the combined
                batch.
            **kwargs: The keyword arguments of forward, in the same form.

        Returns:
            The result of forward in new CPU tensors, with one entry per micro-batch that the output
            mode keeps.

        Raises:
            Error: The call differs from the one that compiled the model, or no device is free, or
                the device failed, or another thread is using the executor.
            UsageAssertionError: The model never attaches to a device.
            KeyboardInterrupt: Ctrl-C ends the call within moments. Weights, optimizer state and
                random numbers are then those after a finished device iteration; anchors cannot be
                read before the next call.
        """
        try:
            compiled, inputs = self._prepare_call(args, kwargs)
            result: R = self._run(compiled, inputs, args, kwargs)
            return result
        except Exception as error:
            raise shortened(error, unless="POPSIM_TRACEBACK=full")

    # Inspection.

    @shows_short_tracebacks
    def profile(self, *args: Any, repeats: int = 1, **kwargs: Any) -> Profile:
        """Call the model several times and return how long each op of the program took.

        The calls are normal calls: weights train, and random numbers advance. The results of the
        calls are dropped.

        Args:
            *args: The arguments of a call.
            repeats: Number of calls; the time of an op is the median over them.
            **kwargs: The keyword arguments of a call.

        Raises:
            Error: ``repeats`` is less than 1, or a call fails.
        """
        compiled, given = self._prepare_call(args, kwargs)
        inputs = self._device_inputs(compiled, given)
        return self._device.use(lambda: profile(compiled, inputs, repeats, self._device.exchange))

    def levers(
        self,
        *args: Any,
        seconds: float = 0.3,
        most_iterations: int = 64,
        most_replicas: int = 4,
        **kwargs: Any,
    ) -> Levers:
        """Measure on this computer what device iterations, replicas and a queue change.

        Copies of the model are compiled and called: the weights, the optimizer and the random
        numbers of this executor stay as they are, and so do those of Python, NumPy and PyTorch.
        Functions that ``poptorch.CPU`` calls are called. A number of replicas other than that of
        the options trains with another combined batch.

        Args:
            *args: The arguments of a call. Their micro-batches are repeated for larger calls.
            seconds: The time to measure each position of a lever for, after its first call (s).
            most_iterations: The largest ``deviceIterations``, of 1, 2, 4, ...
            most_replicas: The largest ``replicationFactor``, of 1, 2, 4, ...
            **kwargs: The keyword arguments of a call.

        Returns:
            A curve for each lever, with the first position that gives 95 % of the best rate. It
            prints as tables.

        Raises:
            Error: The model cannot be compiled, puts tensors into queues, or trains in several
                processes.
            UsageTypeError: A setting is not a number.
            UsageValueError: A setting is too small.
        """
        return measure_levers(
            self._twin,
            self._device,
            args,
            kwargs,
            training=self.training_mode,
            seconds=seconds,
            most_iterations=most_iterations,
            most_replicas=most_replicas,
        )

    def _twin(self, change: Callable[[Options], object]) -> PoplarExecutor:
        """Return a copy for measurements: nothing that takes time or reports is switched on."""
        state = copy.deepcopy(self.__getstate__())
        options: Options = state["options"]
        options.showCompilationProgressBar(False)
        options.deleteIfExists("ipu_id")
        options._observations.clear()
        options.logCycleCount(False).deleteIfExists("_machine")
        change(options)
        twin = type(self).__new__(type(self))
        twin.__setstate__(state)
        twin._device.reports = False
        return twin

    @shows_short_tracebacks
    def summary(
        self, *args: Any, depth: int | None = None, width: int | None = None, **kwargs: Any
    ) -> ModelSummary:
        """Describe the modules of the model: shapes, parameters, bytes, stages, names for anchors.

        The call does not run the model and does not change it. If the model is not compiled yet, a
        separate program is compiled for the summary.

        Args:
            *args: The arguments of a call; not needed if the model is compiled.
            depth: Number of levels of the printed tree; None for all of them.
            width: Width of the printed table (characters); None for the width of the terminal.
            **kwargs: The keyword arguments of a call.

        Returns:
            One row for each module; the object prints as a table.

        Raises:
            Error: The model cannot be compiled, or it is not compiled and there are no arguments.
        """
        compiled = self._device.compiled
        if compiled is None:
            if not args and not kwargs:
                raise Error(
                    "summary: the model is not compiled, and there are no arguments to compile it "
                    "for. Pass the arguments of a call: summary(x)."
                )
            compiled = self._life.compile_alone(args, kwargs)
        elif args or kwargs:
            compiled.arguments.flatten(args, kwargs)  # raises if they differ from the first call's
        return summarise_model(self._device.module, compiled.program, depth, width)

    # Internals.

    def _prepare_call(self, args: Any, kwargs: Any) -> tuple[CompiledModel, list[torch.Tensor]]:
        """Return the compiled model and the inputs of a call; the weights are up to date."""
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
        if (state := device.state) is not None:
            state.writes.warn()
        # The cheaper check comes first: there is seldom anything to hand over.
        if getattr(optimizer, "_pending", None) is not None and isinstance(
            optimizer, optim.Optimizer
        ):
            optimizer._hand_over()
        if (states := self._use.states) is not None:
            states.take()
        return compiled, inputs

    def _run(
        self, compiled: CompiledModel, inputs: list[torch.Tensor], args: Any, kwargs: Any
    ) -> Any:
        # The overhead of every call: nothing here may depend on the size of the model.
        program = compiled.program
        if program.changed_inputs:
            callers = compiled.arguments.given(args, kwargs)
            names, module = compiled.arguments.names, self._device.module
            check_apart(program.changed_inputs, names, callers, module, compiled.constants)
        given = self._device_inputs(compiled, inputs) if compiled.converts_inputs else inputs
        results = self._device.run(given)
        num_outputs = len(program.outputs)
        if len(results) == num_outputs:
            return compiled.outputs.unflatten(results)
        for position, value in zip(program.changed_inputs, results[num_outputs:], strict=False):
            callers[position].copy_(value)
        return compiled.outputs.unflatten(results[:num_outputs])

    @staticmethod
    def _device_inputs(compiled: CompiledModel, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the inputs in the dtypes of the device; no inputs if the device makes them."""
        if not compiled.converts_inputs:
            return inputs
        if not compiled.run.reads_inputs:
            return []
        return [
            tensor.to(dtype) for tensor, dtype in zip(inputs, compiled.input_dtypes, strict=True)
        ]
