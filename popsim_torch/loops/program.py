"""A loop on the device: its compiled body, and the copies of its weights."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from popsim_torch import _native, optim
from popsim_torch.arguments.integers import warn_of_wide_integers
from popsim_torch.errors import Error
from popsim_torch.executor.compile_request import DeviceLoopRequest
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.costs import compiled_estimate
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.device_state import DeviceState
from popsim_torch.executor.exposed import exposed
from popsim_torch.executor.inspection import Inspection
from popsim_torch.executor.observing import Observing
from popsim_torch.executor.optimizer_states import OptimizerStates
from popsim_torch.executor.pipeline_view import PipelineView
from popsim_torch.executor.random_state import MAX_SEED
from popsim_torch.executor.tensor_details import TensorNames
from popsim_torch.executor.updates import make_plan
from popsim_torch.executor.weight_sync import WeightSync
from popsim_torch.feeds.runs import was_stopped
from popsim_torch.loops.optimizer_values import OptimizerValues
from popsim_torch.loops.starvation import Starvation
from popsim_torch.machine import Estimate
from popsim_torch.optim.planning import join_plans, read_optimizer
from popsim_torch.private_torch.modes import DisableTorchFunction, disable_current_modes
from popsim_torch.trace.books.device_loop import DeviceLoopBody

__all__ = ["DeviceLoopProgram", "check_count"]

_programs = itertools.count()
_STREAM = 0x9E3779B97F4A7C15


class DeviceLoopProgram:
    """A loop that is compiled once and can run any number of times.

    Args:
        body: The body of the loop.
        request: The body with the number of iterations, and the sources of inputs.
        observing: Gives what the program observes; None if nobody asks.

    Raises:
        Error: The body cannot be compiled.
        UnknownObject: The body uses an object that ``body`` does not have.
    """

    def __init__(
        self,
        body: DeviceLoopBody,
        request: DeviceLoopRequest,
        observing: Observing | None = None,
    ) -> None:
        self._body = body
        self._device = DeviceProgram(body, request.options, request.channel, fixed=True)
        kinds = dict.fromkeys(type(one).__name__ for one in self.modules)
        self._device.name = "_".join(kinds) or "loop"
        self._inspection = Inspection(self._device, is_loop=True)
        self._view = PipelineView(self._device)
        self._starvation = Starvation(request.infeeds)
        self._ends_by_value = request.iterations is None
        if observing is not None:
            observing.join(self._device)
        self._take(self._device.compile(request))

    getTensorNames = cast(TensorNames, exposed("_inspection", Inspection.getTensorNames))
    names = exposed("_inspection", Inspection.names)
    getAnchoredTensor = exposed("_inspection", Inspection.getAnchoredTensor)
    anchor_axes = exposed("_inspection", Inspection.anchor_axes)
    schedule = exposed("_view", PipelineView.schedule)
    stages = exposed("_view", PipelineView.stages)
    record_timeline = exposed("_view", PipelineView.record_timeline)
    timeline = exposed("_view", PipelineView.timeline)
    program = exposed("_inspection", Inspection.program)
    compile_log = exposed("_inspection", Inspection.compile_log)

    @property
    def compiled(self) -> CompiledModel:
        """The compiled loop, for tools that look inside: its programs and the executable."""
        return self._inspection.compiled

    def estimate(self) -> Estimate:
        """Return what a run of the loop would cost on an IPU; simulated.

        If values end the loop, the run has the mean number of iterations of the runs so far.
        """
        compiled = self.compiled
        run = compiled.run
        if self._ends_by_value:
            accumulation = run.loop.gradient_accumulation
            runs = max(1, compiled.executable.num_runs)
            found = max(1, round(self.num_iterations / runs / accumulation))
            run = replace(run, loop=replace(run.loop, device_iterations=found))
        return compiled_estimate(replace(compiled, run=run), self._device.options)

    def _take(self, compiled: CompiledModel) -> None:
        """Bring the program to the device, with weights, optimizers and random numbers."""
        options = self._device.options
        # The seed of torch.manual_seed, with a different random stream for each program.
        seed = torch.initial_seed() + _STREAM * next(_programs)
        if options.exists("random_seed"):
            seed = int(options.random_seed)
        self._optimizers = self._device.optimizers = compiled.optimizers
        self._device.carried = self._body.carried_names
        self._device.take(compiled, (seed & MAX_SEED, 0), self._link)
        self._values = OptimizerValues(self._optimizers)
        self._has_new_values = False
        # (optimizers of PyTorch have nothing to hand over)
        self._own_optimizers = [one for one in self._optimizers if isinstance(one, optim.Optimizer)]
        places = compiled.program.buffers
        self._places = [places.get(name) for name in self._body.carried_names]
        self._variables = [place for place in self._places if place is not None]
        changed = compiled.program.changed_state
        if (
            self._optimizers
            or any(name in compiled.program.parameters for name in changed)
            or (set(changed) - set(self._body.carried_names))
        ):
            self._device.wrap(self._body, _fetcher(self._device.weights), lambda: None, loop=True)
        carried = set(self._body.carried_names)
        buffers = self._body.named_buffers()
        self._host_tensors = [
            *self._body.parameters(),
            *(buffer for name, buffer in buffers if name not in carried),
        ]
        self._marks = _native.tensor_marks(self._host_tensors)
        # The traced objects are not needed after the trace.
        self._body.forget_step()

    def _link(self, state: DeviceState) -> None:
        """Connect the optimizers with the variables of the program."""
        parameters = dict(self._body.named_parameters())
        self._states = OptimizerStates(state, parameters, self._optimizers)
        self._states.take()

    def run(self, carried: Sequence[torch.Tensor], captured: Sequence[torch.Tensor]) -> list[Any]:
        """Run the loop.

        Args:
            carried: The carried values of the first iteration.
            captured: Tensors that every iteration reads.

        Returns:
            The carried values after the last iteration, in new tensors.

        Raises:
            Error: An iteration fails, or the data ends.
            KeyboardInterrupt: Ctrl-C ends the loop within moments.
        """
        compiled = self._device.compiled
        assert compiled is not None
        self._device.weights.pull()
        if _native.tensor_marks(self._host_tensors) != self._marks:
            self._upload()
        self._states.take()
        self._take_new_values()
        values = self._by_place(carried) if carried else {}
        inputs = _as_inputs(captured, compiled.input_dtypes) if captured else []
        self._device.use(lambda: self._execute(compiled, values, inputs))
        return self._behind(carried, compiled) if carried else []

    def _by_place(self, carried: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the first values by the number of their variable; the program may not need all."""
        return {
            place: value
            for place, value in zip(self._places, carried, strict=True)
            if place is not None
        }

    def _behind(
        self, carried: Sequence[torch.Tensor], compiled: CompiledModel
    ) -> list[torch.Tensor]:
        """Return the carried values after the last iteration, in the form of the first ones."""
        read = iter(compiled.executable.read_all(self._variables))
        return [
            before.clone() if place is None else _shaped_like(before, next(read))
            for place, before in zip(self._places, carried, strict=True)
        ]

    def _execute(
        self,
        compiled: CompiledModel,
        values: dict[int, torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> None:
        """Run the program; the error of an iteration names the iteration."""
        executable = compiled.executable
        runs, iterations = executable.num_runs, executable.num_micro_batches
        try:
            if values:
                executable.write_all(values)
            with self._starvation.watched():
                self._device.run_watched(compiled, inputs)
        except _native.ERRORS as error:
            if executable.num_runs == runs or was_stopped(str(error)):
                raise
            iteration = executable.last_micro_batch
            where = f"in iteration {iteration} of the loop, counted from 0"
            if iteration >= executable.num_micro_batches - iterations:
                where = f"iteration {iteration} of the loop, counted from 0, did not begin"
            raise type(error)(f"{error} ({where})") from error

    def stop(self) -> bool:
        """End the current run, from another thread; return whether there is one."""
        compiled = self._device.compiled
        return compiled is not None and compiled.executable.stop()

    @property
    def num_iterations(self) -> int:
        """The number of iterations begun so far, over all runs; readable from any thread."""
        assert self._device.compiled is not None
        return self._device.compiled.executable.num_micro_batches

    @property
    def modules(self) -> list[nn.Module]:
        """The user's modules, except those inside of others and those without state."""
        return list(self._body.children())

    def _upload(self) -> None:
        """Upload the host's weights, which the user has changed."""
        self._device.weights.fetch()
        self._device.weights.upload()
        self._marks = _native.tensor_marks(self._host_tensors)

    def _take_new_values(self) -> None:
        """Take over the values that the user has changed in an optimizer since the last run."""
        for one in self._own_optimizers:
            one._hand_over()
        if not self._has_new_values:
            return
        state = self._device.state
        assert state is not None and state.plan is not None
        plans = []
        scale = state.plan.loss_scaling.name
        names = [update.parameter for update in state.plan.updates]
        parameters = dict(self._body.named_parameters())
        for optimizer in self._optimizers:
            settings = read_optimizer(optimizer)
            own = {id(p) for group in settings.groups for p in group.parameters}
            trained = [name for name in names if id(parameters[name]) in own]
            plans.append(make_plan(settings, self._device.options, self._body, trained, scale))
        state.replace_plan(join_plans(plans, scale))
        self._values.note()
        self._has_new_values = False

    def fits(self) -> bool:
        """Return whether the optimizers still have the structure that the program was compiled for.

        The next run takes over their present values.
        """
        if self._device.compiled is None:
            return True
        self._has_new_values = self._values.changed()
        return not self._has_new_values or self._values.fits()

    def release(self) -> None:
        """Copy the weights to the host and release the device; the program ends."""
        if self._device.compiled is None:
            return
        self._device.weights.fetch(what_fits=True)
        self._states.leave()
        self._device.release()

    def __del__(self) -> None:
        device = self.__dict__.get("_device")
        if device is not None and device.compiled is not None and not sys.is_finalizing():
            with disable_current_modes(), DisableTorchFunction():
                self.release()


def _as_inputs(
    captured: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """Return captured tensors, which are the last inputs, in the dtypes of the device."""
    for tensor in captured:
        warn_of_wide_integers("A tensor that the loop reads", tensor)
    return [
        tensor
        if tensor.dtype is dtype and tensor.is_contiguous() and not tensor.is_conj()
        else tensor.to(dtype).resolve_conj().contiguous()
        for tensor, dtype in zip(captured, dtypes[-len(captured) :], strict=True)
    ]


def _shaped_like(before: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a carried value after the last iteration in the shape of the first one."""
    if value.shape != before.shape:
        value = value.reshape(before.shape)
    return value if value.dtype is before.dtype else value.to(before.dtype)


def _fetcher(weights: WeightSync) -> Any:
    """Return a function that fetches weights, and does not keep their program alive."""
    held = weakref.ref(weights)

    def fetch() -> bool:
        found = held()
        # A function that is being recorded would record the calls of torch.
        with DisableTorchFunction():
            return found is not None and found.fetch()

    return fetch


def check_count(function: str, name: str, count: object, minimum: int) -> int:
    """Return a count, or raise an Error that says which values are allowed."""
    if isinstance(count, bool) or not isinstance(count, int) or count < minimum:
        raise Error(f"{function}: {name} must be an integer of {minimum} or more, got {count!r}.")
    return count
