"""Compiles a request to a program that runs: every step, in order (``STEPS``)."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from popsim_torch import logs
from popsim_torch.anchors import AnchorRequest, anchor_requests
from popsim_torch.arguments import ArgumentSpec, OutputSpec
from popsim_torch.compile_hooks import around_compilation
from popsim_torch.dtypes import dtype_name, held_dtype
from popsim_torch.enums import OutputMode, PipelineSchedule
from popsim_torch.errors import InternalError
from popsim_torch.executor.anchor_warnings import warn_of_anchors
from popsim_torch.executor.build import build_executable, executable_text
from popsim_torch.executor.compile_lock import compile_lock
from popsim_torch.executor.compile_log import CompileLog
from popsim_torch.executor.compile_request import CompileRequest
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.constant_watch import constants_of
from popsim_torch.executor.costs import check_memory
from popsim_torch.executor.dump import Dump, write_graph_file
from popsim_torch.executor.gradient_captures import capture_gradients
from popsim_torch.executor.host_code import HostCode
from popsim_torch.executor.interface import Interface
from popsim_torch.executor.memory_in_common import check_apart
from popsim_torch.executor.numerics import Numerics
from popsim_torch.executor.observed import Observed, Observer, observe_program
from popsim_torch.executor.overlap import check_overlap
from popsim_torch.executor.placement import place
from popsim_torch.executor.program_log import log_program
from popsim_torch.executor.program_options import half_partials, program_request
from popsim_torch.executor.replicas import check_buffers, check_enqueues
from popsim_torch.executor.report import report_refused
from popsim_torch.executor.updates import check_steps, divides_sum
from popsim_torch.executor.watching import watches
from popsim_torch.files.cache import CachedProgram, cached_program
from popsim_torch.files.program import check_interface
from popsim_torch.files.trace_key import trace_key
from popsim_torch.ir import Program, RunSettings, is_pipelined, names, program_text, walk_all
from popsim_torch.logs import limit_repeats
from popsim_torch.lowering import HalfPartials, lower
from popsim_torch.optim.captures import GradientEnqueue, unwrapped
from popsim_torch.optim.plan import OptimizerPlan
from popsim_torch.options import Options
from popsim_torch.options.back_end import check_back_end, check_loss_scale
from popsim_torch.options.limits import num_replicas
from popsim_torch.options.observing import Observation
from popsim_torch.options.progress import CompilationProgressBar
from popsim_torch.passes.check_numbers import add_checks
from popsim_torch.passes.pipeline import ProgramRequest, run_host_passes, run_program_passes
from popsim_torch.passes.synthetic_data import SyntheticData
from popsim_torch.private_torch.graph_modules import use_lazy_graph_module
from popsim_torch.private_torch.modes import DisableAutocast
from popsim_torch.stages import StageAssigner
from popsim_torch.trace import TraceRequest, TraceResult, check_traceable, trace
from popsim_torch.trace.autocast import warn_of_autocast_around
from popsim_torch.trace.functionalise import functionalise
from popsim_torch.trace.graph.enqueues import Enqueue
from popsim_torch.trace.modes_around import without_modes_around
from popsim_torch.trace.named_graph import name_nodes
from popsim_torch.trace.text import trace_text

__all__ = [
    "STEPS",
    "Compilation",
    "compile_model",
    "compile_program",
    "fit_to_host",
    "run_settings",
]


class Compilation:
    """The results of the compilation steps so far.

    Each attribute is set once, by one step; later steps read it and do not change it.

    Attributes:
        request: The model or loop body to compile.
        log: The steps that have ended.
        numerics: The options that concern numbers.
        interface: The arguments and results of a call.
        stages: The pipeline stages that the trace contains.
        traced: The module as a torch.fx graph.
        training: Whether the program trains.
        schedule: The order in which micro-batches run.
        num_ipus: How many IPUs the model takes (count).
        plan: The updates that optimizers apply to the weights; None if nothing is trained.
        gradients: The gradients that go into queues.
        enqueues: All tensors that the program puts into queues, by number.
        anchors: The tensors that the options ask to record.
        asked: All other requests of the options to the program.
        half: The products of float16 operands that accumulate in float16.
        found: The program, the same on every machine; compiled or read from the executable cache.
        compiled: The program as it runs on this machine.
    """

    numerics: Numerics
    interface: Interface
    stages: StageAssigner
    traced: TraceResult
    training: bool
    schedule: PipelineSchedule
    num_ipus: int
    plan: OptimizerPlan | None
    gradients: Sequence[GradientEnqueue]
    enqueues: Mapping[int, Enqueue]
    anchors: Sequence[AnchorRequest]
    asked: ProgramRequest
    half: HalfPartials
    found: CachedProgram
    compiled: CompiledModel

    def __init__(self, request: CompileRequest, log: CompileLog) -> None:
        self.request = request
        self.log = log

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            raise InternalError(f"compile: two steps set '{name}'")
        super().__setattr__(name, value)


def check_request(c: Compilation) -> None:
    """Refuse a request that cannot be compiled, independent of the code of forward."""
    check_back_end(c.request.options)
    check_traceable(c.request.module, needs_values=c.request.needs_values)
    c.numerics = Numerics.of(c.request.options)


def describe_calls(c: Compilation) -> None:
    """Describe the arguments and results of a call of the program."""
    c.interface = c.request.interface()


def trace_module(c: Compilation) -> None:
    """Make a torch.fx graph of the module."""
    request, options = c.request, c.request.options
    c.stages = StageAssigner(options.execution_strategy)
    trace_request = TraceRequest(
        request.module,
        c.interface.inputs,
        c.interface.unflatten,
        request.may_train,
        c.stages,
        module_scopes=bool(options.module_namescope_enabled),
        location_excludes=tuple(options.source_location_excludes),
        back_end=frozenset(k for k, on in options._Popart.options.items() if on is True),
        input_names=tuple(c.interface.arguments.names),
        body=request.body,
        replica_groups=request.replica_groups,
        micro_batches=c.interface.loop.gradient_accumulation if request.body is None else 1,
        mean=divides_sum(options),
    )
    with request.channel.tracepoint("graphPreprocessing"):
        c.traced = trace(trace_request)
    c.training = request.trains(c.traced)
    _note_trace(c.log, "trace", c.traced)


def place_stages(c: Compilation) -> None:
    """Choose the schedule and the IPUs for the stages that the trace contains."""
    options = c.request.options
    if c.traced.overlaps:
        check_overlap(options)
    c.schedule, c.num_ipus = place(options, c.stages, c.interface.loop, training=c.training)


def plan_updates(c: Compilation) -> None:
    """Plan the updates of the weights, and choose the gradients that go into queues."""
    traced = c.traced
    check_loss_scale(c.request.options, traced.loss_dtypes)
    loss_dtype = traced.loss_dtypes[-1] if traced.loss_dtypes else torch.float32
    c.plan = c.request.plan(traced, names.loss_scale(dtype_name(loss_dtype)))
    captures = () if c.plan is None else c.request.captures(traced)
    check_steps(
        traced,
        c.plan,
        captures,
        accumulation=c.interface.loop.gradient_accumulation,
        num_stages=c.stages.num_stages,
        num_replicas=num_replicas(c.request.options),
    )
    c.gradients, captured = capture_gradients(captures, c.plan, traced, c.request.options)
    c.enqueues = {**traced.enqueues, **captured}


def read_options(c: Compilation) -> None:
    """Read the options that concern the program."""
    options = c.request.options
    c.half = half_partials(options)
    mode, period = OutputMode(options.output_mode), options.output_return_period
    c.anchors = anchor_requests(options.anchored_tensors, mode, period)
    c.asked = program_request(
        options,
        c.interface.loop,
        c.stages,
        c.numerics,
        training=c.training,
        schedule=c.schedule,
    )


def state_program(c: Compilation) -> None:
    """Make the program that is the same on every machine, or read it from the executable cache."""
    plan, asked = c.plan, (c.gradients, c.half, c.anchors, c.asked)
    depends_on = (None if plan is None else plan.without_values(), *asked)
    c.found = cached_program(
        c.request.options,
        lambda: trace_key(c.traced, depends_on),
        lambda: _state_program(c.traced, plan, *asked, c.log),
    )
    if c.found.file is not None:
        made = _size_of(c.found.program) + _precisions_of(c.found.program)
        c.log.note("read the executable cache", made)


def weigh_memory(c: Compilation) -> None:
    """Check whether the program fits the simulated machine, if the options ask for it."""
    if not c.request.options._simulated.checks_memory:
        return
    run, options, trains = run_settings(c), c.request.options, c.plan is not None
    program = c.found.program
    check_memory(
        program,
        run,
        options,
        trains=trains,
        report=lambda estimate: report_refused(program, run, options, estimate, training=trains),
    )
    c.log.note("weigh_memory")


def fit_program(c: Compilation) -> None:
    """Fit the program to this host, and build the executable."""
    check_buffers(c.request.module, c.found.program, c.request.options)
    check_enqueues(c.found.program, c.interface.loop)
    check_apart(c.found.program, c.plan, c.traced, c.request.module)
    warn_of_anchors(c.found.program, c.anchors)
    try:
        if c.found.file is not None:
            check_interface(c.found.program, c.interface.inputs, c.traced)
        compiled = _fit(c, c.found.program)
    except Exception as error:  # a program from a file or cache may contain errors no check finds
        compiled = _fit(c, c.found.anew(error))
    queues = c.request.queues(c.enqueues)
    compiled.connect(queues)
    c.compiled = dataclasses.replace(
        compiled,
        host_code=HostCode(c.traced.host_calls) if c.traced.host_calls else None,
        queues=queues,
        constants=constants_of(c.request.module, c.traced),
        optimizers=[unwrapped(one)[0] for one in c.traced.optimizers],
    )


STEPS: tuple[Callable[[Compilation], None], ...] = (
    check_request,
    describe_calls,
    trace_module,
    place_stages,
    plan_updates,
    read_options,
    state_program,
    weigh_memory,
    fit_program,
)
"""The steps from a request to an executable; each step adds attributes for later steps."""


def compile_model(request: CompileRequest) -> CompiledModel:
    """Compile a model or the body of a loop.

    Args:
        request: The model or body to compile; frozen, so no step changes it.

    Raises:
        Error: It cannot be compiled. Nothing has changed; the call may be repeated.
    """
    start = time.perf_counter()
    compilation = _run(request, STEPS)
    duration = datetime.timedelta(seconds=time.perf_counter() - start)
    return dataclasses.replace(compilation.compiled, duration=duration)


def compile_program(request: CompileRequest) -> Compilation:
    """Compile a model up to the program that is the same on every machine; nothing can run.

    Args:
        request: The model to compile.

    Raises:
        Error: It cannot be compiled.
    """
    return _run(request, STEPS[: STEPS.index(weigh_memory)])


def _run(request: CompileRequest, steps: Sequence[Callable[[Compilation], None]]) -> Compilation:
    """Run the steps of a compilation, and return their results."""
    progress = _progress(_draws_bar(request.options), len(steps))
    # By default, torch.fx would generate source for each graph and keep it until the process ends.
    # That source is never run.
    without_source = use_lazy_graph_module(True)
    # An autocast around the call must not change host tensors or what torch does during the trace.
    warn_of_autocast_around()
    no_autocast = DisableAutocast()
    with (
        compile_lock,
        around_compilation(),
        without_source,
        no_autocast,
        without_modes_around(),
        _without_collections(),
        progress as moved,
    ):
        limit_repeats(request.options.max_repeat_logs)
        kind = "training" if request.may_train else "inference"
        log = CompileLog(Dump.from_environment(f"{type(request.module).__name__}_{kind}"))
        compilation = Compilation(request, log)
        for step in steps:
            step(compilation)
            if step not in _NOTED:
                log.note(step.__name__)
            moved()
        log.close()
    return compilation


_NOTED = (trace_module, state_program, weigh_memory, fit_program)
"""Steps that write their own, more detailed entries to the log."""


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection in this scope: nearly all objects stay, so it finds nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _state_program(
    traced: TraceResult,
    plan: OptimizerPlan | None,
    gradients: Sequence[GradientEnqueue],
    half: HalfPartials,
    anchors: Sequence[AnchorRequest],
    request: ProgramRequest,
    log: CompileLog,
) -> Program:
    """Return the program of a trace; it is the same on every machine."""
    traced = functionalise(traced)
    _note_trace(log, "functionalise", traced)
    named = name_nodes(traced, None if plan is None else plan.loss_scaling.name)
    log.note("name", f"{len(named.names)} names", lambda: trace_text(named))
    program = lower(named, plan, half, anchors, gradients)
    _note_program(log, "lower", program, _precisions_of(program))
    for name in run_program_passes(program, request):
        _note_program(log, name, program)
    return program


def run_settings(c: Compilation) -> RunSettings:
    """Return the settings of the runs of a program."""
    distributed = c.request.options.Distributed
    return RunSettings(
        c.interface.loop,
        c.schedule,
        c.num_ipus if c.found.program.graph.ops else 0,
        c.numerics.floating_point_checks,
        c.numerics.synthetic_data == SyntheticData.NONE,
        c.stages.positions,
        c.stages.ipu_of_stage,
        distributed.processId,
        distributed.numProcesses,
    )


def _fit(c: Compilation, program: Program) -> CompiledModel:
    log_program(program, c.request.options, c.stages.ipu_of_stage)
    write_graph_file(program)
    run = run_settings(c)
    arguments, outputs = c.interface.arguments, c.traced.outputs
    return fit_to_host(
        program,
        run,
        arguments,
        outputs,
        c.plan,
        c.log,
        fed=c.request.fed,
        watches=watches(c.request.options, c.plan, is_loop=c.request.body is not None),
        observations=c.request.options._observations,
        num_queues=len(c.enqueues),
    )


def fit_to_host(
    program: Program,
    run: RunSettings,
    arguments: ArgumentSpec,
    outputs: OutputSpec,
    plan: OptimizerPlan | None,
    log: CompileLog,
    *,
    fed: bool = False,
    watches: bool = False,
    observations: Sequence[Observation] = (),
    num_queues: int = 0,
) -> CompiledModel:
    """Fit a complete program to this machine, and build the executable.

    Args:
        program: The program that is the same on every machine.
        run: The settings of a run.
        arguments: The arguments that calls must have.
        outputs: The results that calls return.
        plan: The optimizer's updates; None for inference.
        log: Records each step.
        fed: Whether inputs come from queues.
        watches: Whether the program checks its numbers (``Options.watch``).
        observations: What to observe.
        num_queues: The number of queues that the program feeds.

    Raises:
        Error: An op cannot be prepared.
    """
    start = time.perf_counter()
    host_program = program.copy()
    _fit_program(host_program, run, log, watches=watches, training=plan is not None)
    observed = _observed(program, run, observations, num_queues)
    if observed is not None:
        _note_program(log, "observe", observed.program)
        _fit_program(observed.program, run, log, watches=watches, training=plan is not None)
    executable = build_executable(
        host_program,
        run.loop,
        training=plan is not None,
        schedule=run.schedule,
        floating_point_checks=run.floating_point_checks,
        fed=fed,
        positions=run.positions,
        process=run.process,
        num_processes=run.num_processes,
        observed=observed,
    )
    log.note("build", f"{executable.plan.arena_bytes} bytes", lambda: executable_text(executable))
    input_dtypes = tuple(map(held_dtype, arguments.dtypes))
    return CompiledModel(
        executable,
        program,
        host_program,
        run,
        arguments,
        outputs,
        input_dtypes,
        input_dtypes != arguments.dtypes or not run.reads_inputs,
        plan,
        log,
        datetime.timedelta(seconds=time.perf_counter() - start),
        observer=None if observed is None else Observer(observed, run.loop),
    )


def _fit_program(
    program: Program, run: RunSettings, log: CompileLog, *, watches: bool, training: bool
) -> None:
    """Fit a copy of a program to this machine, in place."""
    # Floating-point checks name the op of the model that failed: no ops are fused for them.
    if not run.floating_point_checks:
        for name in run_host_passes(program, pipelined=is_pipelined(run.schedule)):
            _note_program(log, name, program)
    if watches:
        add_checks(program, training=training, num_processes=run.num_processes)
        _note_program(log, "add_checks", program)


def _observed(
    program: Program, run: RunSettings, observations: Sequence[Observation], first_queue: int
) -> Observed | None:
    """Return the observed version of a program, not yet fitted to this machine; None for none."""
    if observations and run.floating_point_checks:
        logs.python.warning(
            "Options.observe has no effect together with enableFloatingPointChecks, which runs "
            "the ops of the model one by one. Switch one of them off."
        )
        return None
    return observe_program(program, observations, first_queue)


def _note_trace(log: CompileLog, name: str, traced: TraceResult) -> None:
    graph = traced.graph_module.graph
    log.note(name, f"{len(graph.nodes)} nodes", lambda: trace_text(traced))


def note_program(log: CompileLog, name: str, program: Program) -> None:
    """Add a step to a log whose result is a program.

    Args:
        log: The log.
        name: The name of the step.
        program: The program; ops that may use fewer bits of float32 operands are counted.
    """
    _note_program(log, name, program, _precisions_of(program))


def _note_program(log: CompileLog, name: str, program: Program, more: str = "") -> None:
    log.note(name, _size_of(program) + more, lambda: program_text(program))


def _size_of(program: Program) -> str:
    return f"{len(program.graph.ops)} ops, {len(program.graph.tensors)} tensors"


def _precisions_of(program: Program) -> str:
    """Return how many ops may use fewer bits of float32 operands; empty if there are none."""
    counts = Counter(op.attributes.get("precision") for _, op in walk_all(program.graph))
    return "".join(
        f", {count} ops with float32 operands as {precision}"
        for precision, count in counts.items()
        if precision is not None
    )


def _draws_bar(options: Options) -> bool:
    """Return whether to draw a progress bar: on a terminal, or where the user asks for one."""
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    return bool(options.show_compilation_progress_bar) and (
        on_terminal or bool(options.progress_bar_asked_for)
    )


@contextmanager
def _progress(show: bool, steps: int) -> Iterator[Callable[[], None]]:
    """Draw a bar that advances at each call of the yielded function; a failure fills the bar."""
    bar: Any = CompilationProgressBar() if show else None
    done = 0

    def move() -> None:
        nonlocal done
        done += 1
        if bar is not None:
            bar(done, steps)

    try:
        yield move
    finally:
        if bar is not None and 0 < done < steps:
            bar(steps, steps)
