"""Measure how fast a dataset can be read without a device: no training can be faster."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import count, positive


class Pictures(Dataset):
    """Random pictures, drawn either once or each time that one is read."""

    def __init__(self, count: int, prepared: bool):
        self.count = count
        self.prepared = [self.draw(i) for i in range(count)] if prepared else None

    @staticmethod
    def draw(index: int) -> torch.Tensor:
        rng = np.random.default_rng(index)
        picture = rng.normal(size=(3, 32, 32)).astype(np.float32)
        return torch.from_numpy(np.clip(picture, -2, 2))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.draw(index) if self.prepared is None else self.prepared[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    flag = parser.add_argument
    flag("--pictures", type=count, default=320, help="in an epoch (default: %(default)s)")
    flag("--batch-size", type=count, default=8, help="(default: %(default)s)")
    flag("--epochs", type=count, default=3, help="(default: %(default)s)")
    flag(
        "--milliseconds-per-step",
        type=positive,
        default=0.2,
        help="time of a training step whose batch is ready (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if arguments.pictures % arguments.batch_size:
        parser.error("--pictures must be a multiple of --batch-size.")
    num_batches = arguments.pictures // arguments.batch_size
    for prepared in (False, True):
        print("Prepared once:" if prepared else "Drawn when asked for:")
        dataset = Pictures(arguments.pictures, prepared)
        loader = DataLoader(dataset, batch_size=arguments.batch_size)
        # The loader ends after one epoch; the queue then starts it again.
        with poptorch.InfeedQueue(loader, repeat=True) as queue:
            (text,) = poptorch.infeed_benchmark(
                queue,
                arguments.epochs,
                num_batches,
                seconds_per_step=1e-3 * arguments.milliseconds_per_step,
            )
        best = max(json.loads(text)["epochs"], key=lambda epoch: epoch["elements_per_second"])
        rate = best["elements_per_second"] * arguments.batch_size
        print(f"At most {rate:.0f} pictures a second, {best['bandwidth']:.3f} GB/s\n")


if __name__ == "__main__":
    main()
