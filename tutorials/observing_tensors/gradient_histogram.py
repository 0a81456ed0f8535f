"""Train a small network for one epoch and plot how large its gradients are.

The gradients of all weights and biases are anchored by their names, so they
come back to the host without any change to the network. With --observe the
program itself counts the gradients, and only the counts come back.
"""

import argparse
import re
import shutil
import sys
import textwrap
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn
from tqdm import tqdm

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.data import add_data_arguments, open_mnist

LAYERS = ("fc1", "fc2", "fc3")
KINDS = ("weight", "bias")
GRADIENTS = [f"Gradient___{layer}.{kind}" for layer in LAYERS for kind in KINDS]
# A power of two for each bar, from 2^-40 to 2^18.
EDGES = torch.arange(-40, 19)
# The powers of two at which float16 rounds to zero, loses accuracy, and ends.
FLOAT16_ZERO, FLOAT16_NORMAL, FLOAT16_MAX = -25, -14, 16


class Classifier(nn.Module):
    """Three linear layers from the pixels of a digit to its class."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 320)
        self.fc2 = nn.Linear(320, 100)
        self.fc3 = nn.Linear(100, 10)
        self.relu = nn.ReLU()
        # One distribution per image: dimension 1 has the classes, dimension 0 the batch.
        self.log_softmax = nn.LogSoftmax(dim=1)
        self.loss = nn.NLLLoss()

    def forward(self, images, labels=None):
        x = images.flatten(start_dim=1)
        x = self.relu(self.fc1(x))
        x = self.relu(self.fc2(x))
        log_probabilities = self.log_softmax(self.fc3(x))
        if labels is None:
            return log_probabilities
        return log_probabilities, self.loss(log_probabilities, labels)


class Histogram:
    """A histogram of the gradients of a layer, over all batches; zeros are counted separately."""

    def __init__(self):
        self.counts = torch.zeros(len(EDGES) - 1, dtype=torch.int64)
        self.num_zeros = 0
        self.num_elements = 0

    def add(self, gradient: torch.Tensor) -> None:
        """Count the values of a gradient."""
        sizes = gradient.abs().flatten()
        exponents = sizes[sizes != 0].frexp().exponent - 1
        self._count(exponents, torch.ones_like(exponents, dtype=torch.int64))
        self.num_zeros += int((sizes == 0).sum())
        self.num_elements += len(sizes)

    def add_statistics(self, found: poptorch.Statistics) -> None:
        """Add what the program has counted."""
        counts = found.histogram.negative + found.histogram.positive
        counts[0] -= found.zeros  # the first bin has subnormal numbers, too
        self._count(torch.arange(255) - 127, counts[:255])  # exponents of float32
        self.num_zeros += found.zeros
        self.num_elements += found.count

    def percent(self, number):
        return 100 * number / self.num_elements

    def _count(self, exponents: torch.Tensor, counts: torch.Tensor) -> None:
        bars = (exponents - EDGES[0]).clamp(0, len(self.counts) - 1)
        self.counts.index_add_(0, bars, counts)


def train_one_epoch(executor, loader, observe: bool) -> tuple[float, dict[str, Histogram]]:
    """Return the sum of the losses of all batches, and a histogram for each layer."""
    histograms = {layer: Histogram() for layer in LAYERS}
    total_loss = 0.0
    progress = tqdm(loader, desc="batches", leave=False)
    for images, labels in progress:
        _, loss = executor(images, labels)
        total_loss += loss.item()
        progress.set_postfix(loss=f"{loss.item():.3f}")
        if observe:
            continue
        for layer, histogram in histograms.items():
            for kind in KINDS:
                histogram.add(executor.getAnchoredTensor(f"Gradient___{layer}.{kind}"))
    if observe:
        for record in executor.observations():
            layer = record.name.removeprefix("Gradient___").partition(".")[0]
            histograms[layer].add_statistics(record.statistics)
    return total_loss, histograms


def print_names(names: list[str]) -> None:
    """Print the names of all tensors as a tree of modules and their tensors."""
    tree: dict[str, dict[str, list[str]]] = {}
    for name in names:
        prefix, _, path = name.rpartition("___")
        module = re.split(r"[./:]", path)[0]
        kind = {"": "values", "Gradient": "gradients"}.get(prefix, "update")
        tree.setdefault(module, {}).setdefault(kind, []).append(name)
    print(f"Tensor names ({len(names)}):")
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns,
        subsequent_indent=" " * 15,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for module, kinds in tree.items():
        print(f"  {module}")
        for kind, own in kinds.items():
            print(wrapper.fill(f"    {kind:<10} {' '.join(own)}"))


def plot_histograms(histograms: dict[str, Histogram], path: Path) -> None:
    """Save a panel for each layer: the share of its gradients by log2 of their absolute value."""
    figure = Figure(figsize=(8, 7), layout="constrained")
    panels = figure.subplots(len(histograms), sharex=True)
    for axes, (layer, histogram) in zip(panels, histograms.items(), strict=True):
        shares = histogram.percent(histogram.counts)
        axes.stairs(shares.numpy(), EDGES.numpy(), fill=True, color="tab:blue")
        zeros = histogram.percent(histogram.num_zeros)
        axes.set_title(f"{layer}: {zeros:.1f} % are exactly zero", loc="left", fontsize="medium")
        axes.set_ylabel("% of gradients")
        axes.set_ylim(0, 1.15 * max(shares.max().item(), 1e-3))
        for limit in (FLOAT16_ZERO, FLOAT16_NORMAL, FLOAT16_MAX):
            axes.axvline(limit, color="tab:red", linestyle="--", linewidth=1)
    for limit, text in (
        (FLOAT16_ZERO, "float16:\nzero below"),
        (FLOAT16_NORMAL, "float16:\ninexact below"),
        (FLOAT16_MAX, "float16:\ninf above"),
    ):
        panels[0].annotate(
            text,
            (limit, 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(-3, 0),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize="x-small",
            color="tab:red",
        )
    panels[-1].set(xlabel="log2 of the absolute gradient", xlim=(-36, 18))
    figure.suptitle("Gradients of weights and biases, all batches of one epoch")
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0, help="for weights and shuffling")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("GradientHistogram.png"),
        metavar="PNG",
        help="file of the picture (default: %(default)s)",
    )
    parser.add_argument(
        "--observe",
        action="store_true",
        help="let the program count the gradients, instead of copying them",
    )
    add_data_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    dataset = open_mnist(arguments.data_root, arguments.download)

    # What comes back belongs to the options, so set it before the model is wrapped.
    options = poptorch.Options()
    if arguments.observe:
        options.observe(GRADIENTS, poptorch.Histogram(), poptorch.Counts(), every=1)
    else:
        for name in GRADIENTS:
            options.anchorTensor(name, name)
    loader = poptorch.DataLoader(options, dataset, batch_size=arguments.batch_size, shuffle=True)

    model = Classifier()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=arguments.learning_rate)
    executor = poptorch.trainingModel(model, options=options, optimizer=optimizer)
    executor.compile(
        torch.zeros(arguments.batch_size, 1, 28, 28),
        torch.zeros(arguments.batch_size, dtype=torch.long),
    )
    print_names(executor.getTensorNames())

    total_loss, histograms = train_one_epoch(executor, loader, arguments.observe)
    print(f"Loss: {total_loss:.4f} over {len(loader)} batches")
    print(f"Mean loss of a batch: {total_loss / len(loader):.4f}")

    plot_histograms(histograms, arguments.output)
    print(f"Saved histogram to {arguments.output}")


if __name__ == "__main__":
    main()
