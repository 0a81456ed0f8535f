"""``repeat`` and ``while_loop``: loops of a ``poptorch.function``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from popsim_torch import _native
from popsim_torch.dtypes import INPUTS, dtype_name
from popsim_torch.errors import Error, UsageTypeError
from popsim_torch.executor.compile_request import DeviceLoopRequest
from popsim_torch.executor.reach import Reach, reach
from popsim_torch.executor.updates import lacks_running_mean
from popsim_torch.feeds import InfeedQueue
from popsim_torch.feeds.structure import check_dense
from popsim_torch.loops.contract import asked, check_takes, new_values
from popsim_torch.loops.elements import Elements
from popsim_torch.loops.function import Recording, recording
from popsim_torch.loops.host_iterators import HostIterators
from popsim_torch.loops.program import DeviceLoopProgram, check_count
from popsim_torch.loops.progress import progress_bar
from popsim_torch.loops.settings import DeviceLoopPlan, DeviceLoopSettings, OtherUse
from popsim_torch.ops import op_listener
from popsim_torch.optim.planning import OptimizerSettings, read_optimizer
from popsim_torch.options import Options
from popsim_torch.options.limits import check_one_replica
from popsim_torch.private_torch.modes import without_function_modes
from popsim_torch.profiling import Channel
from popsim_torch.trace.books.device_loop import DeviceLoopBody, DeviceLoopOptimizers, UnknownObject
from popsim_torch.trace.graph.origin import user_line

__all__ = ["LoopCall", "repeat", "while_loop"]

_MAX_TRIPS = 2**31 - 1
_MAX_FOUND = 20
"""Maximum number of traces of one body, which find one object each. An object that the body itself
makes is new in each trace, so the traces would not end."""
Body = Callable[..., Any]


def repeat(
    n: int,
    body: Body,
    inputs: Any = (),
    infeed: InfeedQueue | None = None,
    *,
    gradient_accumulation: int | None = None,
    progress: bool = False,
) -> Any:
    """Run a function ``n`` times on the device.

    Args:
        n: Number of iterations.
        body: Called with the carried values and then the tensors of an element of ``infeed``.
            Returns the carried values for the next iteration, with the same shapes and dtypes, or
            nothing if there are none. It may train: ``loss.backward()``, ``optimizer.step()``.
        inputs: The carried values of the first iteration: a tensor or number, or a tuple of these.
        infeed: The queue that gives each iteration an element.
        gradient_accumulation: Number of iterations after which ``optimizer.step()`` updates the
            weights, with the mean or the sum of their gradients (see ``Options.Training``). It must
            divide ``n``. None uses the setting on the models of the body
            (``set_gradient_accumulation_options``) or on the options of the function, else 1. A
            number that differs from such a setting is an error.
        progress: Whether to show a progress bar.

    Returns:
        The carried values after the last iteration, in new CPU tensors: a tuple, or one tensor if
        there is only one, or None if there are none.

    Raises:
        Error: The call is not in a ``poptorch.function``, or the body cannot be compiled, or an
            iteration fails.
        UsageTypeError: The body takes other arguments or returns other values.
    """
    check_count("repeat", "n", n, 0)
    if gradient_accumulation is not None:
        check_count("repeat", "gradient_accumulation", gradient_accumulation, 1)
    return LoopCall("repeat", body, _carried(inputs, "repeat"), infeed, progress).run(
        n, gradient_accumulation, None
    )


def while_loop(
    condition: Body,
    body: Body,
    inputs: Any = (),
    infeed: InfeedQueue | None = None,
    maximum_iterations: int | None = None,
    *,
    progress: bool = False,
) -> Any:
    """Run a function on the device as long as a condition on the carried values holds.

    Args:
        condition: Called with only the carried values; returns one boolean.
        body: See :func:`repeat`.
        inputs: The carried values for the first call of the condition; at least one.
        infeed: The queue that gives each iteration an element.
        maximum_iterations: Maximum number of iterations; None for 2^31 - 1.
        progress: Whether to show a progress bar.

    Returns:
        The carried values for which the condition does not hold, or the values after the last
        iteration.

    Raises:
        Error: See :func:`repeat`.
        UsageTypeError: See :func:`repeat`; also if there are no carried values.
    """
    most = _MAX_TRIPS if maximum_iterations is None else maximum_iterations
    check_count("while_loop", "maximum_iterations", most, 0)
    call = LoopCall("while_loop", body, _carried(inputs, "while_loop"), infeed, progress)
    if not call.carried:
        raise UsageTypeError(
            "while_loop: inputs is empty, so the condition could never change. Carry the values it "
            "depends on, or use poptorch.repeat."
        )
    return call.run(most, 1, condition)


def _carried(inputs: Any, function: str) -> list[torch.Tensor]:
    values = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    tensors = []
    for position, value in enumerate(values):
        if isinstance(value, (bool, int, float)):
            with without_function_modes():
                value = torch.tensor(value, device="cpu")
        if not isinstance(value, torch.Tensor):
            raise UsageTypeError(
                f"{function}: inputs[{position}] is a {type(value).__name__}. Carried values are "
                "tensors or numbers."
            )
        check_dense(value, f"{function}: inputs[{position}]", "Carried values are dense tensors.")
        if value.dtype not in INPUTS:
            raise UsageTypeError(
                f"{function}: inputs[{position}] has the dtype {dtype_name(value.dtype)}, which "
                "the device does not support."
            )
        tensors.append(value)
    return tensors


@dataclass
class LoopCall:
    """One call of ``repeat`` or ``while_loop``, or of a function that is built on them.

    Attributes:
        function: The name of the function, for messages.
        body: The body of the loop.
        carried: The carried values of the first iteration.
        infeed: The queue that elements come from.
        progress: Whether to show a progress bar.
    """

    function: str
    body: Body
    carried: list[torch.Tensor]
    infeed: InfeedQueue | None = None
    progress: bool = False

    def results(self, values: Sequence[torch.Tensor]) -> Any:
        """Return carried values in the form that the user gets."""
        if not values:
            return None
        return values[0] if len(values) == 1 else tuple(values)

    def run(self, iterations: int, accumulation: int | None, condition: Body | None) -> Any:
        """Compile and run the loop, and record it for later calls of the function."""
        owner = recording.get()
        if op_listener.get() is not None:
            raise Error(
                f"{self.function}: it is called{user_line(' at ')} in the body of another loop, or "
                "in the forward of a model. There, use poptorch.for_loop or torch.while_loop."
            )
        if owner is None:
            raise Error(
                f"{self.function}: it is called outside of a poptorch.function. Put the call into "
                "a function with the decorator @poptorch.function, and call that function."
            )
        if self.infeed is not None and not isinstance(self.infeed, InfeedQueue):
            raise UsageTypeError(
                f"{self.function}: infeed is a {type(self.infeed).__name__}. Pass "
                "poptorch.InfeedQueue(dataset)."
            )
        if iterations == 0:
            return self.results(owner.run(_without_an_iteration, self.carried, []))
        if self.carried or condition is not None:
            check_one_replica(owner.options, self.function)
        with without_function_modes():
            found = reach(one for one in (self.body, condition) if one is not None)
            for module in owner.reach.queues:
                found.add(module)
            captured = _captured(owner)
            settings = DeviceLoopSettings(
                self.function,
                owner.options,
                owner.settings,
                iterations,
                accumulation,
                takes_models=True,
            )
            program = _compile(self, owner, found, settings, condition, captured)
            asks = (
                None
                if condition is None
                else _compile(
                    LoopCall(self.function, _asking(condition), [*self.carried, _FALSE]),
                    owner,
                    replace(found, infeeds=[]),
                    _settings_of_question(settings),
                    None,
                    captured,
                )
            )
            owner.programs += [program] if asks is None else [program, asks]
            run = _Run(program, asks, iterations if self.progress else 0, self.function)
            values = owner.run(run, self.carried, captured)
        return self.results(values)


def _captured(owner: Recording) -> list[torch.Tensor]:
    """Return the function's tensors that the body can read."""
    return [
        tensor
        for tensor in owner.tensors.living()
        if tensor.dtype in INPUTS and tensor.layout is torch.strided and tensor.is_cpu
    ]


_FALSE = torch.zeros((), dtype=torch.bool)


def _without_an_iteration(
    carried: Sequence[torch.Tensor], _captured: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    with without_function_modes():
        return [value.clone() for value in carried]


def _asking(condition: Body) -> Body:
    """Return a body whose last carried value is the result of the condition for the others."""

    def ask(*values: torch.Tensor) -> tuple[Any, ...]:
        return (*values[:-1], asked(condition, values[:-1]))

    return ask


@dataclass(frozen=True)
class _Run:
    """Runs a program once: the step of a recording."""

    program: DeviceLoopProgram
    asks: DeviceLoopProgram | None
    shown_iterations: int
    function: str

    def __call__(
        self, carried: Sequence[torch.Tensor], captured: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        if self.asks is not None and not self.asks.run([*carried, _FALSE], captured)[-1]:
            return [value.clone() for value in carried]
        if not self.shown_iterations:
            return self.program.run(carried, captured)
        with progress_bar(
            lambda: self.program.num_iterations, self.shown_iterations, self.function
        ):
            return self.program.run(carried, captured)


def _settings_of_question(settings: DeviceLoopSettings) -> DeviceLoopSettings:
    """Return the settings of a program that computes the condition of a loop once."""
    options = settings.options.clone()
    options.anchored_tensors.clear()
    options._observations.clear()
    options._watch_nothing()
    return replace(settings, options=options, owned=(), iterations=1, takes_models=False)


def _compile(
    call: LoopCall,
    owner: Recording,
    found: Reach,
    settings: DeviceLoopSettings,
    condition: Body | None,
    captured: Sequence[torch.Tensor],
) -> DeviceLoopProgram:
    """Compile a loop; add the objects that appear during the trace to those found before."""
    plan: DeviceLoopPlan | None = None
    num_found = 0
    iterators = HostIterators(found.iterators, owner.iterators)
    with iterators.unmoved():
        while True:
            found.tidy()
            plan = plan or settings.guess(found)
            body, request = _request(call, captured, found, settings, plan, condition, iterators)
            try:
                return DeviceLoopProgram(body, request, owner.observing)
            except OtherUse as other:
                plan = settings.plan(other.use)
            except UnknownObject as unknown:
                plan, before, num_found = None, found.size, num_found + 1
                _add(unknown, found)
                if found.size == before or num_found == _MAX_FOUND:
                    raise Error(
                        f"{call.function}: the body uses a {type(unknown.found).__name__} that was "
                        "made during the trace of the body. Make it outside of the body."
                    ) from unknown


def _add(unknown: UnknownObject, found: Reach) -> None:
    """Add a new object to those found before; make sure that a queue has an element."""
    if isinstance(unknown.found, InfeedQueue) and unknown.where:
        try:
            unknown.found._element()
        except Error as error:
            raise type(error)(f"{unknown.where}: {error.message}") from error
    found.add(unknown.found)
    found.tidy()


def _request(
    call: LoopCall,
    captured: Sequence[torch.Tensor],
    found: Reach,
    settings: DeviceLoopSettings,
    plan: DeviceLoopPlan,
    condition: Body | None,
    iterators: HostIterators,
) -> tuple[DeviceLoopBody, DeviceLoopRequest]:
    inputs: list[tuple[tuple[int, ...], torch.dtype]] = []
    places: list[Any] = []
    names: list[str] = []
    elements = Elements(call.infeed, found.infeeds)
    for name, shape, dtype, place in elements.inputs():
        inputs.append((shape, dtype))
        places.append(place)
        names.append(name)
    num_fed = len(inputs)
    for position, tensor in enumerate(captured):
        inputs.append((tuple(tensor.shape), tensor.dtype))
        places.append(_native.InputPlace(shared=True))
        names.append(f"captured[{position}]")

    def step(
        carried: list[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
        args, kwargs = elements.arguments(tensors[:num_fed])
        named = f" ({', '.join(kwargs)})" if kwargs else ""
        check_takes(
            call.body,
            f"{call.function}: the body gets {len(carried)} carried value(s) and "
            f"{len(args) + len(kwargs)} input(s) from the infeed queue{named},",
            [*carried, *args],
            kwargs,
        )
        with (
            settings.watched(plan, found),
            _standing_for(captured, tensors[num_fed:]),
            elements.at_hand(tensors[:num_fed]),
            iterators.taken_by_iterations(),
        ):
            values = new_values(call.function, call.body(*carried, *args, **kwargs), carried)
            return values, None if condition is None else asked(condition, values)

    initial = [value.detach().clone() for value in call.carried]
    body = DeviceLoopBody(found.modules, found.parameters, initial, step)
    request = DeviceLoopRequest(
        body,
        plan.options,
        Channel("poptorch.function"),
        plan.counts,
        inputs,
        tuple(names),
        elements.infeeds,
        places,
        _settings_reader(plan.options),
        body=DeviceLoopOptimizers(tuple(found.optimizers)),
        iterations=settings.iterations if condition is None else None,
    )
    return body, request


def _settings_reader(
    options: Options,
) -> Callable[[torch.optim.Optimizer], OptimizerSettings]:
    """Return a function that copies an optimizer's values."""

    def read(optimizer: torch.optim.Optimizer) -> OptimizerSettings:
        settings = read_optimizer(optimizer, relax_checks=bool(options.relax_optimizer_checks))
        if lacks_running_mean(settings, options):
            raise Error(
                "The optimizer's float16 accumulators need the mean reduction strategy Running: "
                "call options.Training.setMeanAccumulationAndReplicationReductionStrategy("
                "poptorch.MeanReductionStrategy.Running) on the function's options."
            )
        return settings

    return read


@contextlib.contextmanager
def _standing_for(
    captured: Sequence[torch.Tensor], traced: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Replace the function's tensors by traced tensors in the body."""
    listener: Any = op_listener.get()
    for tensor, stand_in in zip(captured, traced, strict=True):
        is_computed_of_weights = tensor.grad_fn is not None
        listener.stand_for(tensor, stand_in)
        if is_computed_of_weights:
            listener.loop.computed_outside.append(stand_in.requires_grad_())
    yield
