"""Looks into a pipeline of two stages while it trains: activations, gradients, and their tables."""

import argparse

import poptorch
import torch
from torch import nn

GRADIENT_ACCUMULATION = 4
BATCH = 32


class Network(nn.Module):
    """784-256-128-10 on two devices, with taps in the second stage."""

    def __init__(self, queue):
        super().__init__()
        self.Dense_256 = nn.Linear(784, 256)
        self.Dense_128 = nn.Linear(256, 128)
        self.Dense_10 = nn.Linear(128, 10)
        self.tap_128 = poptorch.MaybeOutfeed(queue, False, name="Dense_128_acts")
        self.tap_10 = poptorch.MaybeOutfeed(queue, True, name="Probs")

    def forward(self, image, label):
        with poptorch.Block("first", ipu_id=0):
            x = torch.relu(self.Dense_256(image.flatten(1)))
        with poptorch.Block("second", ipu_id=1):
            x = self.tap_128(torch.relu(self.Dense_128(x)))
            probabilities = self.tap_10(torch.softmax(self.Dense_10(x), -1))
            return nn.functional.nll_loss(torch.log(probabilities), label)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps-per-epoch", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--gradients-filters", nargs="+", default=["Dense_128"])
    parser.add_argument("--activations-filters", nargs="+", default=["none"])
    parser.add_argument("--outfeed-pre-accumulated-gradients", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    activations = poptorch.MaybeOutfeedQueue(
        filters=poptorch.process_filters(args.activations_filters)
    )
    gradients = poptorch.MaybeOutfeedQueue(filters=poptorch.process_filters(args.gradients_filters))
    mode = poptorch.OutfeedOptimizerMode
    chosen = mode.AFTER_COMPUTE if args.outfeed_pre_accumulated_gradients else mode.BEFORE_APPLY

    model = Network(activations)
    sgd = poptorch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = poptorch.OutfeedOptimizer(sgd, gradients, chosen, model=model)
    optimizer.dry_run()

    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    options.deviceIterations(args.steps_per_epoch // GRADIENT_ACCUMULATION)
    options.Training.gradientAccumulation(GRADIENT_ACCUMULATION)
    options.setExecutionStrategy(
        poptorch.PipelinedExecution(poptorch.Stage("first"), poptorch.Stage("second"))
    )
    training = poptorch.trainingModel(model, options, optimizer)
    callbacks = [
        poptorch.OutfeedCallback(gradients, "Gradients callback"),
        poptorch.OutfeedCallback(activations, "Multi-layer activations callback"),
        poptorch.OutfeedCallback(poptorch.MaybeOutfeedQueue(), "Single layer activations callback"),
    ]
    count = args.steps_per_epoch * BATCH
    images, labels = torch.rand(count, 28, 28), torch.randint(10, (count,))
    for epoch in range(args.epochs):
        training(images, labels)
        for callback in callbacks:
            callback.on_epoch_end(epoch)


if __name__ == "__main__":
    main()
