"""A compiled program on its device: the common part of executors and loops of functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import nn

from popsim_torch import _native
from popsim_torch.errors import Error
from popsim_torch.executor import host_weights
from popsim_torch.executor.anchor_axes import RecordedAnchors
from popsim_torch.executor.compile import compile_model
from popsim_torch.executor.compile_request import CompileRequest
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.connection import Connection
from popsim_torch.executor.device_state import DeviceState
from popsim_torch.executor.joining import check_replicas, join, share_random_state
from popsim_torch.executor.report import PromisedReport, wanted_outputs
from popsim_torch.executor.shared_weights import warn_of_shared_weights
from popsim_torch.executor.watch import NumberWatcher
from popsim_torch.executor.weight_sync import WeightSync
from popsim_torch.feeds.runs import was_stopped
from popsim_torch.options import Options
from popsim_torch.private_torch.optimizers import note_step
from popsim_torch.processes.exchange import ExchangeParts
from popsim_torch.processes.traffic import Traffic
from popsim_torch.profiling import Channel

__all__ = ["DeviceProgram"]

T = TypeVar("T")

_NOTHING = nullcontext()
_COMPILED = (
    "these are the options of a model that is already compiled. Call it on the options that you "
    "pass to trainingModel or inferenceModel, or call model.destroy() first: the next call "
    "compiles the model again."
)


class DeviceProgram:
    """A program, its device, and the state that says which side has the newer weights.

    At first there is no program: ``compile`` makes one, ``take`` brings it to the device, and
    ``release`` copies everything back and releases both.

    Args:
        module: The module to trace; it holds the weights of the host.
        options: Frozen before the first program is compiled.
        channel: Shows the work of the program in PopVision's trace.
        fixed: Whether the program keeps the weights that it was compiled with, even if the module
            has other tensors under their names later.

    Attributes:
        name: The name of the module, for files.
        options: The options in use; a new optimizer can need other options.
        connection: The connection to the device.
        weights: Says which side has the newer weights.
        compiled: The program; None before ``take`` and after ``release``.
        state: The variables that the program keeps on the device; None without a program.
        ready: The program, if it is also on its device.
        last_complete_run: Number of the executable's last run without failure, counted from 1; 0 if
            there was none.
        fitted_anchors: What ``fit`` or a similar call recorded for the same executor, if that call
            was the last one to run.
        optimizers: The optimizers whose updates are part of the program.
        carried: Names of the buffers that hold a loop's carried values.
        exchange: What a run needs to exchange gradients with other processes; None if the program
            trains alone.
        keeps_timeline: Whether the user wants runs to be recorded (``record_timeline``).
        reports: Whether to write the reports that engine options ask for.
        warned: The warnings that were already given for this program and earlier ones.
        replica_groups: The group of each replica, by the name of the parameter that has a value for
            each group.
    """

    def __init__(
        self, module: nn.Module, options: Options, channel: Channel, *, fixed: bool = False
    ) -> None:
        self.module = module
        self.name = type(module).__name__
        self.options = options
        self.channel = channel
        self.connection = Connection(options)
        self.weights = WeightSync(module, fixed=fixed)
        self.compiled: CompiledModel | None = None
        self.state: DeviceState | None = None
        self.ready: CompiledModel | None = None
        self.last_complete_run = 0
        self.fitted_anchors: RecordedAnchors | None = None
        self.optimizers: Sequence[torch.optim.Optimizer] = ()
        self.carried: Collection[str] = ()
        self.exchange: ExchangeParts | None = None
        self.reports = True
        self._traffic = Traffic()  # of earlier exchanges
        self.warned: set[str] = set()
        self.replica_groups: dict[str, tuple[int, ...]] = {}
        self.alarm: BaseException | None = None  # ends the next run
        # Called when a program comes, and before it goes.
        self.after_take: Callable[[DeviceProgram], object] = lambda device: None
        self.before_release: Callable[[DeviceProgram], object] = lambda device: None
        # Called after each run that reached its end.
        self.after_run: Callable[[CompiledModel], object] | None = None
        # Called at the end of each run, if conditions depend on its statistics; may call ``ring``.
        self.judge: Callable[[], object] | None = None
        self.keeps_timeline = False
        self._fixed = fixed
        self._report: PromisedReport | None = None
        self._watcher: NumberWatcher | None = None  # since the first bad number
        self._wrapping: host_weights.Wrapping | None = None  # the wrapping of the host's model

    def require_compiled(self, what: str) -> CompiledModel:
        """Return the program.

        Args:
            what: The name of the method that needs the program, for the message.

        Raises:
            Error: There is no program.
        """
        if self.compiled is None:
            raise Error(
                f"{what}: the model has not been compiled or has been destroyed. Call it, or "
                "model.compile(...), first."
            )
        return self.compiled

    def compile(self, request: CompileRequest) -> CompiledModel:
        """Compile the module and return the program; it is not on the device yet.

        Args:
            request: The request to compile this module with these options.

        Raises:
            Error: The module cannot be compiled. Nothing has changed.
        """
        with host_weights.without_sync(), self.channel.tracepoint("modelCompilation"):
            return compile_model(request)

    def take(
        self,
        compiled: CompiledModel,
        random_state: tuple[int, int],
        link: Callable[[DeviceState], object],
    ) -> DeviceState:
        """Bring a program to the device, with weights, optimizer state and random numbers.

        Args:
            compiled: The program.
            random_state: The first seed and step of the random numbers.
            link: Connects optimizers with the program's state; called before any other use of the
                state.

        Returns:
            The variables that the program keeps on the device.

        Raises:
            Error: No device is free, or the model's weights are not those of the compilation. Then
                there is no program, and no device is held.
            UsageValueError: An engine option for reports has a wrong value.
        """
        reported = wanted_outputs(self.options) if self.reports else None
        compiled.executable.seed, compiled.executable.step = random_state
        state = DeviceState(self.module, compiled, fixed=self._fixed)
        self.connection.attach_compiled(compiled.run.num_ipus)
        try:
            if self.connection.attached:
                self._upload(compiled, state)
            state.initialise_optimizer()
            link(state)
            self._share(compiled, state)
        except BaseException:
            self._leave(state)
            raise
        # If a line before this one fails, nothing has changed.
        self.compiled, self.state = compiled, state
        self.options._take_anchors(self, _COMPILED)
        self.weights.attach(state)
        self.after_take(self)
        # After ``after_take``, which may set ``judge``: the report uses it for the first calls.
        self._report = None if reported is None else PromisedReport(self, compiled, reported)
        # Other threads may run the program from here on.
        self.ready = compiled if self.connection.attached else None
        return state

    def attach(self) -> CompiledModel:
        """Take a device again, and continue with the host's weights.

        Raises:
            Error: No device is free, or the model's weights are not those of the compilation.
        """
        compiled, state = self.compiled, self.state
        assert compiled is not None and state is not None
        self.connection.attach(compiled.run.num_ipus)
        try:
            self._upload(compiled, state)
            self._share(compiled, state)
        except BaseException:
            self._leave(state)
            raise
        self.ready = compiled
        return compiled

    def detach(self) -> None:
        """Release the device; the program stays, and keeps all variables except the weights."""
        self.ready = None
        self._leave(self.state)

    @property
    def is_loop(self) -> bool:
        """Whether the program is a loop of a function, not a model of an executor."""
        return self._fixed

    @property
    def traffic(self) -> Traffic:
        """What has been exchanged with other processes so far."""
        exchange = None if self.state is None else self.state.exchange
        return self._traffic if exchange is None else exchange.traffic

    def _upload(self, compiled: CompiledModel, state: DeviceState) -> None:
        """Upload the host's weights; those of process 0 if several processes train them."""
        check_replicas(compiled, self.options)
        self.weights.let_trainers_catch_up()
        exchange = join(compiled, self.options, state)
        if exchange is not None:
            state.share_weights(exchange, self.carried)
        state.upload_weights()
        if exchange is not None:
            exchange.traffic = self._traffic
            state.exchange = exchange

    def _share(self, compiled: CompiledModel, state: DeviceState) -> None:
        """Continue with the optimizer's state and the seed of process 0."""
        if state.exchange is not None:
            state.share_states(state.exchange)
            share_random_state(state.exchange, compiled)
            self.exchange = state.exchange.parts

    def _leave(self, state: DeviceState | None) -> None:
        """Release the device, and leave the other processes."""
        if state is not None and state.exchange is not None:
            state.exchange.peers.close()
            self._traffic = state.exchange.traffic
            state.exchange = None
        self.exchange = None
        self.connection.detach()

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the program once.

        Args:
            inputs: One tensor for each input of the program, with the program's dtype.

        Returns:
            The tensors that come back: the outputs, then the changed inputs.

        Raises:
            Error: The device failed, or another thread is using it.
            KeyboardInterrupt: Ctrl-C ended the run.
        """
        compiled = self.compiled
        assert compiled is not None
        if (
            compiled.queues is not None
            or self.channel.is_shown
            or self.alarm is not None
            or self.judge is not None
        ):
            return self.use(lambda: self.run_watched(compiled, inputs))
        # The fast path of most calls: do not add work here.
        try:
            results = compiled.executable.run(inputs, compiled.host_code, self.exchange)
        except _native.BadNumber as error:
            message = str(error)
            return self.use(lambda: self._caught(compiled, inputs, message))
        except _native.ERRORS as error:
            raise self._failure(error) from error
        self._note_run(compiled)
        return results

    def run_watched(
        self, compiled: CompiledModel, inputs: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run the program once; if a check of its numbers fails, do what ``Options.watch`` says.

        Args:
            compiled: The program.
            inputs: See ``run``.

        Raises:
            BadNumberError: A check failed, and the run ends there.
            Exception: A native error.
        """
        try:
            return compiled.executable.run(inputs, compiled.host_code, self.exchange)
        except _native.BadNumber as error:
            return self._caught(compiled, inputs, str(error))

    def _caught(
        self, compiled: CompiledModel, inputs: list[torch.Tensor], message: str
    ) -> list[torch.Tensor]:
        """Do what ``Options.watch`` says after a check of numbers has failed."""
        watching = self.options._watching
        assert watching is not None
        if self._watcher is None or self._watcher.compiled is not compiled:
            self._watcher = NumberWatcher(compiled, watching, self.name)
        exchange = None if self.state is None else self.state.exchange
        peers = None if exchange is None else exchange.peers
        return self._watcher.caught(inputs, self.exchange, peers, message)

    def ring(self, alarm: BaseException) -> None:
        """End the run, or the next one if none is in progress, with an error; for any thread.

        If there are several, the first one counts.
        """
        if self.alarm is None:
            self.alarm = alarm
        if self.compiled is not None:
            self.compiled.executable.stop()

    def _failure(self, error: Exception) -> BaseException:
        """Return the error of a run: the alarm, if it has stopped the run."""
        stopped = was_stopped(str(error))
        return (self._take_alarm() if stopped else None) or _native.translated(error)

    def _take_alarm(self) -> BaseException | None:
        alarm, self.alarm = self.alarm, None
        return alarm

    def use(self, work: Callable[[], T]) -> T:
        """Run the program; notify its queues, and the trace of PopVision if there is one.

        Args:
            work: Runs the executable, once or several times.

        Returns:
            What ``work`` returns.

        Raises:
            Error: The device failed, or another thread is using it.
            KeyboardInterrupt: Ctrl-C ended the run.
        """
        compiled = self.compiled
        assert compiled is not None
        scope = _NOTHING if compiled.queues is None else compiled.queues.running()
        with self._shown(scope) if self.channel.is_shown else scope:
            if (alarm := self._take_alarm()) is not None:
                raise alarm
            try:
                result = work()
            except _native.ERRORS as error:
                raise self._failure(error) from error
        self._note_run(compiled)
        if self.judge is not None:
            self.judge()
            if (alarm := self._take_alarm()) is not None:
                raise alarm
        return result

    def _note_run(self, compiled: CompiledModel) -> None:
        """Record that the program has run to its end, at least once."""
        self.last_complete_run = compiled.executable.num_runs
        self.fitted_anchors = None
        for optimizer in self.optimizers:
            note_step(optimizer)
        if self._wrapping is not None:
            self._wrapping.gradient_reads.on = True
        if self.after_run is not None:
            self.after_run(compiled)

    @contextmanager
    def _shown(self, scope: AbstractContextManager[object]) -> Iterator[None]:
        with scope, self.channel.tracepoint("modelExecution"):
            yield

    def wrap(
        self,
        model: nn.Module,
        fetch: Callable[[], bool],
        destroy: Callable[[], None],
        *,
        loop: bool = False,
    ) -> None:
        """Make reads of a model return the weights that this program trains; until ``release``.

        Args:
            model: The model with the host's weights.
            fetch: Copies the weights to the host if the device has newer ones.
            destroy: The function that ``model.destroy()`` calls.
            loop: Whether the program is a loop of a function.

        Raises:
            UsageRuntimeError: Another executor already trains the model.
        """
        if self._wrapping is None:
            if not loop:
                warn_of_shared_weights(model)
            self._wrapping = host_weights.wrap(model, fetch, destroy)
            self.weights.announce(loop=loop)

    def release(self) -> None:
        """Release program and device; the caller has already fetched what it needs."""
        self.before_release(self)
        if self._report is not None:
            self._report.write()
        self._leave(self.state)
        self.compiled = self.state = self.ready = self._report = self._watcher = None
        self.options._take_anchors(self)
        self.last_complete_run = 0
        self.alarm = None
        self.keeps_timeline = False
        self.weights.detach()
        if self._wrapping is not None:
            self._wrapping.undo()
            self._wrapping = None
