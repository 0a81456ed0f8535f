"""A language model of plain PyTorch, to plan with."""

import torch
from torch import nn

__all__ = ["LanguageModel"]


class Block(nn.Module):
    """Attention and two linear layers, each with a norm and a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.before_layers = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.before_attention(x)).split(width, -1)
        )
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        mixed = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(x.shape)
        x = x + self.mix(mixed)
        return x + self.down(nn.functional.gelu(self.up(self.before_layers(x))))


class LanguageModel(nn.Module):
    """Predicts the next token; forward returns the loss.

    Args:
        layers: Number of blocks.
        width: Numbers for each token.
        heads: Attention heads (count).
        vocabulary: Tokens (count).
        length: The longest sequence.
    """

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
