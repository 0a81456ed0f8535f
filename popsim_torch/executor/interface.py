"""The arguments and results of a program's calls, and the sources of its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from popsim_torch.arguments import ArgumentSpec, micro_batch_shape
from popsim_torch.errors import Error
from popsim_torch.executor.replicas import input_groups
from popsim_torch.ir import LoopCounts
from popsim_torch.options import Options

__all__ = ["Interface", "interface_of_call", "interface_of_device_loop", "loop_counts"]

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
    return LoopCounts(
        options.device_iterations, accumulation, options.replication_factor, input_groups(options)
    )


@dataclass(frozen=True)
class Interface:
    """The arguments and results of a program's calls.

    Attributes:
        arguments: Checks the arguments of a call.
        loop: How often a call runs the program.
        inputs: Shape and dtype of each input of one micro-batch.
        unflatten: Builds the arguments of forward.
    """

    arguments: ArgumentSpec
    loop: LoopCounts
    inputs: Sequence[tuple[tuple[int, ...], torch.dtype]]
    unflatten: Callable[[list[torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]


def interface_of_call(arguments: ArgumentSpec, loop: LoopCounts) -> Interface:
    """Return the interface of calls that are like a first call.

    Args:
        arguments: The arguments of the first call.
        loop: How often a call runs the program.

    Raises:
        Error: The arguments cannot be split into the required number of micro-batches.
    """
    inputs = _micro_batch_inputs(arguments, loop)
    return Interface(arguments, loop, inputs, arguments.unflatten)


def interface_of_device_loop(
    module: nn.Module,
    inputs: Sequence[tuple[tuple[int, ...], torch.dtype]],
    counts: LoopCounts,
    warned: set[str],
) -> Interface:
    """Return the interface of an iteration of a device loop.

    Args:
        module: The body.
        inputs: Shape and dtype of each input of an iteration.
        counts: How often the body runs.
        warned: The warnings that were already given.
    """
    examples = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in inputs]
    arguments = ArgumentSpec(inspect.signature(module.forward), examples, {}, warned=warned)
    return Interface(arguments, counts, inputs, lambda flat: (tuple(flat), {}))


def _micro_batch_inputs(
    arguments: ArgumentSpec, loop: LoopCounts
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    iterations, accumulation = loop.device_iterations, loop.gradient_accumulation
    groups = loop.num_inputs
    return [
        (
            micro_batch_shape(
                shape,
                iterations * accumulation * groups,
                argument=name,
                D=iterations,
                GA=accumulation,
                R=loop.replicas,
                g=loop.replicas // groups,
            ),
            dtype,
        )
        for name, shape, dtype in zip(
            arguments.names, arguments.shapes, arguments.dtypes, strict=True
        )
    ]
