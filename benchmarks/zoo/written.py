"""Models written here: those whose usual packages are not needed to try them."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from benchmarks.zoo.entry import Batch, Entry

# --- A denoising UNet -------------------------------------------------------------------------


def time_features(steps: torch.Tensor, size: int) -> torch.Tensor:
    """Return sines and cosines of the steps in ``size`` frequencies, shape ``(batch, size)``."""
    half = size // 2
    rates = torch.exp(-math.log(10000.0) * torch.arange(half, device=steps.device) / half)
    angles = steps[:, None].to(rates.dtype) * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class TimedBlock(nn.Module):
    """Two convolutions with group norm; the time is added in between."""

    def __init__(self, channels: int, out_channels: int, time_size: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv1 = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.time = nn.Linear(time_size, out_channels)
        self.norm2 = nn.GroupNorm(4, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        same = channels == out_channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Return a map of the same size."""
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        y = self.conv2(F.silu(self.norm2(y)))
        return y + self.shortcut(x)


class MapAttention(nn.Module):
    """Attention of every pixel to every other."""

    def __init__(self, channels: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(4, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a map of the same size."""
        batch, channels, height, width = x.shape
        parts = self.qkv(self.norm(x)).reshape(batch, 3, self.heads, -1, height * width)
        q, k, v = parts.transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2)
        return x + self.out(y.reshape(batch, channels, height, width))


class UNet(nn.Module):
    """The network of a diffusion model: predicts the noise in an image, given its step."""

    def __init__(self, channels: int = 16, multipliers: tuple[int, ...] = (1, 2, 2)) -> None:
        super().__init__()
        time_size = 4 * channels
        self.channels = channels
        self.time = nn.Sequential(
            nn.Linear(channels, time_size), nn.SiLU(), nn.Linear(time_size, time_size)
        )
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        widths, now = [channels], channels
        for level, multiplier in enumerate(multipliers):
            self.down.append(TimedBlock(now, channels * multiplier, time_size))
            now = channels * multiplier
            widths.append(now)
            last = level == len(multipliers) - 1
            self.shrink.append(
                nn.Identity() if last else nn.Conv2d(now, now, 3, stride=2, padding=1)
            )
        self.middle1 = TimedBlock(now, now, time_size)
        self.attention = MapAttention(now)
        self.middle2 = TimedBlock(now, now, time_size)
        self.up = nn.ModuleList()
        for multiplier in reversed(multipliers):
            self.up.append(TimedBlock(now + widths.pop(), channels * multiplier, time_size))
            now = channels * multiplier
        self.last = nn.Sequential(nn.GroupNorm(4, now), nn.SiLU(), nn.Conv2d(now, 3, 3, padding=1))

    def predict(self, noisy: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return the noise, shape as ``noisy``."""
        time = self.time(time_features(steps, self.channels).to(noisy.dtype))
        x, kept = self.first(noisy), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, time)
            kept.append(x)
            x = shrink(x)
        x = self.middle2(self.attention(self.middle1(x, time)), time)
        for block in self.up:
            other = kept.pop()
            if x.shape[-1] != other.shape[-1]:
                x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, other], dim=1), time)
        return self.last(x)

    def forward(
        self, images: torch.Tensor, noise: torch.Tensor, steps: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the predicted noise and the loss of DDPM."""
        betas = torch.linspace(1e-4, 0.02, 1000, dtype=images.dtype)
        share = (1 - betas).cumprod(0)[steps][:, None, None, None]
        predicted = self.predict(share.sqrt() * images + (1 - share).sqrt() * noise, steps)
        return predicted, F.mse_loss(predicted, noise)


def _noisy_images(generator: torch.Generator) -> Batch:
    return {
        "images": torch.randn(2, 3, 32, 32, generator=generator),
        "noise": torch.randn(2, 3, 32, 32, generator=generator),
        "steps": torch.randint(1000, (2,), generator=generator),
    }


# --- Graph networks ---------------------------------------------------------------------------


class GraphLayer(nn.Module):
    """Messages along edges, added up where they arrive, with the degree as a norm."""

    def __init__(self, size: int, out_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, out_size)
        self.own = nn.Linear(size, out_size)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Map ``(nodes, size)`` and ``(2, edges)`` to ``(nodes, out_size)``."""
        source, target = edges[0], edges[1]
        degree = x.new_zeros(x.shape[0]).index_add(0, target, x.new_ones(target.shape[0]))
        sums = torch.zeros_like(x).scatter_add(0, target[:, None].expand(-1, x.shape[1]), x[source])
        return self.linear(sums / degree.clamp(min=1)[:, None]) + self.own(x)


class GraphAttentionLayer(nn.Module):
    """Attention over the edges that arrive at a node: a softmax by scatter."""

    def __init__(self, size: int, out_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, out_size, bias=False)
        self.source = nn.Parameter(torch.randn(out_size) / out_size**0.5)
        self.target = nn.Parameter(torch.randn(out_size) / out_size**0.5)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Map ``(nodes, size)`` and ``(2, edges)`` to ``(nodes, out_size)``."""
        source, target = edges[0], edges[1]
        y = self.linear(x)
        scores = F.leaky_relu((y @ self.source)[source] + (y @ self.target)[target], 0.2)
        highest = scores.new_full((x.shape[0],), -1e9).scatter_reduce(
            0, target, scores, "amax", include_self=True
        )
        weights = (scores - highest.detach()[target]).exp()
        total = weights.new_zeros(x.shape[0]).scatter_add(0, target, weights)
        weights = weights / (total[target] + 1e-9)
        return torch.zeros_like(y).index_add(0, target, weights[:, None] * y[source])


class GraphNetwork(nn.Module):
    """Two graph layers, the mean of each graph, and its class."""

    def __init__(self, layer: type[nn.Module], graphs: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(16, 32), layer(32, 32)])
        self.head = nn.Linear(32, 5)
        self.graphs = graphs

    def forward(
        self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of the graphs, and the loss."""
        for layer in self.layers:
            x = F.relu(layer(x, edges))
        sums = x.new_zeros(self.graphs, x.shape[1]).index_add_(0, graph, x)
        sizes = torch.bincount(graph, minlength=self.graphs).clamp(min=1)
        logits = self.head(sums / sizes[:, None])
        return logits, F.cross_entropy(logits, labels)


def _graphs(generator: torch.Generator) -> Batch:
    nodes, edges, graphs = 64, 256, 4
    return {
        "x": torch.randn(nodes, 16, generator=generator),
        "edges": torch.randint(nodes, (2, edges), generator=generator),
        "graph": torch.arange(graphs).repeat_interleave(nodes // graphs),
        "labels": torch.randint(5, (graphs,), generator=generator),
    }


# --- Experts ----------------------------------------------------------------------------------


class Experts(nn.Module):
    """A switch layer: each token goes to its expert, as far as that has room."""

    def __init__(self, size: int, hidden: int, experts: int, room: int) -> None:
        super().__init__()
        self.router = nn.Linear(size, experts, bias=False)
        self.first = nn.Parameter(torch.randn(experts, size, hidden) / size**0.5)
        self.second = nn.Parameter(torch.randn(experts, hidden, size) / hidden**0.5)
        self.experts, self.room = experts, room

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens, shape ``(tokens, size)``, and the loss that balances the experts."""
        chances = self.router(x).softmax(-1)
        chance, choice = chances.topk(2, dim=-1)
        chance = chance / chance.sum(-1, keepdim=True)
        picked = F.one_hot(choice.flatten(), self.experts)
        place = (picked.cumsum(0) - 1).gather(1, choice.flatten()[:, None]).squeeze(1)
        fits = place < self.room
        slot = torch.where(fits, choice.flatten() * self.room + place, self.experts * self.room)
        tokens = x.repeat_interleave(2, dim=0)
        slots = x.new_zeros(self.experts * self.room + 1, x.shape[1]).index_copy(0, slot, tokens)
        inside = slots[:-1].view(self.experts, self.room, -1)
        inside = torch.bmm(F.silu(torch.bmm(inside, self.first)), self.second)
        out = torch.cat([inside.flatten(0, 1), x.new_zeros(1, x.shape[1])])[slot]
        out = (out * chance.flatten()[:, None]).view(x.shape[0], 2, -1).sum(1)
        load = picked.to(x.dtype).mean(0)
        return out, self.experts * (load * chances.mean(0)).sum()


class ExpertLanguageModel(nn.Module):
    """A decoder in the manner of Mixtral whose experts have room for a fixed number of tokens."""

    def __init__(self, words: int = 64, size: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(words, size)
        self.places = nn.Embedding(16, size)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(size, 4, batch_first=True) for _ in range(layers)
        )
        self.experts = nn.ModuleList(Experts(size, 64, 4, 24) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2 * layers))
        self.head = nn.Linear(size, words)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits, and the loss of the next token."""
        length = tokens.shape[1]
        x = self.words(tokens) + self.places.weight[:length]
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
        balance = 0.0
        for number, (attention, experts) in enumerate(
            zip(self.attention, self.experts, strict=True)
        ):
            y = self.norms[2 * number](x)
            x = x + attention(y, y, y, attn_mask=mask, need_weights=False)[0]
            y, extra = experts(self.norms[2 * number + 1](x).flatten(0, 1))
            x, balance = x + y.view_as(x), balance + extra
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return logits, poptorch.identity_loss(loss + 0.01 * balance, reduction="sum")


def _sentences(generator: torch.Generator) -> Batch:
    return {"tokens": torch.randint(64, (2, 16), generator=generator)}


ENTRIES = (
    Entry("diffusion UNet", "written here", UNet, _noisy_images, "2 of 32x32"),
    Entry(
        "graph convolution",
        "written here",
        lambda: GraphNetwork(GraphLayer),
        _graphs,
        "4 graphs, 64 nodes, 256 edges",
    ),
    Entry(
        "graph attention",
        "written here",
        lambda: GraphNetwork(GraphAttentionLayer),
        _graphs,
        "4 graphs, 64 nodes, 256 edges",
    ),
    Entry(
        "experts with fixed room",
        "written here",
        ExpertLanguageModel,
        _sentences,
        "2 of 16 tokens",
    ),
)
