"""Train one network in two ways, record both runs, and find where they first differ."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import nn

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import count
from common.batches import Batches, load_mnist
from common.data import add_data_arguments

Batch = tuple[torch.Tensor, torch.Tensor]

LEARNING_RATE = 0.1
BATCH_SIZE = 32
PAIRS = {
    "precision": ("float32", "float16"),
    "change": ("before", "after"),
    "eager": ("program", "pytorch"),
}
# Numbers within this share are taken as equal: the accuracy of float16, and sums in another order.
TOLERANCES = {"precision": 2**-8, "change": 0.0, "eager": 1e-4}


class Classifier(nn.Module):
    """Two hidden layers with a normalisation in between, from a digit's pixels to its class."""

    def __init__(self, eps: float = 1e-5):
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 64)
        self.norm = nn.LayerNorm(64, eps=eps)
        self.fc2 = nn.Linear(64, 32)
        self.fc3 = nn.Linear(32, 10)
        self.relu = nn.ReLU()
        self.loss = nn.CrossEntropyLoss()

    def forward(self, images, labels):
        x = self.norm(self.fc1(images.flatten(1)))
        x = self.relu(self.fc2(self.relu(x)))
        return self.loss(self.fc3(x), labels)


def make_model(name: str, seed: int) -> Classifier:
    """Return the network of a run; networks of the same seed begin with the same weights."""
    torch.manual_seed(seed)
    # The change of one line: a larger constant under the root of the normalisation.
    model = Classifier(eps=1e-4 if name == "after" else 1e-5)
    return model.half() if name == "float16" else model


def record(name: str, path: Path, batches: Sequence[Batch], seed: int) -> None:
    """Train, and record statistics and fingerprints of all tensors in all steps."""
    model = make_model(name, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    meta = {"run": name, "seed": seed}
    if name == "pytorch":
        with poptorch.eager_record(model, path, optimizer=optimizer, meta=meta):
            for images, labels in batches:
                optimizer.zero_grad()
                model(images, labels).backward()
                optimizer.step()
        return
    executor = poptorch.trainingModel(model, optimizer=optimizer)
    executor.record(path, meta=meta)
    for images, labels in batches:
        executor(images.to(model.fc1.weight.dtype), labels)
    executor.close_sinks()
    executor.destroy()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pair", choices=PAIRS, help="the two runs to compare")
    parser.add_argument("--steps", type=count, default=60, help="training steps of 32 digits")
    parser.add_argument("--seed", type=int, default=0, help="for weights and shuffling")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("."),
        metavar="DIR",
        help="for the two runs, and the page that shows both (default: here)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("growth.png"),
        metavar="PNG",
        help="file of the picture of the growing difference (default: %(default)s)",
    )
    add_data_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    images, labels = load_mnist(arguments)
    endless = Batches(images, labels.long(), BATCH_SIZE, arguments.seed)
    batches = list(islice(endless, arguments.steps))  # the same ones for both runs
    names = PAIRS[arguments.pair]
    runs = []
    for name in names:
        path = arguments.folder / f"{name}.popsim"
        if (path / "index.sqlite").is_file():  # of the last time
            shutil.rmtree(path)
        record(name, path, batches, arguments.seed)
        runs.append(poptorch.Run(path))

    difference = poptorch.compare(*runs, tolerance=TOLERANCES[arguments.pair])
    print(difference)
    if difference.equal:  # within the tolerance; the picture shows what the bits do
        difference = poptorch.compare(*runs)
    difference.plot(arguments.output)
    one, other = (run.records() for run in runs)
    page = arguments.folder / f"{arguments.pair}.html"
    poptorch.write_page(page, one, title=" and ".join(names), other=other, labels=names)


if __name__ == "__main__":
    main()
