"""The models that are measured, each with its data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

Tensors = tuple[torch.Tensor, ...]


class WithLoss(nn.Module):
    """A model that adds the cross-entropy loss to its logits, as PopTorch training models do.

    Args:
        body: Maps the inputs to logits, shape ``(batch, classes)``.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Tensors:
        """Return the logits and the loss."""
        logits = self.body(x)
        return logits, self.loss(logits, labels)


def make_mlp() -> nn.Module:
    """784-320-100-10, the network of ``tutorials/observing_tensors``."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 320),
        nn.ReLU(),
        nn.Linear(320, 100),
        nn.ReLU(),
        nn.Linear(100, 10),
    )


def make_cnn() -> nn.Module:
    """Two 3x3 convolutions, a pool and two linear layers, for 28x28 digits."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of ``channels`` channels, ``stride`` times smaller."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def make_resnet() -> nn.Module:
    """ResNet-20 of He et al. (2015), table 6: 16, 32 and 64 channels, three blocks each."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    ]
    in_channels = 16
    for channels, first_stride in ((16, 1), (32, 2), (64, 2)):
        for stride in (first_stride, 1, 1):
            layers.append(ResidualBlock(in_channels, channels, stride))
            in_channels = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class TransformerClassifier(nn.Module):
    """Four encoder layers and a linear layer over the mean of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        # There is no dropout, because each contender would draw other random numbers.
        layer = nn.TransformerEncoderLayer(
            256, nhead=4, dim_feedforward=1024, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a batch of sequences, shape ``(batch, 128, 256)``, to logits."""
        logits: torch.Tensor = self.head(self.encoder(x).mean(1))
        return logits


class LstmClassifier(nn.Module):
    """One LSTM layer and a linear layer over its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a batch of sequences, shape ``(batch, 32, 64)``, to logits."""
        steps, _ = self.lstm(x)
        logits: torch.Tensor = self.head(steps[:, -1])
        return logits


@dataclass(frozen=True)
class Case:
    """A model and the shape of its data.

    Attributes:
        name: The name in tables and on the command line.
        make_body: A function that makes the model without its loss.
        batch_size: Samples per step.
        sample_shape: Shape of one sample.
        dtype: Dtype of weights and samples.
    """

    name: str
    make_body: Callable[[], nn.Module]
    batch_size: int
    sample_shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def make_body_in_dtype(self) -> nn.Module:
        """Return the model without its loss, with the same weights each time."""
        torch.manual_seed(0)
        return self.make_body().to(self.dtype)

    def make_batches(self, num_batches: int) -> Tensors:
        """Return samples and labels of ``num_batches`` batches, one after the other."""
        generator = torch.Generator().manual_seed(1)
        size = num_batches * self.batch_size
        samples = torch.randn(size, *self.sample_shape, generator=generator)
        labels = torch.randint(0, 10, (size,), generator=generator)
        return samples.to(self.dtype), labels


CASES: Sequence[Case] = (
    Case("MLP 32", make_mlp, 32, (1, 28, 28)),
    Case("MLP 1000", make_mlp, 1000, (1, 28, 28)),
    Case("CNN 32", make_cnn, 32, (1, 28, 28)),
    Case("ResNet 32", make_resnet, 32, (3, 32, 32)),
    Case("transformer 8", TransformerClassifier, 8, (128, 256)),
    Case("LSTM 16", LstmClassifier, 16, (32, 64)),
    Case("MLP 32 float16", make_mlp, 32, (1, 28, 28), torch.float16),
    Case("MLP 1000 float16", make_mlp, 1000, (1, 28, 28), torch.float16),
    Case("transformer 8 float16", TransformerClassifier, 8, (128, 256), torch.float16),
)


def find_case(name: str) -> Case:
    """Return the case with a name."""
    return next(case for case in CASES if case.name == name)


def select(*names: str) -> list[Case]:
    """Return the cases with some names."""
    return [find_case(name) for name in names]
