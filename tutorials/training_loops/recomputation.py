"""Keep fewer activations, and compute them again in the backward pass."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import count


class Deep(nn.Module):
    """Several blocks, one after the other. Each block can be a region that is recomputed."""

    def __init__(self, num_blocks: int, width: int, recompute: bool):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Tanh())
            for _ in range(num_blocks)
        )
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def train(recompute: bool, arguments: argparse.Namespace) -> tuple[torch.Tensor, int]:
    """Return the losses, and the maximum number of bytes of values that live at a time."""
    model = Deep(arguments.blocks, arguments.width, recompute)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(arguments.batch_size, arguments.width, generator=generator)
    infeed = poptorch.InfeedQueue([x], repeat=True)
    outfeed = poptorch.OutfeedQueue()

    def step(x):
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outfeed.enqueue(loss)

    @poptorch.function
    def loop():
        poptorch.repeat(arguments.steps, step, infeed=infeed)

    loop()
    (program,) = loop.programs
    return outfeed.dequeue(), program.compiled.executable.plan.peak_live_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=count, default=8)
    parser.add_argument("--width", type=count, default=64)
    parser.add_argument("--batch-size", type=count, default=512)
    parser.add_argument("--steps", type=count, default=20)
    arguments = parser.parse_args()
    kept, kept_bytes = train(False, arguments)
    rebuilt, rebuilt_bytes = train(True, arguments)
    print(f"activations kept:       {kept_bytes / 2**20:6.2f} MiB live at a time")
    print(f"activations recomputed: {rebuilt_bytes / 2**20:6.2f} MiB live at a time")
    print(f"loss: {kept[0].item():.4f} at first, {kept[-1].item():.4f} at last")
    print("the same bits in every step:", torch.equal(kept, rebuilt))


if __name__ == "__main__":
    main()
