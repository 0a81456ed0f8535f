"""``poptorch.function``: Python code that runs once, to record the loops for the device."""

from __future__ import annotations

import functools
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Generic, overload

import torch
from torch import nn
from typing_extensions import ParamSpec, TypeVar

from popsim_torch import logs
from popsim_torch.errors import Error
from popsim_torch.executor.conditions import Condition
from popsim_torch.executor.exposed import exposed
from popsim_torch.executor.observing import Observing
from popsim_torch.executor.reach import Reach, reach
from popsim_torch.executor.tracebacks import shortened
from popsim_torch.feeds.runs import Running
from popsim_torch.feeds.structure import check_dense
from popsim_torch.loops.argument_iterators import ArgumentIterators
from popsim_torch.loops.argument_kinds import IteratorKind, apart, iterators_of, kind_of
from popsim_torch.loops.module_kinds import ModuleKinds
from popsim_torch.loops.outside import Computation, OutsideOfLoops, surroundings
from popsim_torch.loops.program import DeviceLoopProgram
from popsim_torch.loops.recorded import RecordedTensors, RecordedValue
from popsim_torch.loops.schedules import without_schedulers
from popsim_torch.machine import Estimate
from popsim_torch.options import Options
from popsim_torch.options.model_settings import Owned, num_calls, settings_of
from popsim_torch.private_torch.trees import TreeSpec, tree_flatten, tree_unflatten
from popsim_torch.records import RunWriter
from popsim_torch.shared_scope import SharedScope
from popsim_torch.tables import Described
from popsim_torch.trace.adaptations import eager_stance
from popsim_torch.trace.host_reads import noticed_host_reads

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Function", "RecordedLoop", "Recording", "recording"]

P = ParamSpec("P", default=...)  # the parameters of a user's function
Q = ParamSpec("Q")  # the parameters without ``self``
R = TypeVar("R", default=Any)  # the result
T = TypeVar("T")


@dataclass(frozen=True)
class RecordedLoop:
    """A loop of a recorded function.

    Attributes:
        run: Runs the loop: takes the carried and the captured tensors, returns the carried ones.
        carried: The carried values of the first iteration.
        captured: The tensors that every iteration reads.
    """

    run: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]
    carried: Sequence[RecordedValue]
    captured: Sequence[RecordedValue]

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the loop in one call; append its results to the tensors of the call."""
        results = self.run(
            [_detached(value.among(tensors)) for value in self.carried],
            [_detached(value.among(tensors)) for value in self.captured],
        )
        tensors.extend(results)
        return results


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its history; reading a weight fetches it from the device."""
    is_plain = type(tensor) is torch.Tensor and not tensor.requires_grad
    return tensor if is_plain else tensor.detach()


@dataclass
class Recording:
    """A recorded function, for arguments of one kind.

    Attributes:
        options: The options of the function.
        reach: The objects that the function's code can use.
        iterators: During the recording call, the iterators of the host that existed before the
            call.
        fed: The iterators among the arguments.
        tensors: The tensors of the recording call: arguments, results of loops, and the like.
        steps: The loops of the function and the calls outside of them, in order.
        programs: The programs of its loops.
        result: The result of the function: values and other objects.
        structure: The structure of the result.
        modules: All modules that the loops can use.
        kinds: The modes, layers and parameters of the modules.
        observing: Gives what its loops observe.
        told: Tells the queues that the function may feed when it runs.
        surroundings: The settings of PyTorch at the call.
        settings: The settings of what is recorded (``poptorch.pipeline``), besides those of models.
        settings_then: The settings on the modules when they were recorded.
        computes: Whether the function computes something outside of its loops.
    """

    options: Options
    observing: Observing
    reach: Reach
    iterators: Sequence[Iterator[Any]]
    fed: ArgumentIterators
    tensors: RecordedTensors
    steps: list[RecordedLoop | Computation] = field(default_factory=list)
    programs: list[DeviceLoopProgram] = field(default_factory=list)
    result: list[Any] = field(default_factory=list)
    structure: TreeSpec | None = None
    modules: list[nn.Module] = field(default_factory=list)
    kinds: ModuleKinds = field(default_factory=lambda: ModuleKinds(()))
    surroundings: tuple[Any, ...] = field(default_factory=surroundings)
    settings: tuple[Owned, ...] = ()
    settings_then: list[Any] = field(default_factory=list)
    computes: bool = False
    _num_calls: int = 0

    def __post_init__(self) -> None:
        self.told = Running(self.reach.queues)

    def holds(self) -> bool:
        """Return whether modules, optimizers and settings are still like those of the recording."""
        if self.computes and surroundings() != self.surroundings:
            return False
        if self._num_calls != num_calls():
            if [one for _, one in settings_of(self.modules)] != self.settings_then:
                return False
            self._num_calls = num_calls()
        for program in self.programs:
            if not program.fits():
                return False
        return self.kinds.unchanged()

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor of the function; None for any other tensor."""
        return self.tensors.number_of(tensor)

    def run(
        self,
        run: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]],
        carried: Sequence[torch.Tensor],
        captured: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Run a loop as a part of the recording call, and record it for all later calls.

        Args:
            run: See :class:`RecordedLoop`.
            carried: The carried values of the first iteration.
            captured: The tensors that every iteration reads.
        """
        value = self.tensors.value
        step = RecordedLoop(run, [value(one) for one in carried], [value(one) for one in captured])
        results = run([one.detach() for one in carried], [one.detach() for one in captured])
        self.steps.append(step)
        for result in results:
            self.tensors.add(result, differs=True)
        return results

    def finish(self, result: Any) -> None:
        """Record the result of the function."""
        leaves, self.structure = tree_flatten(result)
        self.result = [
            self.tensors.value(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        modules = [*self.reach.met, *(one for program in self.programs for one in program.modules)]
        parts = {id(part): part for module in modules for part in module.modules()}
        self.modules = list(parts.values())
        self.kinds = ModuleKinds(self.modules)
        self.settings_then = [one for _, one in settings_of(self.modules)]
        self._num_calls = num_calls()
        self.iterators = ()
        self.computes = any(isinstance(step, Computation) for step in self.steps)

    def replay(self, arguments: Sequence[torch.Tensor]) -> Any:
        """Run all loops and computations again, with other arguments; return the result."""
        tensors = list(arguments)
        for step in self.steps:
            step(tensors)
        structure = self.structure
        assert structure is not None
        leaves = [
            one.among(tensors) if isinstance(one, RecordedValue) else one for one in self.result
        ]
        return leaves[0] if structure.is_leaf() else tree_unflatten(leaves, structure)


recording: ContextVar[Recording | None] = ContextVar("popsim_torch_recording", default=None)
"""The function that is being recorded in this thread, if any."""


_living: weakref.WeakSet[Function[..., Any]] = weakref.WeakSet()


def _renew_locks() -> None:
    """Renew the locks in a forked process: threads of its parent may have held them."""
    for one in _living:
        one._renew_lock()


os.register_at_fork(after_in_child=_renew_locks)


class Function(Described, Generic[P, R]):
    """A function whose loops run on the device.

    The first call runs the Python code, records its loops, and runs them. Later calls with
    arguments of the same kind (tensors of the same shapes and dtypes, equal other arguments) run
    only the loops; other calls record again. Calls also record again if a module has another mode
    (``train()``, ``eval()``), other layers or parameters, or other parameters that require
    gradients.

    For type checkers the class is ``Function[P, R]``: the arguments and result of the user's
    function.

    Args:
        python_function: The user's function.
        options: The options of all its loops; the loops have their own counts of iterations.
        observing: Gives what the loops observe; None for an object of its own.
        is_one_loop: Whether it has only one loop, so that each observed name has to be in it.
    """

    def __init__(
        self,
        python_function: Callable[P, R],
        options: Options | None = None,
        observing: Observing | None = None,
        *,
        is_one_loop: bool = False,
    ) -> None:
        if not callable(python_function):
            raise Error(
                f"poptorch.function: needs a function, got {type(python_function).__name__}."
            )
        if options is not None and not isinstance(options, Options):
            raise Error(
                f"poptorch.function: options must be a poptorch.Options, got "
                f"{type(options).__name__}."
            )
        functools.update_wrapper(self, python_function)
        self._function = python_function
        self._options = Options() if options is None else options
        self._observing = Observing(self._options) if observing is None else observing
        self._met: set[Condition] = set()  # in a first call, which ended there
        # Observed names that a loop lacks, after the warning; None if such a name is an error.
        self._said: set[str] | None = None if is_one_loop else set()
        self._recordings: list[tuple[list[Any], TreeSpec, Recording]] = []
        self._renew_lock()
        _living.add(self)
        self._being_recorded: Recording | None = None

    def __repr__(self) -> str:
        figures = self._figures()
        loops, ops = figures["loops"], figures["ops"]
        state = f"{loops} device loops of {ops} ops" if self._recordings else "not recorded yet"
        return f"Function({figures['function']}: {state})"

    def _figures(self) -> dict[str, object]:
        programs = [recorded.programs for *_, recorded in self._recordings]
        compiled = [program.compiled for own in programs for program in own]
        return {
            "function": self._name,
            "recordings": len(self._recordings),
            "loops": len(compiled),
            "ops": sum(len(one.program.graph.ops) for one in compiled),
            "options": ", ".join(f"{k}={v}" for k, v in self._options._figures().items()),
        }

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: Function[Concatenate[T, Q], R], instance: T, owner: type | None = None
    ) -> Function[Q, R]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind a function that is a method of a class; all attributes are those of the function."""
        return self if instance is None else types.MethodType(self, instance)

    @property
    def programs(self) -> list[DeviceLoopProgram]:
        """The programs of all loops that were recorded, or are being recorded."""
        found = [recorded for *_, recorded in self._recordings]
        if self._being_recorded is not None:
            found.append(self._being_recorded)
        return [program for one in found for program in one.programs]

    observing = exposed("_observing", Observing.observing)
    observations = exposed("_observing", Observing.observations)
    add_sink = exposed("_observing", Observing.add_sink)
    close_sinks = exposed("_observing", Observing.close_sinks)

    @functools.wraps(Observing.record)
    def record(self, *args: Any, **kwargs: Any) -> RunWriter:
        """Record the first loop that is compiled, see ``Observing.record``."""
        given = self._options
        if not self.programs:
            # Other functions may have the same options.
            self._options = self._observing.options = given.clone()
        try:
            writer = self._observing.record(*args, **kwargs)
        except BaseException:
            self._options = self._observing.options = given
            raise
        given._take_anchors(self, _HAS_COPY)
        return writer

    def estimates(self) -> tuple[Estimate, ...]:
        """Return what a run of each recorded loop would cost on an IPU; simulated.

        There is one estimate for each of ``programs``, in their order; none before the first call.
        A loop that values end has the mean number of iterations of its runs so far.
        """
        return tuple(program.estimate() for program in self.programs)

    def stop(self) -> bool:
        """End the running loop, from another thread; return whether there is one."""
        return any(program.stop() for program in self.programs)

    def destroy(self) -> None:
        """Copy all weights to the host and release all programs; the next call records again.

        Raises:
            Error: The function is running.
        """
        if not self._lock.acquire(blocking=False):
            raise Error(
                "destroy: the function is running in another thread. Wait for it, or call stop()."
            )
        try:
            for program in self.programs:
                program.release()
            self._recordings.clear()
            self._options._take_anchors(self)
        finally:
            self._lock.release()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function.

        Args:
            *args: Tensors may differ from call to call; other arguments are a part of the
                recording.
            **kwargs: Like ``args``.

        Returns:
            The result of the user's function; results of loops are new tensors.

        Raises:
            Error: The function cannot be recorded, a loop fails, or another thread is running it.
        """
        if recording.get() is not None:
            return self._function(*args, **kwargs)
        lock = self._lock  # (a forked process gets another lock)
        if not lock.acquire(blocking=False):
            raise Error(
                f"poptorch.function: '{self._name}' is running in another thread. A program runs "
                "once at a time: wait for it, or make a separate function for each thread."
            )
        try:
            result: R = self._run(args, kwargs)
            return result
        except Exception as error:
            raise shortened(error, unless="POPSIM_TRACEBACK=full")
        finally:
            lock.release()

    @property
    def _name(self) -> str:
        return getattr(self._function, "__qualname__", type(self._function).__name__)

    def _run(self, args: Any, kwargs: Any) -> Any:
        leaves, structure = apart(args, kwargs)
        key = [kind_of(leaf) for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        iterators = iterators_of(leaves, key) if IteratorKind in map(type, key) else []
        for known_key, known_structure, known in self._recordings:
            same = known_structure is structure or known_structure == structure
            if same and known_key == key and known.holds():
                with known.told, known.fed.bound(iterators) if iterators else _NOTHING:
                    return known.replay(tensors)
        for number, tensor in enumerate(tensors):
            check_dense(
                tensor,
                f"poptorch.function: '{self._name}': argument {number}",
                "Arguments are dense tensors.",
            )
        found = reach([self._function], _STEPS_TO_BODY)
        lasting = [*found.iterators, *reach(leaves, _STEPS_TO_BODY).iterators]
        fed = ArgumentIterators(iterators)
        known_tensors = RecordedTensors(tensors)
        options = self._options if self._said is None else self._options._observe_found(self._said)
        new = Recording(options, self._observing, found, lasting, fed, known_tensors)
        with new.told, fed.bound(iterators):
            result = self._record(new, args, kwargs)
        if fed.moved_on_host or any(one is leaf for one in iterators for leaf in new.result):
            # These elements, or this iterator, exist in this call only.
            logs.warn_once(
                "poptorch.function: '%s' takes elements of an iterator outside of loops, or "
                "returns it, so each call compiles again. Pass the elements as arguments, or "
                "take all of them in loops.",
                self._name,
            )
            for program in new.programs:
                program.release()
            return result
        self._recordings.append((key, structure, new))
        self._options._take_anchors(self, _RECORDED)
        return result

    def _record(self, new: Recording, args: Any, kwargs: Any) -> Any:
        token = recording.set(new)
        self._being_recorded = new
        self._observing.already_met = self._met
        try:
            with (
                # torch.compile runs without compilation, so that its calls are recorded.
                eager_stance,
                noticed_host_reads(_is_recorded),
                _without_schedulers,
                OutsideOfLoops(new.tensors, new.steps.append),
            ):
                result = self._function(*args, **kwargs)
        except BaseException:
            # The next call compiles all loops again, and their steps begin at 0.
            self._met |= self._observing.met()
            for program in new.programs:
                program.release()
            raise
        finally:
            self._being_recorded = None
            recording.reset(token)
        if not new.programs and not any(isinstance(step, RecordedLoop) for step in new.steps):
            raise Error(
                f"poptorch.function: '{self._name}' has no loop, so the device has nothing to do. "
                "Call poptorch.repeat(n, body) or poptorch.while_loop in it."
            )
        new.finish(result)
        new.tensors.clear()
        self._met.clear()
        return result


_RECORDED = (
    "a function with these options was recorded already, and its loops are compiled. Call it "
    "before the first call of the function, or after its destroy()."
)
_HAS_COPY = (
    "record was called on a function with these options. Since then the function has options of "
    "its own, and would not see the change. Call it before record, or pass the tensors and "
    "statistics to record."
)
_NOTHING: AbstractContextManager[None] = nullcontext()


def _is_recorded() -> bool:
    return recording.get() is not None


_without_schedulers = SharedScope(lambda: without_schedulers(_is_recorded))


# An object that a body can use existed before the call if names of the function lead to it.
_STEPS_TO_BODY = 4
