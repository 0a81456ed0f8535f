"""BERT for pre-training, in plain PyTorch, with its parameters on the device ``meta``."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import popsim_torch as poptorch

SEQUENCE, VOCABULARY = 128, 30522


class Layer(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm1 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        batch, length, hidden = x.shape
        width = hidden // self.heads
        query, key, value = (
            project(x).view(batch, length, self.heads, width).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(width)
        mixed = self.dropout(torch.softmax(scores, -1)) @ value
        mixed = mixed.transpose(1, 2).reshape(batch, length, hidden)
        x = self.norm1(x + self.dropout(self.out(mixed)))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    def __init__(self, layers, hidden=1024, heads=16, stages=1):
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, hidden)
        self.position = nn.Embedding(SEQUENCE, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.dense = nn.Linear(hidden, hidden)
        self.head_norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY)
        self.register_buffer("places", torch.arange(SEQUENCE))
        if stages > 1:
            for stage in range(stages):
                first = stage * layers // stages
                self.layers[first] = poptorch.BeginBlock(self.layers[first], ipu_id=stage)

    def forward(self, words, labels):
        x = self.norm(self.word(words) + self.position(self.places))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.head_norm(F.gelu(self.dense(x))))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return poptorch.identity_loss(loss, "none")


def bert_estimate(layers, *, sequences=8, options=None, **sizes):
    """Return the estimate of training with Adam."""
    with torch.device("meta"):
        model = Bert(layers, **sizes)
        words = torch.empty(sequences, SEQUENCE, dtype=torch.int64)
        labels = torch.empty(sequences, SEQUENCE, dtype=torch.int64)
    optimizer = torch.optim.Adam(model.parameters())
    return poptorch.estimate(model, (words, labels), options=options, optimizer=optimizer)
