"""Train a network on one IPU, and look at its activations and gradients after every step."""

import argparse

import torch
from inspection import (
    BATCH_SIZE,
    Activations,
    Network,
    Program,
    make_parser,
    observed_optimizer,
    train,
)
from torch.nn import functional

import popsim_torch as poptorch

# Each filter is a part of the keys to return. None instead of a list returns everything.
ACTIVATIONS_FILTERS = ["dense1", "dense3"]
GRADIENTS_FILTERS = ["dense1", "dense2"]


def make_program(arguments: argparse.Namespace, infeed: poptorch.InfeedQueue) -> Program:
    network = Network()
    activations = poptorch.MaybeOutfeedQueue(filters=ACTIVATIONS_FILTERS)
    losses = poptorch.OutfeedQueue()
    optimizer = observed_optimizer(network, arguments, GRADIENTS_FILTERS)

    def forward(images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(network.dense1(images))
        activations.maybe_outfeed("dense1", x)
        x = torch.relu(network.dense2(x))
        activations.maybe_outfeed("dense2", x)
        logits = network.dense3(x)
        activations.maybe_outfeed("dense3", logits)
        activations.maybe_enqueue()
        return logits

    def micro_batch(images: torch.Tensor, labels: torch.Tensor) -> None:
        loss = functional.cross_entropy(forward(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.enqueue(loss)

    options = poptorch.Options()
    poptorch.set_gradient_accumulation_options(
        options,
        arguments.gradient_accumulation_count,
        poptorch.GradientAccumulationReductionMethod.SUM,
    )

    @poptorch.function(options=options)
    def run() -> None:
        poptorch.repeat(
            arguments.repeat_count,
            micro_batch,
            infeed=infeed,
            gradient_accumulation=arguments.gradient_accumulation_count,
        )

    images = torch.empty(BATCH_SIZE, 28 * 28)
    return Program(
        run,
        [Activations(activations, forward, [images])],
        optimizer,
        losses,
        arguments.repeat_count,
    )


def check_counts(arguments: argparse.Namespace) -> None:
    """Check that the last weight update of a step gets all of its micro-batches.

    Raises:
        ValueError: The last weight update of a step would get fewer micro-batches.
    """
    repeats, count = arguments.repeat_count, arguments.gradient_accumulation_count
    if repeats % count:
        below = repeats - repeats % count
        nearest = f"{below} or {below + count}" if below else str(count)
        raise ValueError(
            f"--repeat-count ({repeats}) must be a multiple of --gradient-accumulation-count "
            f"({count}): use {nearest}."
        )


def main() -> None:
    parser = make_parser(
        __doc__, accumulation=1, repeat_help="micro-batches in a step, a multiple of the next count"
    )
    arguments = parser.parse_args()
    check_counts(arguments)
    train(arguments, make_program)


if __name__ == "__main__":
    main()
