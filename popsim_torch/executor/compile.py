"""From a module, options and an optimizer to a program that runs: every step, in order."""

from __future__ import annotations

import dataclasses
import datetime
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from popsim_torch import _native
from popsim_torch.anchors import AnchorRequest, resolve
from popsim_torch.arguments import ArgumentSpec, OutputSpec
from popsim_torch.compile_hooks import around_compilation
from popsim_torch.dtypes import dtype_name, held_dtype
from popsim_torch.enums import OutputMode
from popsim_torch.errors import Error
from popsim_torch.executor.build import build_executable
from popsim_torch.executor.compile_log import log_program
from popsim_torch.executor.dump import Dump, write_graph_file
from popsim_torch.executor.gradient_captures import capture_gradients, loop_captures
from popsim_torch.executor.host_code import HostCode
from popsim_torch.executor.interface import LoopRequest, interface_of
from popsim_torch.executor.numerics import Numerics
from popsim_torch.executor.overlap import check_overlap
from popsim_torch.executor.queues import Queues
from popsim_torch.executor.updates import check_steps, loop_plan, make_plan
from popsim_torch.files.cache import cached_program
from popsim_torch.files.program import check_interface
from popsim_torch.files.trace_key import trace_key
from popsim_torch.ir import LoopCounts, Program, RunSettings, names, program_text
from popsim_torch.logs import limit_repeats
from popsim_torch.lowering import HalfPartials, lower
from popsim_torch.optim.captures import GradientCapture, GradientEnqueue, unwrapped
from popsim_torch.optim.plan import OptimizerPlan
from popsim_torch.optim.planning import OptimizerSettings
from popsim_torch.options import Options
from popsim_torch.options.back_end import check_back_end, log_computed
from popsim_torch.options.progress import CompilationProgressBar
from popsim_torch.passes.pipeline import ProgramRequest, run_host_passes, run_program_passes
from popsim_torch.passes.recompute_choice import Recomputation
from popsim_torch.passes.returns import ReturnRequest
from popsim_torch.passes.synthetic_data import SyntheticData
from popsim_torch.profiling import Channel
from popsim_torch.stages import (
    PipelineSchedule,
    StageAssigner,
    check_pipeline,
    check_schedule,
    count_stages,
    schedule_name,
)
from popsim_torch.trace import TraceRequest, TraceResult, check_traceable, trace
from popsim_torch.trace.control.bodies import all_bodies
from popsim_torch.trace.functionalise import functionalise
from popsim_torch.trace.join_slices import join_slices
from popsim_torch.trace.named_graph import NamedGraph, name_nodes
from popsim_torch.trace.text import trace_text

_NUM_STEPS = 4
# torch.fx traces with state that belongs to the process.
_one_at_a_time = threading.RLock()


@dataclass(frozen=True)
class CompiledModel:
    """A program on the device, and how user calls map to it.

    Attributes:
        executable: The program as it runs.
        program: What it computes, the same on every machine.
        host_program: The program as it was fitted to this host.
        run: How it runs.
        arguments: What calls must look like.
        outputs: What calls return.
        input_dtypes: Element type on the device, per input.
        converts_inputs: Whether any of them is not the caller's type, or none is taken.
        plan: The optimizer's updates; None for inference.
        duration: How long compilation took.
        host_code: What the program calls of the host's code; None if it calls nothing.
        queues: The queues that the program feeds or is fed from; None if there are none.
        optimizers: Those that the body of a device loop steps.
    """

    executable: _native.Executable
    program: Program
    host_program: Program
    run: RunSettings
    arguments: ArgumentSpec
    outputs: OutputSpec
    input_dtypes: tuple[torch.dtype, ...]
    converts_inputs: bool
    plan: OptimizerPlan | None
    duration: datetime.timedelta
    host_code: HostCode | None = None
    queues: Queues | None = None
    optimizers: list[torch.optim.Optimizer] = dataclasses.field(default_factory=list)


def anchor_requests(options: Options) -> list[AnchorRequest]:
    """Return the calls of ``Options.anchorTensor``."""
    requests = []
    for short_name, entry in options.anchored_tensors.items():
        try:
            long_name, uses_default, mode, period = entry
            mode = OutputMode(mode)
        except (TypeError, ValueError):
            raise Error(
                f"Options.anchored_tensors[{short_name!r}] is {entry!r}. Need a list of the long "
                "name, whether to use the model's mode, the mode and the period: call "
                "Options.anchorTensor."
            ) from None
        requests.append(AnchorRequest(short_name, long_name, mode, period, uses_default))
    return requests


def half_partials(options: Options) -> HalfPartials:
    """Return which products of float16 operands add up in float16."""
    popart = options._Popart
    return HalfPartials(
        matmul=popart.matmul_partials == "half", convolution=popart.convolution_partials == "half"
    )


def compile_model(
    module: nn.Module,
    options: Options,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    optimizer: OptimizerSettings | None,
    captures: Sequence[GradientCapture] = (),
    warned: set[str],
    channel: Channel,
    loop_request: LoopRequest | None = None,
) -> CompiledModel:
    """Trace, lower and build a model: every step, in order.

    Args:
        module: The user's module (the executor's shallow copy of it).
        options: With a resolved output mode.
        args: Positional arguments of the compiling call.
        kwargs: Keyword arguments of the compiling call.
        optimizer: For training; None for inference.
        captures: Gradients that go into queues.
        warned: Warnings already given for this executor.
        channel: Shows the trace of the module.
        loop_request: Given where the module is the body of a device loop, which has no arguments
            and tells itself which optimizers it steps.

    Raises:
        Error: The model cannot be compiled; nothing has changed, the call may be repeated.
    """
    start = time.perf_counter()
    training = optimizer is not None or loop_request is not None
    progress = _progress(_draws_bar(options))
    # Nobody runs the source that torch.fx makes of a graph, and keeps until the process ends.
    without_source = _use_lazy_graph_module(True)
    # An autocast around the call would concern host tensors, and what torch does while it traces.
    no_autocast = torch._C._DisableAutocast()
    with _one_at_a_time, around_compilation(), without_source, no_autocast, progress as step:
        limit_repeats(options.max_repeat_logs)
        dump = Dump.from_environment(
            f"{type(module).__name__}_{'training' if training else 'inference'}"
        )

        # What the call looks like.
        check_back_end(options)
        check_traceable(module)
        interface = interface_of(
            module, options, args, kwargs, loop_request, training=training, warned=warned
        )
        arguments, loop, inputs = interface.arguments, interface.loop, interface.inputs
        numerics = Numerics.of(options)
        stages = StageAssigner(options.execution_strategy)
        step()

        # The module becomes a torch.fx graph.
        trace_request = TraceRequest(
            module,
            inputs,
            interface.unflatten,
            training,
            stages,
            module_scopes=bool(options.module_namescope_enabled),
            location_excludes=tuple(options.source_location_excludes),
            back_end=frozenset(k for k, on in options._Popart.options.items() if on is True),
            input_names=tuple(arguments.names),
            body=None if loop_request is None else loop_request.body,
        )
        with channel.tracepoint("graphPreprocessing"):
            traced = trace(trace_request)
        _write_trace(dump, "trace", traced)
        if traced.overlaps:
            check_overlap(options)
        if loop_request is not None:
            training = traced.has_backward
        schedule, num_ipus = _check_stages(options, stages, loop, training)
        pipelined = schedule != "sequential"
        plan, gradients = None, list[GradientEnqueue]()
        loss_scale = names.loss_scale(dtype_name(traced.loss_dtype))
        if loop_request is not None:
            settings = [loop_request.read_optimizer(one) for one in traced.optimizers]
            plan = loop_plan(settings, options, module, traced, loss_scale)
            captures = loop_captures(traced.optimizers)
            check_steps(traced, plan, captures, stages.num_stages)
        elif optimizer is not None:
            plan = make_plan(optimizer, options, module, traced.gradients, loss_scale)
        if plan is not None:
            gradients = capture_gradients(captures, plan, traced, options)
        step()

        # The graph becomes a program, the same on every machine.
        request = _program_request(options, loop, stages, training=training, pipelined=pipelined)
        request = dataclasses.replace(
            request,
            stochastic_rounding=numerics.stochastic_rounding,
            synthetic_data=numerics.synthetic_data,
        )
        half = half_partials(options)
        depends_on = (None if plan is None else plan.without_values(), gradients, half, request)
        cached = cached_program(
            options,
            lambda: trace_key(traced, depends_on),
            lambda: _state_program(traced, plan, gradients, half, request, dump),
        )
        step()

        # The program is fitted to this host, and becomes an executable.
        def fit(program: Program) -> CompiledModel:
            log_program(program, options, request.returns.anchors, stages.ipu_of_stage)
            write_graph_file(program)
            run = RunSettings(
                loop,
                schedule,
                num_ipus if program.graph.ops else 0,
                numerics.floating_point_checks,
                numerics.synthetic_data == SyntheticData.NONE,
            )
            fed = loop_request is not None and bool(loop_request.infeeds)
            return fit_to_host(program, run, arguments, traced.outputs, plan, dump, fed=fed)

        try:
            if cached.file is not None:
                check_interface(cached.program, inputs, traced)
            compiled = fit(cached.program)
        except Exception as error:  # of a program that was read: no check looks at everything
            compiled = fit(cached.anew(error))
        step()
    duration = datetime.timedelta(seconds=time.perf_counter() - start)
    host_code = HostCode(traced.host_calls) if traced.host_calls else None
    queues = _queues(traced, loop_request)
    if queues is not None:
        queues.connect(compiled.executable, len(inputs))
    return dataclasses.replace(
        compiled,
        duration=duration,
        host_code=host_code,
        queues=queues,
        optimizers=[unwrapped(one)[0] for one in traced.optimizers],
    )


def _queues(traced: TraceResult, request: LoopRequest | None) -> Queues | None:
    """Return the queues of a program, if it has any."""
    if request is None:
        return Queues(traced.enqueues) if traced.enqueues else None
    return Queues(traced.enqueues, request.infeeds, request.places)


def _state_program(
    traced: TraceResult,
    plan: OptimizerPlan | None,
    gradients: Sequence[GradientEnqueue],
    half: HalfPartials,
    request: ProgramRequest,
    dump: Dump,
) -> Program:
    """Return the program of a trace, the same on every machine."""
    traced = functionalise(traced)
    _write_trace(dump, "functionalise", traced)
    for module in (traced.graph_module, *all_bodies(traced.controls)):
        join_slices(module.graph)
    named = name_nodes(traced, None if plan is None else plan.loss_scaling.name)
    _write_trace(dump, "name", named)
    anchored = [anchor.long_name for anchor in request.returns.anchors]
    program = lower(named, plan, half, anchored, gradients)
    _write_program(dump, "lower", program)
    for name in run_program_passes(program, request):
        _write_program(dump, name, program)
    return program


def fit_to_host(
    program: Program,
    run: RunSettings,
    arguments: ArgumentSpec,
    outputs: OutputSpec,
    plan: OptimizerPlan | None,
    dump: Dump,
    *,
    fed: bool = False,
) -> CompiledModel:
    """Fit a complete program to this machine, and make it an executable.

    Args:
        program: The same on every machine.
        run: How it runs.
        arguments: What calls must look like.
        outputs: What calls return.
        plan: The optimizer's updates; None for inference.
        dump: Takes the text of each step.
        fed: Inputs come from queues.

    Raises:
        Error: An op cannot be prepared.
    """
    start = time.perf_counter()
    host_program = program.copy()
    # Checks tell which of the model's ops has failed: none are joined for them.
    for name in () if run.floating_point_checks else run_host_passes(host_program):
        _write_program(dump, name, host_program)
    executable = build_executable(
        host_program,
        run.loop,
        training=plan is not None,
        schedule=run.schedule,
        floating_point_checks=run.floating_point_checks,
        fed=fed,
    )
    _write_executable(dump, executable)
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
        datetime.timedelta(seconds=time.perf_counter() - start),
    )


def _draws_bar(options: Options) -> bool:
    """Whether to draw a progress bar: on a terminal, or where the user asks for one."""
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    return bool(options.show_compilation_progress_bar) and (
        on_terminal or bool(options.progress_bar_asked_for)
    )


@contextmanager
def _progress(show: bool) -> Iterator[Callable[[], None]]:
    """Draw a bar that moves with each call of what this yields; a failure fills it."""
    bar = CompilationProgressBar() if show else None
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if bar is not None:
            bar(done, _NUM_STEPS)

    try:
        yield step
    finally:
        if bar is not None and 0 < done < _NUM_STEPS:
            bar(_NUM_STEPS, _NUM_STEPS)


def _write_trace(dump: Dump, name: str, traced: TraceResult | NamedGraph) -> None:
    if dump.on:
        dump.write(name, trace_text(traced))


def _write_program(dump: Dump, name: str, program: Program) -> None:
    if dump.on:
        dump.write(name, program_text(program))


def _write_executable(dump: Dump, executable: _native.Executable) -> None:
    if dump.on:
        plan = executable.plan
        dump.write(
            "build",
            f"{executable.actions()}\n\n{executable.program()}\n"
            f"arena: {plan.arena_bytes} bytes, live at most {plan.peak_live_bytes}\n"
            f"persistent: {plan.persistent_bytes} bytes\n",
        )


def _program_request(
    options: Options, loop: LoopCounts, stages: StageAssigner, *, training: bool, pipelined: bool
) -> ProgramRequest:
    """Return what the options ask of a program."""
    mode, period = OutputMode(options.output_mode), options.output_return_period
    anchors = [resolve(request, mode, period) for request in anchor_requests(options)]
    return ProgramRequest(
        _recomputation(options, training=training, pipelined=pipelined),
        ReturnRequest(loop, mode, period, anchors, pipelined),
        stages.ipu_of_stage,
    )


def _recomputation(options: Options, *, training: bool, pipelined: bool) -> Recomputation:
    """Return which forward values are rebuilt: as the options say, else those of a pipeline."""
    if not training:
        return Recomputation.NONE
    default = Recomputation.PIPELINE if pipelined else Recomputation.NONE
    return Recomputation(options._Popart.options.get("autoRecomputation", default))


def _check_stages(
    options: Options, stages: StageAssigner, loop: LoopCounts, training: bool
) -> tuple[str, int]:
    """Check the stages that the trace met.

    Returns:
        The name of the schedule, and how many IPUs the model takes.
    """
    strategy = options.execution_strategy
    strategy.check_num_stages(stages.num_stages)
    num_stages = count_stages(stages.ipu_ids)
    asked_for = PipelineSchedule(options.pipeline_schedule)
    schedule = schedule_name(
        asked_for, strategy, num_stages=stages.num_stages, is_cut=num_stages > 1
    )
    log_computed(options, pipelined=schedule != "sequential")
    check_schedule(
        asked_for,
        stages.ipu_of_stage,
        num_stages=stages.num_stages,
        training=training,
        count=loop.gradient_accumulation if training else loop.device_iterations,
    )
    num_ipus = check_pipeline(
        num_stages if schedule == "pipelined" else 1,
        stages.ipu_ids,
        strategy,
        training,
        loop.gradient_accumulation,
        loop.device_iterations,
        options.auto_round_num_ipus,
    )
    return schedule, num_ipus
