"""Small models of the usual kinds, each returning its output and its loss, and their inputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 5


def activation(smooth: bool, inplace: bool = False) -> nn.Module:
    """Return ReLU, or a function whose gradient does not jump when its argument is rounded."""
    return nn.SiLU(inplace) if smooth else nn.ReLU(inplace)


class Mlp(nn.Module):
    def __init__(self, smooth: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 16),
            activation(smooth),
            nn.Linear(16, 8),
            nn.GELU(),
            nn.Linear(8, CLASSES),
        )
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, labels):
        output = self.layers(x)
        return output, self.loss(output, labels)


class Regression(nn.Module):
    """A linear layer and its loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layer(x), y)


class Cnn(nn.Module):
    def __init__(self, smooth: bool = False) -> None:
        super().__init__()
        self.activation = activation(smooth)
        self.pool = nn.AvgPool2d(2) if smooth else nn.MaxPool2d(2)
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2, groups=2, bias=False)
        self.norm2 = nn.BatchNorm2d(8, momentum=0.3)
        self.fc = nn.Linear(8 * 3 * 3, CLASSES)

    def forward(self, x, labels):
        x = self.pool(self.activation(self.norm1(self.conv1(x))))
        x = torch.tanh(self.norm2(self.conv2(x)))
        output = F.log_softmax(self.fc(x.flatten(1)), dim=1)
        return output, F.nll_loss(output, labels)


class Residual(nn.Module):
    """Two convolutions around a skip connection; ``downsample`` makes the skip fit."""

    def __init__(self, channels: int, width: int, stride: int, smooth: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = activation(smooth, inplace=True)
        self.downsample = None
        if stride != 1 or channels != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x):
        skip = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += skip
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, smooth: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, 1, 1, bias=False),
            nn.BatchNorm2d(4),
            activation(smooth, inplace=True),
        )
        self.layer1 = Residual(4, 4, 1, smooth)
        self.layer2 = Residual(4, 8, 2, smooth)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, CLASSES)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, labels):
        x = self.layer2(self.layer1(self.stem(x)))
        output = self.fc(torch.flatten(self.pool(x), 1))
        return output, self.loss(output, labels)


class Transformer(nn.Module):
    def __init__(self, smooth: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, activation=activation(smooth), batch_first=True
        )
        self.position = nn.Parameter(0.1 * torch.randn(6, 8))
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x, labels):
        output = self.head(self.encoder(x + self.position)).transpose(1, 2)
        return output, F.cross_entropy(output, labels)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x, target):
        sequence, (hidden, _cell) = self.lstm(x)
        output = self.head(sequence[:, -1] + hidden[0])
        return output, F.mse_loss(output, target)


class Embedder(nn.Module):
    """Mean of the embeddings of the words that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6, padding_idx=0)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, words, labels):
        mask = (words != 0).unsqueeze(-1).to(self.words.weight.dtype)
        total = (self.words(words) * mask).sum(1)
        output = self.fc(total / mask.sum(1).clamp(min=1))
        return output, F.cross_entropy(output, labels)


def _labels(*shape: int) -> torch.Tensor:
    return torch.randint(0, CLASSES, shape)


def _words(batch: int) -> torch.Tensor:
    words = torch.randint(1, 11, (batch, 7))
    words[:, 4:] *= torch.randint(0, 2, (batch, 3))
    return words


@dataclass(frozen=True)
class Case:
    """A model and what it is fed with.

    Attributes:
        make: Builds the model; ``smooth=True`` leaves out functions that have kinks.
        inputs: Makes its arguments for a batch of that many samples.
    """

    make: Callable[..., nn.Module]
    inputs: Callable[[int], tuple[torch.Tensor, ...]]


CASES = {
    "mlp": Case(Mlp, lambda n: (torch.randn(n, 12), _labels(n))),
    "cnn": Case(Cnn, lambda n: (torch.randn(n, 3, 14, 14), _labels(n))),
    "resnet": Case(ResNet, lambda n: (torch.randn(n, 3, 6, 6), _labels(n))),
    "transformer": Case(Transformer, lambda n: (torch.randn(n, 6, 8), _labels(n, 6))),
    "lstm": Case(lambda smooth=False: Lstm(), lambda n: (torch.randn(n, 5, 4), torch.randn(n, 2))),
    "embedding": Case(lambda smooth=False: Embedder(), lambda n: (_words(n), _labels(n))),
}
