"""A small network for digits, and three ways to spoil its training."""

import torch
from torch import nn

FAULTS = ("none", "explode", "dead", "vanish")
LEARNING_RATES = {"none": 0.02, "explode": 5.0, "dead": 0.02, "vanish": 0.02}
NUM_SIGMOIDS = 12


class Network(nn.Sequential):
    """Layers one after another, and the loss of their result."""

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(super().forward(images), labels)


def make_network(fault: str = "none") -> Network:
    """Return a network; with the faults ``dead`` and ``vanish`` it cannot learn as it should."""
    if fault == "vanish":
        return _many_sigmoids()
    network = _convolutions()
    if fault == "dead":
        # A ReLU behind such a bias never gives anything but 0: in every second channel.
        nn.init.constant_(network.conv2.bias[::2], -100.0)
    return network


def _convolutions() -> Network:
    network = Network()
    for name, layer in {
        "conv1": nn.Conv2d(1, 8, 3, padding=1),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(8, 16, 3, padding=1),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
        "flat": nn.Flatten(),
        "fc1": nn.Linear(16 * 7 * 7, 64),
        "relu3": nn.ReLU(),
        "fc2": nn.Linear(64, 10),
    }.items():
        if name.startswith(("conv", "fc1")):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
        network.add_module(name, layer)
    return network


def _many_sigmoids() -> Network:
    network = Network()
    network.add_module("flat", nn.Flatten())
    width = 28 * 28
    for number in range(1, NUM_SIGMOIDS + 1):
        network.add_module(f"fc{number}", nn.Linear(width, 32))
        network.add_module(f"sigmoid{number}", nn.Sigmoid())
        width = 32
    network.add_module("out", nn.Linear(width, 10))
    return network
