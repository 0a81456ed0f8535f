"""What calls of a program look like, and where its inputs come from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from popsim_torch import _native
from popsim_torch.arguments import ArgumentSpec, micro_batch_shape
from popsim_torch.errors import Error
from popsim_torch.feeds import InfeedQueue
from popsim_torch.ir import LoopCounts
from popsim_torch.optim.planning import OptimizerSettings
from popsim_torch.options import Options
from popsim_torch.trace.loop_body import BodyRequest

__all__ = ["Interface", "LoopRequest", "interface_of", "loop_counts"]

_MAX_COUNT = 2**31 - 1


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


@dataclass(frozen=True)
class LoopRequest:
    """A device loop: what it repeats, how often, and where its inputs come from.

    Attributes:
        counts: How often the body runs.
        inputs: Shape and element type of each input of a trip.
        input_names: What messages call them.
        infeeds: The queues that inputs come from.
        places: Where each input comes from.
        body: What is known of the body.
        read_optimizer: Copies an optimizer's values.
    """

    counts: LoopCounts
    inputs: Sequence[tuple[tuple[int, ...], torch.dtype]]
    input_names: tuple[str, ...]
    infeeds: Sequence[InfeedQueue]
    places: Sequence[_native.InputPlace]
    body: BodyRequest
    read_optimizer: Callable[[torch.optim.Optimizer], OptimizerSettings]


@dataclass(frozen=True)
class Interface:
    """What calls of a program look like.

    Attributes:
        arguments: Checks what callers pass.
        loop: How often a call runs the program.
        inputs: Shape and element type of each input of one micro-batch.
        unflatten: Builds the arguments of forward.
    """

    arguments: ArgumentSpec
    loop: LoopCounts
    inputs: Sequence[tuple[tuple[int, ...], torch.dtype]]
    unflatten: Callable[[list[torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]


def interface_of(
    module: nn.Module,
    options: Options,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    request: LoopRequest | None,
    *,
    training: bool,
    warned: set[str],
) -> Interface:
    """Return what calls of a program look like.

    Args:
        module: The user's module, or the body of a loop.
        options: Say how often a call runs the model.
        args: Positional arguments of the compiling call.
        kwargs: Keyword arguments of the compiling call.
        request: For the body of a loop, which has no arguments.
        training: Whether the model is trained.
        warned: Warnings already given.

    Raises:
        Error: The arguments cannot be those of a model, or a count is out of range.
    """
    signature = inspect.signature(module.forward)
    if request is None:
        arguments = ArgumentSpec(signature, args, kwargs, warned=warned)
        loop = loop_counts(options, training=training)
        inputs = _micro_batch_inputs(arguments, loop)
        return Interface(arguments, loop, inputs, arguments.unflatten)
    examples = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in request.inputs]
    arguments = ArgumentSpec(signature, examples, {}, warned=warned)
    return Interface(arguments, request.counts, request.inputs, lambda flat: (tuple(flat), {}))


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
