"""Train small networks on digits, as a pipeline or not, and look at their tensors every epoch."""

import argparse
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import count
from common.batches import Batches, load_mnist
from common.data import add_data_arguments

BATCH_SIZE = 32
LEARNING_RATE = 0.01
ACCUMULATION = 4

Activation = Callable[[torch.Tensor], torch.Tensor]


class Dense(nn.Linear):
    """A linear layer together with its activation function, in one stage."""

    def __init__(self, in_features: int, out_features: int, activation: Activation):
        super().__init__(in_features, out_features)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(super().forward(x))


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, dim=1)


def loss_of(probabilities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of probabilities that a softmax has computed."""
    # A probability that is rounded to zero has no logarithm, so limit it.
    return functional.nll_loss(probabilities.clamp(min=1e-7).log(), labels)


# --- The four models ---------------------------------------------------------------


class Model(nn.Module):
    """Two layers, and a tap with its own queue."""

    def __init__(self, queue: poptorch.OutfeedQueue):
        super().__init__()
        self.Flatten = nn.Flatten()
        self.Dense_128 = Dense(28 * 28, 128, torch.relu)
        self.Dense_128_acts = poptorch.Outfeed(queue, name="Dense_128_acts")
        self.Dense_10 = Dense(128, 10, softmax)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.Dense_128(self.Flatten(images))
        x = self.Dense_128_acts(x)
        return self.Dense_10(x)


class PipelinedModel(nn.Module):
    """Three layers on two stages, and two taps that share a queue."""

    def __init__(self, queue: poptorch.MaybeOutfeedQueue):
        super().__init__()
        self.Flatten = nn.Flatten()
        self.Dense_256 = Dense(28 * 28, 256, torch.relu)
        self.Dense_128 = Dense(256, 128, torch.relu)
        self.Dense_128_acts = poptorch.MaybeOutfeed(
            queue, final_outfeed=False, name="Dense_128_acts"
        )
        self.Dense_10 = Dense(128, 10, softmax)
        self.Dense_10_acts = poptorch.MaybeOutfeed(queue, final_outfeed=True, name="Dense_10_acts")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with poptorch.PipelineStage(0):
            x = self.Dense_256(self.Flatten(images))
        with poptorch.PipelineStage(1):
            x = self.Dense_128_acts(self.Dense_128(x))
            return self.Dense_10_acts(self.Dense_10(x))


def sequential_model(queue: poptorch.MaybeOutfeedQueue) -> nn.Sequential:
    """Return two layers, each with a tap after it; the taps share a queue."""
    return nn.Sequential(
        OrderedDict(
            Flatten=nn.Flatten(),
            Dense_128=Dense(28 * 28, 128, torch.relu),
            Dense_128_acts=poptorch.MaybeOutfeed(queue, False, name="Dense_128_acts"),
            Dense_10=Dense(128, 10, softmax),
            Dense_10_acts=poptorch.MaybeOutfeed(queue, True, name="Dense_10_acts"),
        )
    )


def pipelined_sequential_model(queue: poptorch.MaybeOutfeedQueue) -> nn.Sequential:
    """Return three layers and two taps, with a stage for each of the six modules."""
    model = nn.Sequential(
        OrderedDict(
            Flatten=nn.Flatten(),
            Dense_256=Dense(28 * 28, 256, torch.relu),
            Dense_128=Dense(256, 128, torch.relu),
            Dense_128_acts=poptorch.MaybeOutfeed(queue, False, name="Dense_128_acts"),
            Dense_10=Dense(128, 10, softmax),
            Dense_10_acts=poptorch.MaybeOutfeed(queue, True, name="Dense_10_acts"),
        )
    )
    poptorch.set_pipeline_stage_assignment(model, [0, 0, 1, 1, 1, 1])
    return model


def make_model(arguments: argparse.Namespace) -> tuple[nn.Module, poptorch.OutfeedCallback]:
    """Return the chosen model, and the callback that prints its activations."""
    if arguments.model_type == "Model" and arguments.no_pipelining:
        own_queue = poptorch.OutfeedQueue()
        callback = poptorch.OutfeedCallback(own_queue, name="Single layer activations callback")
        return Model(own_queue), callback
    queue = poptorch.MaybeOutfeedQueue(
        filters=poptorch.process_filters(arguments.activations_filters)
    )
    callback = poptorch.OutfeedCallback(queue, name="Multi-layer activations callback")
    if arguments.no_pipelining:
        return sequential_model(queue), callback
    if arguments.model_type == "Model":
        return PipelinedModel(queue), callback
    return pipelined_sequential_model(queue), callback


# --- Training ----------------------------------------------------------------------


def make_optimizer(
    model: nn.Module, arguments: argparse.Namespace
) -> tuple[poptorch.OutfeedOptimizer, poptorch.OutfeedCallback]:
    """Return SGD that enqueues its gradients, and the callback that prints them."""
    queue = poptorch.MaybeOutfeedQueue(
        filters=poptorch.process_filters(arguments.gradients_filters)
    )
    mode = poptorch.OutfeedOptimizerMode
    optimizer = poptorch.OutfeedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        queue,
        outfeed_optimizer_mode=mode.AFTER_COMPUTE
        if arguments.outfeed_pre_accumulated_gradients
        else mode.BEFORE_APPLY,
        model=model,
    )
    return optimizer, poptorch.OutfeedCallback(queue, name="Gradients callback")


def make_options(arguments: argparse.Namespace) -> poptorch.Options:
    """Return options for one IPU, or for a pipeline. Accumulated gradients are a sum."""
    accumulation = ACCUMULATION if arguments.use_gradient_accumulation else 1
    options = poptorch.Options()
    if arguments.no_pipelining:
        poptorch.set_gradient_accumulation_options(options, accumulation)
    else:
        poptorch.set_pipelining_options(options, accumulation)
    return options


class LossCallback:
    """Prints the mean loss of an epoch."""

    def __init__(self, epochs: int):
        self.epochs = epochs

    def on_epoch_end(self, epoch: int, logs: Mapping[str, torch.Tensor]) -> None:
        print(f"Epoch {epoch + 1}/{self.epochs} - loss: {logs['loss'].mean():.4f}")


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    callbacks: Sequence[poptorch.OutfeedCallback],
    arguments: argparse.Namespace,
) -> None:
    """Train for ``--epochs`` epochs. Each epoch is one call of the device."""
    images, labels = load_mnist(arguments)
    poptorch.fit(
        model,
        Batches(images.unsqueeze(1), labels, BATCH_SIZE, arguments.seed),
        epochs=arguments.epochs,
        steps_per_epoch=arguments.steps_per_epoch,
        steps_per_execution=arguments.steps_per_epoch,
        callbacks=[LossCallback(arguments.epochs), *callbacks],
        loss=loss_of,
        optimizer=optimizer,
        options=make_options(arguments),
        verbose=0,
    )


# --- Flags -------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    flag = parser.add_argument
    flag(
        "--model-type",
        choices=["Sequential", "Model"],
        default="Sequential",
        help="a list of layers, or a module with its own forward (default: %(default)s)",
    )
    flag("--no-pipelining", action="store_true", help="one IPU instead of two")
    flag(
        "--use-gradient-accumulation",
        action="store_true",
        help=f"update weights after {ACCUMULATION} batches (pipelines always do)",
    )
    flag(
        "--outfeed-pre-accumulated-gradients",
        action="store_true",
        help="observe the gradients of each batch, instead of those of each weight update",
    )
    flag("--steps-per-epoch", type=count, default=2000, help="batches (default: %(default)s)")
    flag("--epochs", type=count, default=3, help="(default: %(default)s)")
    flag(
        "--gradients-filters",
        nargs="+",
        default=["Dense_128"],
        metavar="PART",
        help="observe gradients whose key has one of these in it; 'none' observes all "
        "(default: Dense_128)",
    )
    flag(
        "--activations-filters",
        nargs="+",
        default=["none"],
        metavar="PART",
        help="the same for activations (default: none); a Model without pipelining has no choice",
    )
    flag("--seed", type=int, default=0, help="for weights and shuffling")
    add_data_arguments(parser)
    arguments = parser.parse_args()
    has_plain_tap = arguments.model_type == "Model" and arguments.no_pipelining
    if has_plain_tap and poptorch.process_filters(arguments.activations_filters) is not None:
        parser.error("--activations-filters: a Model without pipelining has a single, plain tap.")
    if not arguments.no_pipelining:
        arguments.use_gradient_accumulation = True
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    model, activations_callback = make_model(arguments)
    optimizer, gradients_callback = make_optimizer(model, arguments)
    train(model, optimizer, [gradients_callback, activations_callback], arguments)


if __name__ == "__main__":
    main()
