"""Train a small network for one epoch and plot how large its gradients are.

The gradients of all weights and biases are anchored by their names, so they
come back to the host without any change to the network.
"""

import argparse
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn
from tqdm import tqdm

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.data import add_data_arguments, open_mnist

GRADIENTS = [f"Gradient___fc{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")]


class Classifier(nn.Module):
    """Three linear layers from the pixels of a digit to its class."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 320)
        self.fc2 = nn.Linear(320, 100)
        self.fc3 = nn.Linear(100, 10)
        self.relu = nn.ReLU()
        # One distribution per image: the classes are dimension 1, the batch is 0.
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


def train_one_epoch(executor, loader) -> float:
    """Return the sum of the losses of all batches."""
    total_loss = 0.0
    for images, labels in tqdm(loader, desc="batches", leave=False):
        _, loss = executor(images, labels)
        total_loss += loss.item()
    return total_loss


def plot_histogram(gradients: torch.Tensor, path: Path) -> None:
    """Save a histogram of log2 of the absolute gradients.

    A gradient of zero has no logarithm. Zeros get a bar of their own, to the
    left of all others, so that vanished gradients stay visible.
    """
    magnitude = gradients.abs()
    is_zero = magnitude == 0
    exponents = torch.log2(magnitude[~is_zero])
    num_zeros = int(is_zero.sum())

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    zero_at = -1.0
    if len(exponents) > 0:
        axes.hist(exponents.numpy(), bins=50, label="other values")
        zero_at = exponents.min().item() - 2
    axes.bar(zero_at, num_zeros, width=1.0, color="tab:red", label=f"exactly zero: {num_zeros}")
    axes.set(
        title="Gradients of all weights and biases, last batch",
        xlabel="log2 of the absolute gradient",
        ylabel="number of gradient elements",
    )
    axes.legend()
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
        help="where the picture goes (default: %(default)s)",
    )
    add_data_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    dataset = open_mnist(arguments.data_root, arguments.download)

    # Anchors belong to the options, so they come before the model is wrapped.
    options = poptorch.Options()
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
    print("Tensor names:", *executor.getTensorNames(), sep="\n  ")

    total_loss = train_one_epoch(executor, loader)
    print(f"Loss: {total_loss:.4f} over {len(loader)} batches")

    gradients = torch.cat([executor.getAnchoredTensor(name).flatten() for name in GRADIENTS])
    plot_histogram(gradients, arguments.output)
    print(f"Saved histogram to {arguments.output}")


if __name__ == "__main__":
    main()
