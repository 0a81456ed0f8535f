"""Processes that train one model observe their own parts of it, and no bit changes."""

import os
from typing import Any

import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.statistics import Fingerprint, Moments
from tests.ranks import run_ranks

RANK = int(os.environ.get("RANK", "0"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x), y)


def train(every: int | None) -> Any:
    torch.manual_seed(0)
    options = poptorch.Options().deviceIterations(3).randomSeed(7)
    options.Training.gradientAccumulation(2)
    if every is not None:
        options.observe("*", Moments(), Fingerprint(), every=every)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = poptorch.trainingModel(model, options, optimizer)
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(2):
        rows = torch.randn(24, 6, generator=generator)
        training(rows, torch.randint(3, (24,), generator=generator))
    records = [] if every is None else training.observations()
    return {
        "weights": [value.detach().clone() for value in model.parameters()],
        "records": [(r.name, r.step, r.micro_batch, r.statistics.fingerprint) for r in records],
    }


def runs() -> Any:
    return {every: train(every) for every in (None, 1, 2)}


def test_two_processes(tmp_path):
    ranks = run_ranks(runs, 2, tmp_path)
    for every in (1, 2):
        for rank in ranks:
            plain, seen = rank[None]["weights"], rank[every]["weights"]
            torch.testing.assert_close(plain, seen, rtol=0, atol=0)
        first, second = (
            {(name, step, part): value for name, step, part, value in rank[every]["records"]}
            for rank in ranks
        )
        assert first.keys() == second.keys()
        assert {step for _, step, _ in first} == set(range(0, 6, every))
        for (name, step, part), value in first.items():
            if name.startswith("UpdatedVar___layers"):
                assert value == second[name, step, part]
            if name == "Gradient___layers.0.weight":
                assert value != second[name, step, part]
