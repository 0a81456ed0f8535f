"""Several processes that train one model: like one process with all their data, bit for bit equal
among each other."""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import popsim_torch as poptorch
from popsim_torch import optim
from tests.ranks import run_ranks

RANK = int(os.environ.get("RANK", "0"))

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1, loss_scaling=4.0),
    "SGD combined": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1, use_combined_accum=True
    ),
    "SGD separate": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.2, use_combined_accum=False
    ),
    "SGD nesterov": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, use_combined_accum=True
    ),
    "SGD clipped": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, use_combined_accum=False, max_grad_norm=0.05
    ),
    "Adam": lambda p: optim.Adam(p, lr=0.01, loss_scaling=8.0),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, max_grad_norm=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "LAMB": lambda p: optim.LAMB(p, lr=0.01),
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}
ITERATIONS, STEPS, SIZE, CALLS = 2, 3, 3, 3


class Model(nn.Module):
    """A small classifier."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(8, 4)

    def forward(self, x, target):
        y = self.fc2(self.drop(torch.relu(self.fc1(x))))
        return y, F.cross_entropy(y, target)


def micro_batches(num_ranks: int, ranks: slice) -> list[torch.Tensor]:
    """Return the data of some ranks: calls, each with all its micro-batches one after the other."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(CALLS, ITERATIONS * STEPS, num_ranks, SIZE, 6, generator=generator)
    target = torch.randint(4, x.shape[:-1], generator=generator)
    return [x[:, :, ranks].flatten(1, 3), target[:, :, ranks].flatten(1, 3)]


def train_part(optimizer: str, dropout: float = 0.0, num_ranks: int = 1, **settings: Any) -> Any:
    """Train a model with the micro-batches of this rank, and return what is left."""
    torch.manual_seed(10 + RANK)  # each process begins with other weights
    options = poptorch.Options().deviceIterations(ITERATIONS).randomSeed(7)
    alone = options.Distributed.numProcesses == 1
    ranks = slice(num_ranks) if alone else slice(RANK, RANK + 1)
    options.Training.gradientAccumulation(STEPS * (num_ranks if alone else 1))
    options.outputMode(poptorch.OutputMode.All)
    if settings.get("reduction"):
        options.Training.accumulationAndReplicationReductionType(
            poptorch.ReductionType[settings["reduction"]]
        )
    if settings.get("running"):
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(
            poptorch.MeanReductionStrategy.Running
        )
    if settings.get("scaling"):
        options.Training.setAutomaticLossScaling(True)
    model = Model(dropout)
    if settings.get("half"):
        model.half()
    if settings.get("stages"):
        model.fc2 = poptorch.BeginBlock(model.fc2, ipu_id=1)
    training = poptorch.trainingModel(model, options, OPTIMIZERS[optimizer](model.parameters()))
    outputs = []
    for x, target in zip(*micro_batches(num_ranks, ranks), strict=True):
        outputs.append(training(x.half() if settings.get("half") else x, target))
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "state": training._device.state.read_all_states(),
        "outputs": outputs,
        "traffic": training.traffic(),
        "rng": training.rng_state,
    }


def assert_equal_ranks(ranks: list[Any]) -> None:
    for other in ranks[1:]:
        for part in ("weights", "state", "rng"):
            torch.testing.assert_close(other[part], ranks[0][part], rtol=0, atol=0)


def assert_like_one(one: Any, ranks: list[Any], **tolerance: float) -> None:
    for name, value in one["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][name], value, **tolerance)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_processes_train_like_one(optimizer, tmp_path):
    one = train_part(optimizer, num_ranks=2)
    ranks = run_ranks(train_part, 2, tmp_path, optimizer=optimizer, num_ranks=2)
    assert_equal_ranks(ranks)
    assert_like_one(one, ranks)
    assert one["traffic"].exchanges == 0
    assert ranks[0]["traffic"].exchanges == CALLS * ITERATIONS


def test_each_process_draws_its_own_dropout_masks(tmp_path):
    settings: dict[str, Any] = {"optimizer": "Adam", "dropout": 0.5, "num_ranks": 2}
    one = train_part(**settings)
    ranks = run_ranks(train_part, 2, tmp_path, **settings)
    assert_equal_ranks(ranks)
    assert_like_one(one, ranks)
    for call, (outputs, _) in enumerate(one["outputs"]):
        parts = outputs.view(ITERATIONS * STEPS, 2, SIZE, 4).unbind(1)
        for rank, expected in enumerate(parts):
            found = ranks[rank]["outputs"][call][0].view_as(expected)
            torch.testing.assert_close(found, expected)
    # The random numbers continue where those of one process would.
    assert ranks[0]["rng"] == one["rng"]


@pytest.mark.parametrize(
    "settings",
    [
        {"reduction": "Sum"},
        {"running": True},
        {"stages": True},
        {"scaling": True},
        {"half": True},
        {"half": True, "scaling": True, "running": True},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_options(settings, tmp_path):
    if "stages" in settings:
        settings["dropout"] = 0.5
    one = train_part("SGD separate", num_ranks=2, **settings)
    ranks = run_ranks(train_part, 2, tmp_path, optimizer="SGD separate", num_ranks=2, **settings)
    assert_equal_ranks(ranks)
    tolerance = {"rtol": 1e-2, "atol": 2e-3} if settings.get("half") else {}
    assert_like_one(one, ranks, **tolerance)


def test_three_processes(tmp_path):
    settings: dict[str, Any] = {"optimizer": "AdamW", "dropout": 0.5, "num_ranks": 3}
    one = train_part(**settings)
    ranks = run_ranks(train_part, 3, tmp_path, **settings)
    assert_equal_ranks(ranks)
    assert_like_one(one, ranks)
    assert ranks[0]["traffic"].exchanges == CALLS * ITERATIONS
