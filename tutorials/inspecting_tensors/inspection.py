"""The shared parts of both programs: flags, digits, network, loop over steps, printing."""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import count, positive
from common.batches import Batches, load_mnist
from common.data import add_data_arguments

BATCH_SIZE = 32
LEARNING_RATE = 0.01


class Network(nn.Module):
    """Three linear layers. The programs call the layers, not the network."""

    def __init__(self):
        super().__init__()
        self.dense1 = nn.Linear(28 * 28, 256)
        self.dense2 = nn.Linear(256, 128)
        self.dense3 = nn.Linear(128, 10)


@dataclass(frozen=True)
class Activations:
    """A queue for activations, and the function that adds them to the queue.

    Attributes:
        queue: The queue that gets the activations.
        function: The function that adds them. Its arguments have the shapes of ``arguments``.
        arguments: Tensors of these shapes; their values do not matter.
    """

    queue: poptorch.MaybeOutfeedQueue
    function: Callable[..., Any]
    arguments: Sequence[torch.Tensor]


@dataclass(frozen=True)
class Program:
    """A program that trains for one step, and the queues of its results.

    Attributes:
        run: Runs one step.
        activations: One entry for each stage of a pipeline.
        optimizer: Enqueues the gradients.
        losses: The queue for the loss of each micro-batch.
        num_micro_batches: Number of micro-batches in one step.
    """

    run: Callable[[], object]
    activations: Sequence[Activations]
    optimizer: poptorch.OutfeedOptimizer
    losses: poptorch.OutfeedQueue
    num_micro_batches: int


def make_parser(description: str, accumulation: int, repeat_help: str) -> argparse.ArgumentParser:
    """Return a parser of the flags of both programs.

    Args:
        description: The description of the program.
        accumulation: The default of ``--gradient-accumulation-count``.
        repeat_help: What ``--repeat-count`` counts.
    """
    parser = argparse.ArgumentParser(description=description)
    flag = parser.add_argument
    flag("--repeat-count", type=count, default=100, help=f"{repeat_help} (default: %(default)s)")
    flag("--epochs", type=positive, default=3.0, help="how long to train (default: %(default)s)")
    flag(
        "--gradient-accumulation-count",
        type=count,
        default=accumulation,
        help="micro-batches for each weight update (default: %(default)s)",
    )
    flag(
        "--outfeed-pre-accumulated-gradients",
        action="store_true",
        help="return the gradients of each micro-batch, instead of those of each weight update",
    )
    flag("--run-single-step", action="store_true", help="one step only, for a small profile")
    flag("--dry-run", action="store_true", help="print what would be returned, without training")
    flag("--seed", type=int, default=0, help="for weights and shuffling")
    add_data_arguments(parser)
    return parser


def observed_optimizer(
    network: nn.Module, arguments: argparse.Namespace, filters: Sequence[str]
) -> poptorch.OutfeedOptimizer:
    """Return SGD that enqueues its gradients to its own queue, if a filter accepts them."""
    mode = poptorch.OutfeedOptimizerMode
    return poptorch.OutfeedOptimizer(
        torch.optim.SGD(network.parameters(), lr=LEARNING_RATE),
        poptorch.MaybeOutfeedQueue(filters=filters),
        outfeed_optimizer_mode=mode.AFTER_COMPUTE
        if arguments.outfeed_pre_accumulated_gradients
        else mode.BEFORE_APPLY,
        model=network,
    )


def train(
    arguments: argparse.Namespace,
    make_program: Callable[[argparse.Namespace, poptorch.InfeedQueue], Program],
) -> None:
    """Train for ``--epochs`` epochs, and print the elements of the queues after each step."""
    print(arguments)
    torch.manual_seed(arguments.seed)
    images, labels = load_mnist(arguments)
    batches = Batches(images.flatten(start_dim=1), labels, BATCH_SIZE, arguments.seed)
    program = make_program(arguments, poptorch.InfeedQueue(batches))
    if arguments.dry_run:
        print_plan(program)
        return

    examples_per_step = BATCH_SIZE * program.num_micro_batches
    num_steps = math.ceil(arguments.epochs * len(images) / examples_per_step)
    for step in range(1 if arguments.run_single_step else num_steps):
        program.run()
        activations: dict[str, torch.Tensor] = {}
        for one in program.activations:
            activations |= one.queue.maybe_dequeue() or {}
        print_tensors("Activation", activations, step)
        gradients = program.optimizer.queue
        print_tensors("Gradient", gradients.maybe_dequeue() or {}, step, gradients.note)
        epoch = examples_per_step * step / len(images)
        print(f"Epoch {epoch:.1f}, Mean loss: {program.losses.dequeue().mean():.3f}\n")


def print_tensors(
    kind: str, tensors: Mapping[str, torch.Tensor], step: int, note: str = ""
) -> None:
    """Print shapes and a table of statistics; nothing if there are no tensors.

    Args:
        kind: The kind of the tensors: activations or gradients.
        tensors: The tensors by their keys.
        step: The number of the step, from 0.
        note: A note that explains the table. It is printed below the table.
    """
    if not tensors:
        return
    for key, tensor in tensors.items():
        print(f"{kind} key: {key} shape: {tuple(tensor.shape)}")
    print(poptorch.summary_table(tensors, poptorch.step_title(step)))
    if note:
        print(note)
    print()


def print_plan(program: Program) -> None:
    """Print what would be enqueued in each micro-batch, without computing anything."""
    print(f"{program.num_micro_batches} micro-batches from table to table. Activations of each:")
    for one in program.activations:
        one.queue.dry_run(one.function, *one.arguments)
    accumulated = program.optimizer.mode == poptorch.OutfeedOptimizerMode.BEFORE_APPLY
    print(f"Gradients of each {'weight update' if accumulated else 'micro-batch'}:")
    program.optimizer.dry_run()
