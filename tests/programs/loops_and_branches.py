"""A model that refines its answer in a loop on the device, and treats some inputs otherwise."""

import poptorch
import torch
from torch import nn


class Refines(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.step = nn.Linear(4, 4)
        self.register_buffer("iterations", torch.zeros(1))
        self.loss = nn.MSELoss()

    def forward(self, x, target=None):
        start = self.first(x)

        def refine(y, norm):
            self.iterations += 1
            y = y + 0.5 * torch.tanh(self.step(y) + start)
            return y, norm + y.abs().mean()

        def keep(y, norm):
            return y, norm

        y, norm = poptorch.for_loop(4, refine, [start, torch.zeros(())])
        y, norm = poptorch.cond(norm > 100, keep, [y, norm], lambda y, n: (y * 2, n), [y, norm])
        if target is None:
            return y
        return y, self.loss(y, target)


def main():
    torch.manual_seed(0)
    model = Refines()
    options = poptorch.Options()
    options.randomSeed(1)
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, options, optimizer)
    x = torch.randn(16, 4)
    target = torch.tanh(x.flip(1))
    losses = [training(x, target)[1].item() for _ in range(100)]
    training.copyWeightsToHost()
    print(f"losses {losses[0]:.4f} {losses[-1]:.4f}")
    print(f"iterations {int(model.iterations)}")

    inference = poptorch.inferenceModel(model.eval())
    small, large = inference(x[:2]), inference(x[:2] * 1000)
    print(f"shapes {tuple(small.shape)} {tuple(large.shape)}")
    print(f"largest {large.abs().max() > small.abs().max()}")


if __name__ == "__main__":
    main()
