"""Train a network that a flag spoils, and find the layer that fails first.

The program computes statistics of all weights and gradients while it trains. They go to the
terminal, to a page and into pictures; no gradient is copied to the host.
"""

import argparse
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import torch

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from diagnosis import draw, layers_of, report
from networks import FAULTS, LEARNING_RATES, make_network

from common.arguments import count, positive
from common.batches import Batches, load_mnist
from common.data import add_data_arguments

BATCH_SIZE = 32
WEIGHTS, BIASES = "Gradient___*.weight", "Gradient___*.bias"


def make_options(every: int) -> poptorch.Options:
    """Return options that observe gradients and weights in every ``every``-th step."""
    options = poptorch.Options()
    options.observe(
        WEIGHTS, poptorch.Moments(), poptorch.Counts(), poptorch.Histogram(), every=every
    )
    # A bias has a value for each unit: samples are all of its values, up to 64 units.
    options.observe(BIASES, poptorch.Moments(), poptorch.Sample(64), every=every)
    options.observe(poptorch.tensors.weights(), poptorch.Moments(), every=every)
    return options


def train(
    network: torch.nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    learning_rate: float,
    sinks: Iterable[poptorch.RecordSink] = (),
    every: int = 1,
) -> tuple[list[float], list[poptorch.Record]]:
    """Train, and return the losses and the statistics."""
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate)
    executor = poptorch.trainingModel(network, make_options(every), optimizer)
    for sink in sinks:
        executor.add_sink(sink)
    losses = [float(executor(images, labels)) for images, labels in batches]
    executor.close_sinks()
    records = executor.observations()
    executor.destroy()
    return losses, records


def digit_batches(arguments: argparse.Namespace) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Return as many batches of digits as there are steps."""
    images, labels = load_mnist(arguments)
    batches = Batches(images[:, None], labels.long(), BATCH_SIZE, arguments.seed)
    return islice(batches, arguments.steps)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "fault", nargs="?", choices=FAULTS, default="none", help="what spoils the training"
    )
    parser.add_argument("--steps", type=count, default=60, help="training steps of 32 digits")
    parser.add_argument("--learning-rate", type=positive, help="default: depends on the fault")
    parser.add_argument("--every", type=count, default=1, help="observe every n-th step")
    parser.add_argument("--seed", type=int, default=0, help="for weights and shuffling")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("health.png"),
        metavar="PNG",
        help="file of the picture of updates and dead units (default: %(default)s)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="folder for run.html, flow.png and histogram.png (default: they are not written)",
    )
    add_data_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    fault = arguments.fault
    learning_rate = arguments.learning_rate or LEARNING_RATES[fault]

    sinks: list[poptorch.RecordSink] = [poptorch.LiveTerminal(WEIGHTS)]
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        title = f"Gradient health, fault: {fault}"
        sinks.append(poptorch.HtmlPage(arguments.folder / "run.html", title=title))
    losses, records = train(
        make_network(fault), digit_batches(arguments), learning_rate, sinks, arguments.every
    )

    layers = layers_of(records, learning_rate)
    print(f"Loss: {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    print(report(layers))
    draw(layers, f"Fault: {fault}, learning rate {learning_rate:g}").savefig(
        arguments.output, dpi=110
    )
    if arguments.folder is not None:
        poptorch.gradient_flow(records).savefig(arguments.folder / "flow.png", dpi=110)
        first = f"Gradient___{layers[0].name}.weight"
        picture = poptorch.histogram_over_time(records, first)
        picture.savefig(arguments.folder / "histogram.png", dpi=110)


if __name__ == "__main__":
    main()
