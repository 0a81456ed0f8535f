"""BERT pre-training as published for IPU machines: stages, batches, dtypes; without weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from popsim_torch import ops
from popsim_torch.estimates import estimate
from popsim_torch.machine import Estimate
from popsim_torch.optim import LAMB, AdamW
from popsim_torch.options import Options, TensorLocationSettings
from popsim_torch.stages import Block, PipelinedExecution, ShardedExecution, Stage

__all__ = ["BASE", "LARGE", "BertSizes", "estimate_bert", "estimate_on_one_ipu"]

_MASKED = 20
"""Masked tokens of a sequence."""


@dataclass(frozen=True)
class BertSizes:
    """The sizes of a BERT model, and how it is trained on four IPUs.

    Attributes:
        hidden: Width.
        heads: Attention heads (count).
        layers: Encoder layers of each stage.
        micro_batch: Sequences.
        accumulation: Micro-batches of an update.
        proportions: Of the memory for temporaries, by IPU.
        sequence: Tokens of a sequence.
        vocabulary: Tokens (count).
    """

    hidden: int
    heads: int
    layers: tuple[int, ...]
    micro_batch: int
    accumulation: int
    proportions: tuple[float, ...]
    sequence: int = 128
    vocabulary: int = 30522


LARGE = BertSizes(1024, 16, (3, 7, 7, 7), 8, 1750, (0.15, 0.25, 0.25, 0.25))
BASE = BertSizes(768, 12, (0, 4, 4, 4), 32, 512, (0.25, 0.25, 0.25, 0.25))


class _Layer(nn.Module):
    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.heads = sizes.heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm1 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        width = hidden // self.heads
        q, k, v = (
            part.view(batch, length, self.heads, width).transpose(1, 2)
            for part in self.qkv(x).split(hidden, -1)
        )
        scores = q @ k.transpose(-1, -2) * width**-0.5 + mask
        shares = self.dropout(torch.softmax(scores, -1))
        mixed = (shares @ v).transpose(1, 2).reshape(batch, length, hidden)
        x = self.norm1(x + self.dropout(self.out(mixed)))
        wide = nn.functional.gelu(self.up(x), approximate="tanh")
        x = self.norm2(x + self.dropout(self.down(wide)))
        kept = ops.recomputationCheckpoint(x)
        assert isinstance(kept, torch.Tensor)
        return kept


class _Bert(nn.Module):
    """Embeddings and heads on the first IPU, which all weights of the vocabulary share."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.word = nn.Embedding(sizes.vocabulary, hidden)
        self.position = nn.Embedding(512, hidden)
        self.kind = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(0.1)
        self.stages = nn.ModuleList(
            nn.ModuleList(_Layer(sizes) for _ in range(count)) for count in sizes.layers
        )
        self.dense = nn.Linear(hidden, hidden)
        self.head_norm = nn.LayerNorm(hidden)
        self.bias = nn.Parameter(torch.zeros(sizes.vocabulary))
        self.pooler = nn.Linear(hidden, hidden)
        self.next = nn.Linear(hidden, 2)

    def forward(
        self,
        ids: torch.Tensor,
        kinds: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        labels: torch.Tensor,
        is_next: torch.Tensor,
    ) -> torch.Tensor:
        with Block("0"):
            x = self.word(ids) + self.position(positions) + self.kind(kinds)
            x = self.dropout(self.norm(x))
            blocked = (mask[:, None, None, :].to(x.dtype) - 1) * 10000
        for number, stage in enumerate(self.stages):
            assert isinstance(stage, nn.ModuleList)
            with Block(str(number)):
                for layer in stage:
                    x = layer(x, blocked)
        with Block("heads"):
            picked = nn.functional.gelu(self.dense(x[:, :_MASKED]), approximate="tanh")
            logits = nn.functional.linear(self.head_norm(picked), self.word.weight, self.bias)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            pooled = torch.tanh(self.pooler(x[:, 0]))
            next_loss = nn.functional.cross_entropy(self.next(pooled).float(), is_next)
            return ops.identity_loss(loss + next_loss, "none")


def _arguments(sizes: BertSizes, count: int) -> tuple[torch.Tensor, ...]:
    """Return the arguments of a call of ``count`` micro-batches, without values."""
    items, length = sizes.micro_batch * count, sizes.sequence
    tokens = torch.empty(items, length, dtype=torch.int32, device="meta")
    labels = torch.empty(items, _MASKED, dtype=torch.int32, device="meta")
    is_next = torch.empty(items, dtype=torch.int32, device="meta")
    return tokens, tokens, tokens, tokens, labels, is_next


def estimate_bert(sizes: BertSizes, *, replicas: int = 4, version: str = "bow") -> Estimate:
    """Return the estimate of pre-training in a pipeline of four IPUs, several times.

    Half precision with partial sums in half precision, LAMB whose state is off the chip and shared
    between replicas, one checkpoint for each layer.

    Args:
        sizes: The model and its batches.
        replicas: Copies of the pipeline.
        version: The generation of the IPUs.
    """
    with torch.device("meta"):
        model = _Bert(sizes).half()
    options = Options().replicationFactor(replicas).machine(version, out_of_memory="ignore")
    options.Training.gradientAccumulation(sizes.accumulation)
    options.Precision.setPartialsType(torch.half)
    shares = dict(enumerate(sizes.proportions))
    options.setAvailableMemoryProportion({f"IPU{ipu}": share for ipu, share in shares.items()})
    state = TensorLocationSettings().useOnChipStorage(False).useReplicatedTensorSharding(True)
    options.TensorLocations.setOptimizerLocation(state)
    last = len(sizes.layers)
    stages = [Stage(str(number)).ipu(number) for number in range(last)]
    options.setExecutionStrategy(PipelinedExecution(*stages, Stage("heads").ipu(0)))
    optimizer = LAMB(model.parameters(), accum_type=torch.float16)
    arguments = _arguments(sizes, sizes.accumulation * replicas)
    return estimate(model, arguments, options=options, optimizer=optimizer)


def estimate_on_one_ipu() -> Estimate:
    """Return the estimate of training BERT-Large on one IPU, with Adam's state in float32."""
    with torch.device("meta"):
        model = _Bert(LARGE).half()
    options = Options().machine("bow", out_of_memory="ignore")
    options.Training.gradientAccumulation(2)
    blocks = [*map(str, range(len(LARGE.layers))), "heads"]
    options.setExecutionStrategy(ShardedExecution(Stage(*blocks).ipu(0)))
    optimizer = AdamW(model.parameters())
    return estimate(model, _arguments(LARGE, 2), options=options, optimizer=optimizer)
