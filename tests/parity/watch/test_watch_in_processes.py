"""Options.watch where several processes train one model: all of them end the same iteration."""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.ranks import run_ranks

RANK = int(os.environ.get("RANK", "0"))
ITERATIONS, ACCUMULATION, CALLS, BAD_CALL = 2, 2, 3, 1


class Model(nn.Module):
    """A layer whose results are dropped, and the logarithm of what is left."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        kept = self.dropout(torch.sigmoid(self.layer(x)))
        return poptorch.identity_loss(torch.log(kept.sum(1)).sum(), "none")


def calls() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(RANK)
    return [
        torch.randn(ITERATIONS * ACCUMULATION * 3, 4, generator=generator) for _ in range(CALLS)
    ]


def spoilt() -> list[torch.Tensor]:
    """Return data with a NaN in the second iteration of a call, in process 1 alone."""
    data = calls()
    if RANK == 1:
        data[BAD_CALL][ACCUMULATION * 3 + 4, 2] = torch.nan
    return data


def watched(dropout: float = 0.0, **watch: Any) -> Any:
    torch.manual_seed(0)
    options = poptorch.Options().deviceIterations(ITERATIONS).randomSeed(3).watch(**watch)
    options.Training.gradientAccumulation(ACCUMULATION)
    options.outputMode(poptorch.OutputMode.All)
    model = Model(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, poptorch.trainingModel(model, options, optimizer)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.parameters()]


def ended(folder: str) -> Any:
    model, training = watched(capsule=folder)
    found = None
    for x in spoilt():
        try:
            training(x)
        except poptorch.BadNumberError as error:
            found = error.verdict, str(error)
            before = weights(model)
    return {"verdict": found, "before": before, "after": weights(model)}


def skipped() -> Any:
    seen: list[Any] = []

    def then(verdict):
        seen.append(verdict.source)
        return RANK == 1

    model, training = watched(then=then)
    for x in spoilt():
        training(x)
    return {"seen": seen, "after": weights(model)}


def dropped(folder: str) -> Any:
    """Train until a process drops both results of a row."""
    model, training = watched(0.1, capsule=str(Path(folder) / "dropped.capsule"))
    for x in calls() * 20:
        try:
            training(x)
        except poptorch.BadNumberError as error:
            return {"verdict": error.verdict, "before": weights(model)}
    return None


def fitted() -> Any:
    torch.manual_seed(0)
    model = Model()
    options = poptorch.Options().watch()
    data = [part for x in spoilt() for part in x.split(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        poptorch.fit(model, data, optimizer=optimizer, options=options, verbose=0)
    except poptorch.BadNumberError as error:
        return {"verdict": error.verdict, "before": weights(model)}
    return None


def broken_off() -> Any:
    def then(verdict):
        if RANK == 1:
            raise KeyError("of the user")

    _, training = watched(then=then)
    began = time.monotonic()
    with pytest.raises((KeyError, poptorch.Error)) as caught:
        for x in spoilt():
            training(x)
    return {"error": str(caught.value), "seconds": time.monotonic() - began}


def everything(capsules: str) -> Any:
    return {
        "ended": ended(capsules),
        "skipped": skipped(),
        "dropped": dropped(capsules),
        "fitted": fitted(),
        "broken off": broken_off(),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def ranks(folder):
    return run_ranks(everything, 2, folder, capsules=str(folder / "capsules"))


def assert_equal_weights(ranks, case, when):
    torch.testing.assert_close(ranks[0][case][when], ranks[1][case][when], rtol=0, atol=0)
    assert all(value.isfinite().all() for value in ranks[0][case][when])


def test_each_process_says_what_it_knows(ranks, folder):
    (verdict, text), (other, other_text) = (rank["ended"]["verdict"] for rank in ranks[::-1])
    assert verdict.source == "input" and verdict.iteration == BAD_CALL * ITERATIONS + 1
    assert (verdict.micro_batch, verdict.index) == (1, (1, 2))
    assert other.source == "process" and other.iteration == verdict.iteration
    assert "process 0 of 2" in other_text and "another process" in other_text
    (saved,) = (folder / "capsules").glob("Model_*.capsule")
    assert saved.name == f"Model_{verdict.iteration}_process1.capsule" and str(saved) in text
    assert str(poptorch.replay(saved)) in text
    assert_equal_weights(ranks, "ended", "before")
    assert_equal_weights(ranks, "ended", "after")


def test_one_process_is_enough_to_leave_an_iteration_out(ranks):
    assert [rank["skipped"]["seen"] for rank in ranks] == [["process"], ["input"]]
    assert_equal_weights(ranks, "skipped", "after")
    after, ended = ranks[0]["skipped"]["after"], ranks[0]["ended"]["after"]
    torch.testing.assert_close(after, ended, rtol=0, atol=0)  # the bad iteration was the last one


def test_random_numbers_of_a_process_are_repeated(ranks, folder):
    verdicts = [rank["dropped"]["verdict"] for rank in ranks]
    assert sorted(one.source for one in verdicts) == ["op", "process"]
    bad = [one.source for one in verdicts].index("op")
    assert re.search("log", verdicts[bad].op) and verdicts[bad].operands[0].value == 0
    replayed = poptorch.replay(folder / "capsules" / f"dropped_process{bad}.capsule")
    assert str(replayed) == str(verdicts[bad])
    assert_equal_weights(ranks, "dropped", "before")


def test_fit(ranks):
    assert [rank["fitted"]["verdict"].source for rank in ranks] == ["process", "input"]
    assert_equal_weights(ranks, "fitted", "before")


def test_a_process_that_breaks_off_does_not_let_the_others_wait(ranks):
    assert "of the user" in ranks[1]["broken off"]["error"]
    assert "Options.watch" in ranks[0]["broken off"]["error"]
    assert ranks[0]["broken off"]["seconds"] < 60
