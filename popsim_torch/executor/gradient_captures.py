"""The gradients that a program enqueues: which queue takes which, and a note for the reader."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch

from popsim_torch.dtypes import held_dtype, returned_dtype
from popsim_torch.enums import OutfeedOptimizerMode, ReductionType
from popsim_torch.errors import Error
from popsim_torch.ir import names
from popsim_torch.optim.captures import GradientCapture, GradientEnqueue, unwrapped
from popsim_torch.optim.plan import OptimizerPlan, ParameterUpdate
from popsim_torch.options import Options
from popsim_torch.options.limits import num_replicas
from popsim_torch.trace import TraceResult
from popsim_torch.trace.graph.enqueues import Enqueue

__all__ = ["capture_gradients", "device_loop_captures"]


def capture_gradients(
    captures: Iterable[GradientCapture],
    plan: OptimizerPlan | None,
    traced: TraceResult,
    options: Options,
) -> tuple[list[GradientEnqueue], dict[int, Enqueue]]:
    """Ask each queue which gradients it takes.

    Args:
        captures: The captures of the optimizer.
        plan: The updates of the optimizer; None if there are none, then nothing is captured.
        traced: The trace; it has the queues that the program enqueues to by itself.
        options: Gradient accumulation and reduction are read from here.

    Returns:
        The gradients that the updates enqueue, and the enqueues that result; their numbers follow
        those of the trace.

    Raises:
        Error: The program enqueues to the queue already.
    """
    found: list[GradientEnqueue] = []
    enqueues: dict[int, Enqueue] = {}
    for capture in () if plan is None else captures:
        assert plan is not None
        _check_unused(capture, [*traced.enqueues.values(), *enqueues.values()])
        number = len(traced.enqueues) + len(enqueues)
        enqueue = _enqueue_of(capture, plan, traced.parameters, options, number)
        if enqueue is not None:
            gradients, enqueues[number] = enqueue
            found.append(gradients)
    return found, enqueues


def device_loop_captures(optimizers: Iterable[torch.optim.Optimizer]) -> list[GradientCapture]:
    """Return the captures of the optimizers that a loop steps; each captures its own parameters."""
    found = []
    for optimizer in optimizers:
        inner, captures = unwrapped(optimizer)
        own = frozenset(id(p) for group in inner.param_groups for p in group["params"])
        found += [dataclasses.replace(capture, only=own) for capture in captures]
    return found


def _check_unused(capture: GradientCapture, enqueues: Iterable[Enqueue]) -> None:
    for known in enqueues:
        if known.queue is capture.queue.queue:
            raise Error(
                "OutfeedOptimizer: the program enqueues to its queue already, at "
                f"{known.source}: a queue can be enqueued to only once in a program. Use a "
                "separate queue for the gradients."
            )


def _enqueue_of(
    capture: GradientCapture,
    plan: OptimizerPlan,
    parameters: Mapping[str, torch.Tensor],
    options: Options,
    number: int,
) -> tuple[GradientEnqueue, Enqueue] | None:
    """Return how the update and the executor enqueue; None if the queue takes nothing."""
    micro_batches = options.Training.gradient_accumulation * num_replicas(options)
    dtypes = {
        update.parameter: _dtype(update, parameters, capture.mode, micro_batches)
        for update in reversed(plan.updates)
        if capture.only is None or id(parameters[update.parameter]) in capture.only
    }
    by_key = {
        names.gradient_key(capture.names.get(id(parameters[name]), name)): name for name in dtypes
    }
    taken = capture.queue.take_gradients(
        {
            key: torch.empty(parameters[name].shape, dtype=dtypes[name], device="meta")
            for key, name in by_key.items()
        }
    )
    if taken is None:
        return None
    structure, keys = taken
    chosen = [by_key[key] for key in keys]
    gradients = GradientEnqueue(
        number,
        capture.mode,
        tuple(chosen),
        tuple(dtypes[name] for name in chosen),
        micro_batches,
        float(plan.norm_attributes["divisor"]),
    )
    capture.queue.note = _note(gradients, plan, options)
    components = tuple((dtypes[name], tuple(parameters[name].shape)) for name in chosen)
    enqueue = Enqueue(capture.queue.queue, structure, components, "the OutfeedOptimizer")
    return gradients, enqueue


def _dtype(
    update: ParameterUpdate,
    parameters: Mapping[str, torch.Tensor],
    mode: OutfeedOptimizerMode,
    micro_batches: int,
) -> torch.dtype:
    """Return the dtype of a gradient in a queue: that of the tensor that holds the gradient."""
    if mode == OutfeedOptimizerMode.AFTER_COMPUTE or micro_batches == 1:
        return returned_dtype(held_dtype(parameters[update.parameter].dtype))
    return torch.float32 if update.accumulator is None else update.accumulator.dtype


def _note(gradients: GradientEnqueue, plan: OptimizerPlan, options: Options) -> str:
    """Return a note that explains the values of the gradients to the reader of a table."""
    reduction = options.Training.accumulation_and_replication_reduction_type
    kind = "mean" if reduction == ReductionType.Mean else "sum"
    parts = []
    if gradients.accumulated:
        parts.append(f"Accumulated over {gradients.micro_batches} micro-batches: {kind}.")
    if plan.loss_scale_rule is not None:
        parts.append("Multiplied by the loss scaling, which the device adapts.")
    elif plan.loss_scaling.value != 1:
        when = "" if plan.loss_scaling.constant else " when the program was compiled"
        parts.append(f"Multiplied by the loss scaling, {plan.loss_scaling.value:g}{when}.")
    return " ".join(parts)
