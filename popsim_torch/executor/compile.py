"""From a module, options and an optimizer to a program that runs: every step, in order."""

from __future__ import annotations

import datetime
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from popsim_torch import _native
from popsim_torch.anchors import resolve
from popsim_torch.arguments import ArgumentSpec, OutputSpec, micro_batch_shape
from popsim_torch.dtypes import held_dtype
from popsim_torch.enums import MeanReductionStrategy, OutputMode, ReductionType
from popsim_torch.errors import Error
from popsim_torch.executor.build import build_executable
from popsim_torch.lowering import (
    HalfPartials,
    LoopCounts,
    LoweringRequest,
    Program,
    lower,
)
from popsim_torch.optim.plan import OptimizerPlan
from popsim_torch.optim.planning import OptimizerSettings, plan_updates
from popsim_torch.options import Options
from popsim_torch.options.progress import CompilationProgressBar
from popsim_torch.passes.recompute_choice import Recomputation
from popsim_torch.stages import ShardedExecution, StageAssigner
from popsim_torch.stages.strategies import check_pipeline, count_stages
from popsim_torch.trace import TraceRequest, trace

_NUM_STEPS = 4
_MAX_COUNT = 2**31 - 1
# torch.fx traces with state that belongs to the process.
_one_at_a_time = threading.RLock()


@dataclass(frozen=True)
class CompiledModel:
    """A program on the device, and how user calls map to it.

    Attributes:
        executable: The program.
        program: What its tensors are.
        arguments: What calls must look like.
        outputs: What calls return.
        input_dtypes: Element type on the device, per input.
        converts_inputs: Whether any of them is not the caller's type.
        plan: The optimizer's updates; None for inference.
        duration: How long compilation took.
    """

    executable: _native.Executable
    program: Program
    arguments: ArgumentSpec
    outputs: OutputSpec
    input_dtypes: tuple[torch.dtype, ...]
    converts_inputs: bool
    plan: OptimizerPlan | None
    duration: datetime.timedelta


class _Progress:
    def __init__(self, show: bool) -> None:
        self._bar = CompilationProgressBar() if show else None
        self._done = 0

    def step(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar(self._done, _NUM_STEPS)

    def abandon(self) -> None:
        if self._bar is not None and 0 < self._done < _NUM_STEPS:
            self._bar(_NUM_STEPS, _NUM_STEPS)


def loop_counts(options: Options, *, training: bool) -> LoopCounts:
    """Return how often a call runs the model.

    Raises:
        Error: A count is out of range.
    """
    accumulation = options.Training.gradient_accumulation if training else 1
    for setter, count in (
        ("deviceIterations", options.device_iterations),
        ("Training.gradientAccumulation", accumulation),
    ):
        if not 1 <= count <= _MAX_COUNT:
            raise Error(f"Options.{setter}({count}): the count must be from 1 to {_MAX_COUNT}.")
    return LoopCounts(options.device_iterations, accumulation)


def half_partials(options: Options) -> HalfPartials:
    """Return which products of float16 operands add up in float16."""
    default = "half" if options.Precision.partials_type == torch.half else "float"
    popart = options._Popart
    return HalfPartials(
        matmul=(popart.matmul_partials or default) == "half",
        convolution=(popart.convolution_partials or default) == "half",
    )


def make_plan(
    optimizer: OptimizerSettings,
    options: Options,
    parameters: Mapping[str, nn.Parameter],
    trained: Sequence[str],
) -> OptimizerPlan:
    """Return what an optimizer does to the parameters that have a gradient.

    Args:
        optimizer: Its values.
        options: Gradient accumulation and reduction are taken from here.
        parameters: Every parameter of the model, by canonical name.
        trained: Names of those that have a gradient.
    """
    training = options.Training
    return plan_updates(
        optimizer,
        {name: parameters[name] for name in trained},
        all_parameters=parameters,
        gradient_accumulation=training.gradient_accumulation,
        reduction=ReductionType(training.accumulation_and_replication_reduction_type),
        running_mean=training.mean_accumulation_and_replication_reduction_strategy
        == MeanReductionStrategy.Running,
    )


def compile_model(
    module: nn.Module,
    options: Options,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    optimizer: OptimizerSettings | None,
    warned: set[str],
) -> CompiledModel:
    """Trace, lower and build a model.

    Args:
        module: The user's module (the executor's shallow copy of it).
        options: With a resolved output mode.
        args: Positional arguments of the compiling call.
        kwargs: Keyword arguments of the compiling call.
        optimizer: For training; None for inference.
        warned: Warnings already given for this executor.

    Raises:
        Error: The model cannot be compiled; nothing has changed, the call may be repeated.
    """
    start = time.perf_counter()
    with _one_at_a_time:
        return _compile_with_progress(module, options, args, kwargs, optimizer, warned, start)


def _compile_with_progress(
    module: nn.Module,
    options: Options,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    optimizer: OptimizerSettings | None,
    warned: set[str],
    start: float,
) -> CompiledModel:
    progress = _Progress(bool(options.show_compilation_progress_bar))
    try:
        return _compile(module, options, args, kwargs, optimizer, warned, progress, start)
    finally:
        progress.abandon()


def _compile(
    module: nn.Module,
    options: Options,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    optimizer: OptimizerSettings | None,
    warned: set[str],
    progress: _Progress,
    start: float,
) -> CompiledModel:
    training = optimizer is not None
    arguments = ArgumentSpec(inspect.signature(module.forward), args, kwargs, warned=warned)
    loop = loop_counts(options, training=training)
    stages = StageAssigner(options.execution_strategy)
    progress.step()

    outputs: list[OutputSpec] = []

    def flatten(structure: Any) -> list[torch.Tensor]:
        spec = OutputSpec(structure, on_device=lambda tensor: isinstance(tensor, FakeTensor))
        outputs.append(spec)
        return spec.flatten(structure)

    traced = trace(
        TraceRequest(
            module,
            _micro_batch_inputs(arguments, loop),
            arguments.unflatten,
            flatten,
            training,
            stages,
            module_scopes=bool(options.module_namescope_enabled),
        )
    )
    pipelined = _check_stages(options, stages, loop, training)
    progress.step()

    plans: list[OptimizerPlan] = []
    plan: Callable[[Sequence[str]], OptimizerPlan] | None = None
    if optimizer is not None:
        parameters = dict(module.named_parameters())

        def plan(trained: Sequence[str]) -> OptimizerPlan:
            plans.append(make_plan(optimizer, options, parameters, trained))
            return plans[0]

    mode = OutputMode(options.output_mode)
    program = lower(
        LoweringRequest(
            traced,
            loop,
            mode,
            options.output_return_period,
            [
                resolve(request, mode, options.output_return_period)
                for request in options.anchored_tensors.values()
            ],
            plan,
            pipelined,
            half_partials(options),
            _recomputation(options, training=training, pipelined=pipelined),
        )
    )
    progress.step()

    schedule = "pipelined" if pipelined else "sequential"
    executable = build_executable(program, loop, training=training, schedule=schedule)
    progress.step()
    input_dtypes = tuple(map(held_dtype, arguments.dtypes))
    return CompiledModel(
        executable,
        program,
        arguments,
        outputs[0],
        input_dtypes,
        input_dtypes != arguments.dtypes,
        plans[0] if plans else None,
        datetime.timedelta(seconds=time.perf_counter() - start),
    )


def _micro_batch_inputs(
    arguments: ArgumentSpec, loop: LoopCounts
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    iterations, accumulation = loop.device_iterations, loop.gradient_accumulation
    return [
        (
            micro_batch_shape(
                shape,
                iterations * accumulation,
                argument=name,
                D=iterations,
                GA=accumulation,
                R=1,
                g=1,
            ),
            dtype,
        )
        for name, shape, dtype in zip(
            arguments.names, arguments.shapes, arguments.dtypes, strict=True
        )
    ]


def _recomputation(options: Options, *, training: bool, pipelined: bool) -> Recomputation:
    """Return which forward values are rebuilt: as the options say, else those of a pipeline."""
    if not training:
        return Recomputation.NONE
    default = Recomputation.PIPELINE if pipelined else Recomputation.NONE
    return Recomputation(options._Popart.options.get("autoRecomputation", default))


def _check_stages(
    options: Options, stages: StageAssigner, loop: LoopCounts, training: bool
) -> bool:
    """Check the stages that the trace met; return whether micro-batches overlap in a pipeline."""
    strategy = options.execution_strategy
    num_stages = count_stages(stages.ipu_ids)
    check_pipeline(
        num_stages,
        stages.ipu_ids,
        strategy,
        training,
        loop.gradient_accumulation,
        loop.device_iterations,
        options.auto_round_num_ipus,
    )
    return num_stages > 1 and not isinstance(strategy, ShardedExecution)
