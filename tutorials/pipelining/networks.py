"""The two networks of this tutorial, as lists of layers that can be divided into stages."""

import torch
from torch import nn

ROW, NUM_ROWS, NUM_DIGITS = 28, 28, 10


class Block(nn.Module):
    """A block of a transformer: attention, then two linear layers."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.mix(self.norm(x)).unflatten(2, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(x)


class Embedding(nn.Module):
    """The rows of a digit as tokens, each with its position."""

    def __init__(self, width: int):
        super().__init__()
        self.rows = nn.Linear(ROW, width)
        self.positions = nn.Parameter(torch.zeros(NUM_ROWS, width))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.rows(images) + self.positions


class Head(nn.Module):
    """The class of a digit, from the mean of its tokens."""

    def __init__(self, width: int):
        super().__init__()
        self.classes = nn.Linear(width, NUM_DIGITS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classes(x.mean(1))


def mlp(width: int = 512) -> list[nn.Module]:
    """Return four layers from the pixels of a digit to its class."""
    hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2)]
    first = nn.Sequential(nn.Flatten(), nn.Linear(NUM_ROWS * ROW, width), nn.ReLU())
    return [first, *hidden, nn.Linear(width, NUM_DIGITS)]


def transformer(width: int = 64, num_blocks: int = 4, num_heads: int = 4) -> list[nn.Module]:
    """Return an embedding, some blocks and a head; a row of a digit is a token."""
    blocks = [Block(width, num_heads) for _ in range(num_blocks)]
    return [Embedding(width), *blocks, Head(width)]


NETWORKS = {"mlp": mlp, "transformer": transformer}


class Classifier(nn.Module):
    """Layers one after the other; forward returns the loss.

    Args:
        layers: The layers.
    """

    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(images), labels)


def make(name: str, seed: int = 0) -> Classifier:
    """Return a network with the same weights each time."""
    torch.manual_seed(seed)
    return Classifier(NETWORKS[name]())
