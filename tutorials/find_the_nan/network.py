"""The network of this tutorial."""

import torch
from faults import Setup
from torch import nn


class Classifier(nn.Module):
    """Two linear layers from the pixels of a digit to its class; forward returns the loss.

    Args:
        setup: How images are prepared, and the loss.
        seed: The weights are the same for the same seed.
    """

    def __init__(self, setup: Setup, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.prepare = setup.prepare()
        self.fc1 = nn.Linear(784, 100, bias=False)
        self.fc2 = nn.Linear(100, 10)
        self.loss = setup.loss()

    def forward(self, images, labels):
        hidden = torch.tanh(self.fc1(self.prepare(images)))
        return self.loss(hidden, self.fc2(hidden), labels)
