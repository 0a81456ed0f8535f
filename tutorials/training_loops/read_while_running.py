"""Watch the loss fall while the device runs: a thread reads the queue."""

import argparse
import sys
import threading
from pathlib import Path

import torch
from task import Batches, make_model

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=count, default=100)
    arguments = parser.parse_args()

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    infeed = poptorch.InfeedQueue(Batches())
    outfeed = poptorch.OutfeedQueue()

    def step(x, y):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outfeed.enqueue(loss)

    @poptorch.function
    def train():
        poptorch.repeat(arguments.steps, step, infeed=infeed)

    def read():
        # Waits for the run to begin, and ends after its last element.
        for i, loss in enumerate(outfeed.follow()):
            print(f"Step {i} loss = ", loss.item())

    reader = threading.Thread(target=read)
    reader.start()
    train()
    reader.join()


if __name__ == "__main__":
    main()
