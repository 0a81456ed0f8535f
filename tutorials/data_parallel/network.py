"""The network of this tutorial."""

import torch
from torch import nn


class Classifier(nn.Module):
    """Three linear layers with dropout; forward returns the loss.

    Args:
        seed: The weights are the same for the same seed.
    """

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 320),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(320, 100),
            nn.ReLU(),
            nn.Linear(100, 10),
        )

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(images), labels)
