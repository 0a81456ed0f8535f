"""One loop on the device: its compiled body, and how weights get there and back."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from popsim_torch import _native, optim
from popsim_torch.errors import Error
from popsim_torch.executor import host_weights
from popsim_torch.executor.compile import CompiledModel, compile_model
from popsim_torch.executor.connection import Connection
from popsim_torch.executor.device_state import DeviceState
from popsim_torch.executor.inspection import Inspection
from popsim_torch.executor.interface import LoopRequest
from popsim_torch.executor.random_state import MAX_SEED
from popsim_torch.executor.report import promise_report
from popsim_torch.executor.updates import make_plan
from popsim_torch.executor.weight_sync import WeightSync
from popsim_torch.feeds.runs import was_stopped
from popsim_torch.loops.optimizer_states import OptimizerStates
from popsim_torch.loops.optimizer_values import OptimizerValues
from popsim_torch.loops.starvation import Starvation
from popsim_torch.optim.planning import join_plans, read_optimizer
from popsim_torch.options import Options
from popsim_torch.profiling import Channel
from popsim_torch.trace.loop_body import LoopBody

__all__ = ["LoopProgram", "check_count"]

_programs = itertools.count()
_VERSION = attrgetter("_version")
_STREAM = 0x9E3779B97F4A7C15


class LoopProgram(Inspection):
    """A loop that runs on the device, as often as it is asked to.

    Args:
        body: What it repeats.
        options: Frozen; of the function.
        request: How often, and where inputs come from.

    Raises:
        Error: The body cannot be compiled.
        UnknownObject: It uses something that ``body`` does not have.
    """

    def __init__(self, body: LoopBody, options: Options, request: LoopRequest) -> None:
        self._user_model = self._traced_model = self._body = body
        self._options = options
        self._optimizer, self._settings = None, None
        self._channel = Channel("poptorch.function")
        self._last_complete_run = 0
        self._connection = Connection(options)
        self._weights = WeightSync(body, fixed=True)
        self._wrapping: host_weights.Wrapping | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._states: OptimizerStates | None = None
        self._starvation = Starvation(request.infeeds)
        with host_weights.without_sync(), self._channel.tracepoint("modelCompilation"):
            compiled = compile_model(
                body,
                options,
                (),
                {},
                optimizer=None,
                warned=set(),
                channel=self._channel,
                loop_request=request,
            )
        self._take(compiled, request)

    def _take(self, compiled: CompiledModel, request: LoopRequest) -> None:
        """Bring the program to the device, with weights, optimizers and random numbers."""
        # As torch.manual_seed says; another stream of numbers for each program.
        seed = torch.initial_seed() + _STREAM * next(_programs)
        if self._options.exists("random_seed"):
            seed = int(self._options.random_seed)
        compiled.executable.seed = seed & MAX_SEED
        state = DeviceState(self._traced_model, compiled, fixed=True)
        self._connection.attach_compiled(compiled.run.num_ipus)
        self._weights.let_trainers_catch_up()
        state.upload_weights()
        state.initialise_optimizer()
        self._compiled, self._state = compiled, state
        self._report = promise_report(self, compiled, self._options)
        self._weights.attach(state)
        self._optimizers = compiled.optimizers
        parameters = dict(self._traced_model.named_parameters())
        self._states = OptimizerStates(state, parameters, self._optimizers)
        self._states.take()
        self._values = OptimizerValues(self._optimizers)
        changed = compiled.program.changed_state
        if (
            self._optimizers
            or any(name in compiled.program.parameters for name in changed)
            or (set(changed) - set(self._body.carried_names))
        ):
            self._wrapping = host_weights.wrap(
                self._traced_model, _fetcher(self._weights), lambda: None
            )
            self._weights.announce(loop=True)
        places = compiled.program.buffers
        self._places = [places.get(name) for name in self._body.carried_names]
        carried = set(self._body.carried_names)
        buffers = self._body.named_buffers()
        self._host_tensors = [
            *self._body.parameters(),
            *(buffer for name, buffer in buffers if name not in carried),
        ]
        self._versions = self._host_versions()
        # What was traced need not outlive the trace.
        self._body.forget_step()

    def run(self, carried: Sequence[torch.Tensor], captured: Sequence[torch.Tensor]) -> list[Any]:
        """Run the loop.

        Args:
            carried: What the first trip is given.
            captured: Tensors that every trip reads.

        Returns:
            The carried values behind the last trip, in new tensors.

        Raises:
            Error: A trip fails, or the data ends.
            KeyboardInterrupt: Ctrl-C ends the loop within moments.
        """
        compiled, state = self._compiled, self._state
        assert compiled is not None and state is not None
        self._weights.pull()
        if self._host_versions() != self._versions:
            self._upload()
        assert self._states is not None
        self._states.take()
        self._take_new_values()
        places = {
            place: value
            for place, value in zip(self._places, carried, strict=True)
            if place is not None
        }
        inputs = (
            [
                tensor.to(dtype).contiguous()
                for tensor, dtype in zip(
                    captured, compiled.input_dtypes[-len(captured) :], strict=True
                )
            ]
            if captured
            else []
        )
        assert compiled.queues is not None
        with compiled.queues.running(), self._starvation.watched():
            if self._channel.is_shown:
                with self._channel.tracepoint("modelExecution"):
                    self._execute(compiled, places, inputs)
            else:
                self._execute(compiled, places, inputs)
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]
        ids = list(places)
        values = dict(zip(ids, compiled.executable.read_all(ids), strict=True))
        return [
            before.clone() if place is None else _shaped_like(before, values[place])
            for place, before in zip(self._places, carried, strict=True)
        ]

    def _execute(
        self,
        compiled: CompiledModel,
        values: dict[int, torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> None:
        """Run the program; what fails in a trip says in which one."""
        executable = compiled.executable
        runs, trips = executable.num_runs, executable.num_micro_batches
        try:
            executable.write_all(values)
            executable.run(inputs, compiled.host_code)
        except _native.ERRORS as error:
            if executable.num_runs == runs or was_stopped(str(error)):
                raise _native.translated(error) from error
            trip = executable.last_micro_batch
            where = f"in trip {trip} of the loop, counted from 0"
            if trip >= executable.num_micro_batches - trips:
                where = f"trip {trip} of the loop, counted from 0, did not begin"
            raise _native.translated(type(error)(f"{error} ({where})")) from error
        self._last_complete_run = executable.num_runs

    @property
    def num_trips(self) -> int:
        """Trips begun so far, over all runs; from any thread."""
        assert self._compiled is not None
        return self._compiled.executable.num_micro_batches

    @property
    def modules(self) -> list[nn.Module]:
        """The user's modules, but those within others and those without state."""
        return list(self._body.children())

    def _upload(self) -> None:
        """Take the host's weights over, which the user has changed."""
        self._weights.fetch()
        self._weights.upload()
        self._versions = self._host_versions()

    def _host_versions(self) -> tuple[list[int], list[int]]:
        """Return what differs when the user has changed a weight on the host."""
        tensors = self._host_tensors
        with torch._C.DisableTorchFunction():
            return list(map(_VERSION, tensors)), list(map(torch.Tensor.data_ptr, tensors))

    def _take_new_values(self) -> None:
        """Take values over that the user has given to an optimizer since the last run."""
        for optimizer in self._optimizers:
            if isinstance(optimizer, optim.Optimizer):
                optimizer._hand_over()
        if not self._values.changed():
            return
        state = self._state
        assert state is not None and state.plan is not None
        plans = []
        scale = state.plan.loss_scaling.name
        names = [update.parameter for update in state.plan.updates]
        parameters = dict(self._traced_model.named_parameters())
        for optimizer in self._optimizers:
            settings = read_optimizer(optimizer)
            own = {id(p) for group in settings.groups for p in group.parameters}
            trained = [name for name in names if id(parameters[name]) in own]
            plans.append(make_plan(settings, self._options, self._traced_model, trained, scale))
        state.replace_plan(join_plans(plans, scale))
        self._values.note()

    def fits(self) -> bool:
        """Return whether the optimizers are still like those that the program was compiled for."""
        return self._compiled is None or self._values.fits()

    def release(self) -> None:
        """Bring the weights to the host and let go of the device; the program ends."""
        if self._compiled is None:
            return
        self._weights.fetch(what_fits=True)
        if self._report is not None:
            self._report()
        if self._states is not None:
            self._states.leave()
        self._compiled = self._state = None
        self._weights.detach()
        self._connection.detach()
        if self._wrapping is not None:
            self._wrapping.undo()
            self._wrapping = None

    def __del__(self) -> None:
        if self.__dict__.get("_compiled") is not None and not sys.is_finalizing():
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self.release()


def _shaped_like(before: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a carried value behind the last trip as the first trip was given it."""
    if value.shape != before.shape:
        value = value.reshape(before.shape)
    return value if value.dtype is before.dtype else value.to(before.dtype)


def _fetcher(weights: WeightSync) -> Any:
    """Return what fetches weights, without keeping their program alive."""
    held = weakref.ref(weights)

    def fetch() -> bool:
        found = held()
        # A function that is being recorded looks at calls of torch.
        with torch._C.DisableTorchFunction():
            return found is not None and found.fetch()

    return fetch


def check_count(function: str, name: str, count: object, minimum: int) -> int:
    """Return a count, or raise an Error that says what it has to be."""
    if isinstance(count, bool) or not isinstance(count, int) or count < minimum:
        raise Error(f"{function}: {name} must be an integer of {minimum} or more, got {count!r}.")
    return count
