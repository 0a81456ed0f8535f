"""Train a network as a pipeline on two IPUs, and look at activations and gradients of both."""

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

# Each filter is a part of the keys to return. None returns everything.
STAGE_1_FILTERS = ["dense1"]
STAGE_2_FILTERS = None
GRADIENTS_FILTERS = ["dense1", "dense2"]


def make_program(arguments: argparse.Namespace, infeed: poptorch.InfeedQueue) -> Program:
    network = Network()
    # The stages run at different times, so each stage needs its own queue.
    of_stage_1 = poptorch.MaybeOutfeedQueue(filters=STAGE_1_FILTERS)
    of_stage_2 = poptorch.MaybeOutfeedQueue(filters=STAGE_2_FILTERS)
    losses = poptorch.OutfeedQueue()
    optimizer = observed_optimizer(network, arguments, GRADIENTS_FILTERS)

    def stage_1(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.relu(network.dense1(images))
        of_stage_1.maybe_outfeed("dense1", x)
        x = torch.relu(network.dense2(x))
        of_stage_1.maybe_outfeed("dense2", x)
        of_stage_1.maybe_enqueue()
        return x, labels

    def stage_2(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = network.dense3(x)
        of_stage_2.maybe_outfeed("dense3", logits)
        of_stage_2.maybe_enqueue()
        return functional.cross_entropy(logits, labels)

    @poptorch.function
    def run() -> None:
        poptorch.pipeline(
            computational_stages=[stage_1, stage_2],
            gradient_accumulation_count=arguments.gradient_accumulation_count,
            repeat_count=arguments.repeat_count,
            infeed_queue=infeed,
            outfeed_queue=losses,
            outfeed_loss=True,
            optimizer_function=lambda loss: (optimizer, loss),
            reduction_method=poptorch.GradientAccumulationReductionMethod.SUM,
        )

    images = torch.empty(BATCH_SIZE, 28 * 28)
    hidden = torch.empty(BATCH_SIZE, 128)
    labels = torch.zeros(BATCH_SIZE, dtype=torch.int64)
    return Program(
        run,
        [
            Activations(of_stage_1, stage_1, [images, labels]),
            Activations(of_stage_2, stage_2, [hidden, labels]),
        ],
        optimizer,
        losses,
        arguments.repeat_count * arguments.gradient_accumulation_count,
    )


def main() -> None:
    parser = make_parser(
        __doc__, accumulation=16, repeat_help="runs of the pipeline in a step, an update each"
    )
    train(parser.parse_args(), make_program)


if __name__ == "__main__":
    main()
