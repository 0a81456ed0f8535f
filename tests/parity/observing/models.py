"""A model to observe, and how it is trained."""

import threading

import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.statistics import (
    Channels,
    Counts,
    Fingerprint,
    Histogram,
    Moments,
    Sample,
    TopK,
)
from tests.options import make_options

D, GA, BATCH, CALLS = 4, 3, 2, 2
EVERYTHING = (
    *(Moments(), Counts(), Histogram(2), TopK(3), Sample(5), Fingerprint()),
    Channels(-1),
)
EXACT = (Counts(), Histogram(2), TopK(3), Sample(5), Fingerprint())
OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "combined": lambda m: poptorch.optim.SGD(
        m.parameters(), lr=0.05, momentum=0.9, use_combined_accum=True
    ),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "lamb": lambda m: poptorch.optim.LAMB(m.parameters(), lr=0.01),
}


class Model(nn.Module):
    """Layers with a table, running statistics, random numbers and products that updates ride on."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Embedding(10, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 8),
            nn.ReLU(),
            nn.Dropout(0.25),
            nn.Linear(8, 8),
            nn.GELU(),
            nn.Linear(8, 3),
        )
        self.to(dtype)

    def forward(self, x, y):
        out = self.layers(x)
        return out, nn.functional.cross_entropy(out.float(), y)


def options_of(replicas=1, accumulation=GA, training=True):
    options = make_options(
        D if training else D * accumulation, accumulation if training else 1, seed=3
    )
    options.outputMode(poptorch.OutputMode.All).autoRoundNumIPUs(True)
    return options.replicationFactor(replicas)


def data(replicas=1, calls=CALLS, accumulation=GA):
    torch.manual_seed(1)
    rows = BATCH * D * accumulation * replicas
    return [(torch.randint(0, 10, (rows,)), torch.randint(0, 3, (rows,))) for _ in range(calls)]


def wrap(
    observe,
    *,
    optimizer="momentum",
    stages=1,
    schedule=None,
    dtype=torch.float32,
    replicas=1,
    accumulation=GA,
):
    model, options = Model(dtype), options_of(replicas, accumulation)
    if schedule is not None:
        options.pipelineSchedule(schedule)
    if stages > 1:
        poptorch.set_pipeline_stage_assignment(model.layers, [i * stages // 8 for i in range(8)])
    observe(options)
    return model, poptorch.trainingModel(model, options, OPTIMIZERS[optimizer](model))


def results(observe, replicas=1, accumulation=GA, **settings):
    """Train; return outputs, weights and records."""
    model, training = wrap(observe, replicas=replicas, accumulation=accumulation, **settings)
    rows = data(replicas, accumulation=accumulation)
    found = [tensor for x, y in rows for tensor in training(x, y)]
    records = training.observations() if training.options._observations else []
    found += [value.clone() for value in model.state_dict().values()]
    training.destroy()
    return found, records


def nothing(options):
    pass


def everything(every):
    return lambda options: options.observe("*", *EVERYTHING, every=every)


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


class Kept:
    def __init__(self):
        self.records, self.closed, self.threads = [], 0, set()

    def write_records(self, records):
        self.records += records
        self.threads.add(threading.current_thread().name)

    def close(self):
        self.closed += 1
