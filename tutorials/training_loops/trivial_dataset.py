"""Run the smallest loop: constants stream in, two results stream out, a counter is carried."""

import argparse
import sys
from pathlib import Path

import torch

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import count


class Constants:
    """An endless dataset: each element is a pair of the same vector of ones."""

    def __init__(self, length: int):
        self.vector = torch.ones(length)

    def __iter__(self):
        while True:
            yield self.vector, self.vector


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=count, default=10)
    parser.add_argument("--length", type=count, default=800, help="length of the vector")
    arguments = parser.parse_args()

    infeed = poptorch.InfeedQueue(Constants(arguments.length))
    outfeed = poptorch.OutfeedQueue()

    def body(counter, x1, x2):
        outfeed.enqueue({"d1": x1 + x2, "d2": x1 - x2})
        return counter + 1

    @poptorch.function
    def loop():
        return poptorch.repeat(arguments.iterations, body, inputs=torch.tensor(0), infeed=infeed)

    counter = loop()
    result = outfeed.dequeue()
    print("counter:", counter.item())
    for name, values in result.items():
        print(f"{name}: shape {tuple(values.shape)}, all {values.unique().tolist()}")

    # This loop needs only its last value: the value is carried, and needs no queue.
    def sum_up(total, x1, x2):
        return total + x1.sum() + x2.sum()

    @poptorch.function
    def total():
        return poptorch.repeat(
            arguments.iterations, sum_up, inputs=torch.tensor(0.0), infeed=infeed
        )

    print("sum of all that came in:", total().item())


if __name__ == "__main__":
    main()
