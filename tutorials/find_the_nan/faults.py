"""Six faults that make a loss NaN, and how each is mended.

A case changes one part of a healthy training: how images are prepared, which loss there is, the
digits, or the learning rate.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import popsim_torch as poptorch

BAD_EXAMPLE = 300  # its pixels are the fault of some cases


class Plain(nn.Module):
    """Images as they are."""

    def forward(self, images):
        return images


class Loss(nn.Module):
    """Cross entropy of logits; hidden values are not used."""

    def forward(self, hidden, logits, labels):
        return nn.functional.cross_entropy(logits, labels)


@dataclass(frozen=True)
class Setup:
    """What a training consists of, besides its network."""

    prepare: type[nn.Module] = Plain
    loss: type[nn.Module] = Loss
    spoil: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone
    learning_rate: float = 0.1


# log-of-zero: softmax rounds a small probability to zero, and the logarithm of zero is -inf.
class LogOfSoftmax(nn.Module):
    def forward(self, hidden, logits, labels):
        probabilities = torch.softmax(100 * logits, dim=1)
        return nn.functional.nll_loss(torch.log(probabilities), labels)


class LogSoftmax(nn.Module):
    def forward(self, hidden, logits, labels):
        return nn.functional.nll_loss(torch.log_softmax(100 * logits, dim=1), labels)


# half-overflow: the sum of the squares of 256 grey levels is too large for float16.
class HalfEnergy(nn.Module):
    """Makes images darker that have less ink than the one of the batch with most."""

    def forward(self, images):
        grey = (255 * images).half()
        energy = grey.square().sum(1, keepdim=True)
        return images * (energy / energy.max()).sqrt()


class FloatEnergy(nn.Module):
    def forward(self, images):
        grey = (255 * images).half()
        energy = grey.float().square().sum(1, keepdim=True)
        return images * (energy / energy.max()).sqrt()


# bad-data: one pixel of one image is NaN.
def with_a_nan(images: torch.Tensor) -> torch.Tensor:
    images = images.clone()
    images[BAD_EXAMPLE, 300] = torch.nan
    return images


def without_nans(images: torch.Tensor) -> torch.Tensor:
    return with_a_nan(images).nan_to_num(0.0)


# exploding: each update makes the error larger than it was.
class SquaredError(nn.Module):
    def forward(self, hidden, logits, labels):
        targets = nn.functional.one_hot(labels.long(), 10).float()
        return nn.functional.mse_loss(logits, targets)


# division: one image is empty, so the sum of its pixels is zero.
def with_an_empty_image(images: torch.Tensor) -> torch.Tensor:
    images = images.clone()
    images[BAD_EXAMPLE] = 0
    return images


class Ink(nn.Module):
    def forward(self, images):
        return 100 * images / images.sum(1, keepdim=True)


class SafeInk(nn.Module):
    def forward(self, images):
        return 100 * images / images.sum(1, keepdim=True).clamp(min=1)


# sqrt-gradient: the root of zero is zero, but its slope there is infinite.
class Lengths(nn.Module):
    """Cross entropy, and a small price for long vectors of hidden values."""

    def forward(self, hidden, logits, labels):
        lengths = hidden.square().sum(1).sqrt()
        error = nn.functional.cross_entropy(logits, labels)
        return poptorch.identity_loss(error + 0.01 * lengths.mean(), "none")


class SafeLengths(nn.Module):
    def forward(self, hidden, logits, labels):
        lengths = (hidden.square().sum(1) + 1e-6).sqrt()
        error = nn.functional.cross_entropy(logits, labels)
        return poptorch.identity_loss(error + 0.01 * lengths.mean(), "none")


CASES = {
    "log-of-zero": (
        Setup(loss=LogOfSoftmax, learning_rate=0.002),
        Setup(loss=LogSoftmax, learning_rate=0.002),
    ),
    "half-overflow": (Setup(prepare=HalfEnergy), Setup(prepare=FloatEnergy)),
    "bad-data": (Setup(spoil=with_a_nan), Setup(spoil=without_nans)),
    "exploding": (
        Setup(loss=SquaredError, learning_rate=5.0),
        Setup(loss=SquaredError, learning_rate=0.02),
    ),
    "division": (
        Setup(prepare=Ink, spoil=with_an_empty_image),
        Setup(prepare=SafeInk, spoil=with_an_empty_image),
    ),
    "sqrt-gradient": (
        Setup(loss=Lengths, spoil=with_an_empty_image),
        Setup(loss=SafeLengths, spoil=with_an_empty_image),
    ),
}
"""For each fault: the training that has it, and the one in which it is mended."""
