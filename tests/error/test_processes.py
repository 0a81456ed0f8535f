"""What happens if the processes that train a model do not do the same."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import optim
from popsim_torch.errors import Error
from tests.ranks import run_ranks

RANK = int(os.environ.get("RANK", "0"))
X, Y = torch.ones(2, 3), torch.ones(2, 1)


class Model(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.body = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.body(self.norm(x)), y)


def wrapped(lr: float = 0.1, seconds: float = 30.0, **model: Any) -> Any:
    torch.manual_seed(RANK)
    options = poptorch.Options()
    options.Distributed.setTimeout(seconds)
    module = Model(**model)
    optimizer = optim.SGD(module.parameters(), lr=lr, momentum=0.9, use_combined_accum=False)
    return poptorch.trainingModel(module, options, optimizer)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3) + RANK, Y


def weights(training: Any) -> list[torch.Tensor]:
    return [value.clone() for value in training.state_dict().values()]


def failing_call(training: Any) -> tuple[str, float, bool]:
    """Return the message, how long it took, and whether the state is that of before the call."""
    before, state = weights(training), training._device.state.read_all_states()
    began = time.monotonic()
    with pytest.raises(Error) as caught:
        training(*data())
    seconds = time.monotonic() - began
    after = training._device.state.read_all_states()
    same = all(map(torch.equal, before, weights(training))) and all(
        torch.equal(state[name], after[name]) for name in state if "Accum" not in name
    )
    return str(caught.value), seconds, same


def train_with_another_rate() -> Any:
    training = wrapped()
    training(*data())
    optimizer = training._use.optimizer
    optimizer.param_groups[0]["lr"] = 0.1 + RANK
    training.setOptimizer(optimizer)
    failed = failing_call(training)
    optimizer.param_groups[0]["lr"] = 0.2
    training.setOptimizer(optimizer)
    training(*data())
    return *failed, weights(training)[5:]


def test_other_hyper_parameters(tmp_path):
    ranks = run_ranks(train_with_another_rate, 2, tmp_path)
    for rank, (message, _, same, _) in enumerate(ranks):
        assert "process 1 of 2 and process 0 have different hyper-parameters" in message
        assert f"Process {rank} has groups [{{'lr': {0.1 + rank}" in message
        assert same
    # All processes have given the same update up, so they can go on.
    for one, other in zip(ranks[0][3], ranks[1][3], strict=True):
        assert torch.equal(one, other)


def load_in_one() -> Any:
    training = wrapped()
    training(*data())
    if RANK == 1:
        training.load_state_dict({k: v + 1 for k, v in training.state_dict().items()})
    failed = failing_call(training)
    training.detachFromDevice()
    training.attachToDevice()
    training(*data())
    return *failed, weights(training)[5:]


def test_weights_that_one_process_loads(tmp_path):
    ranks = run_ranks(load_in_one, 2, tmp_path)
    for message, _, same, _ in ranks:
        assert "process 1 of 2 and process 0 have written different values" in message
        assert same
    for one, other in zip(ranks[0][3], ranks[1][3], strict=True):
        assert torch.equal(one, other)


def lose_one(how: str) -> Any:
    size = int(os.environ["WORLD_SIZE"])
    training = wrapped(seconds=3 if how in ("hang", "stop") else 30)
    training(*data())
    before = weights(training)
    if size - 1 == RANK:
        if how == "die":
            os._exit(3)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "raise":
            raise RuntimeError("a bug of the user")
        if how == "hang":
            time.sleep(12)
        return None
    message, seconds, same = failing_call(training)
    with pytest.raises(Error, match="has lost the connection"):
        training(*data())
    return message, seconds, same and all(map(torch.equal, before, weights(training)))


@pytest.mark.parametrize(
    ("how", "size"), [("die", 2), ("die", 3), ("raise", 2), ("hang", 3), ("end", 2)]
)
def test_a_process_that_does_not_go_on(how, size, tmp_path):
    ranks = run_ranks(lose_one, size, tmp_path, dies=True, how=how)
    for rank, result in enumerate(ranks[:-1]):
        assert not isinstance(result, str), result
        message, seconds, same = result
        assert f"process {rank} of {size} waited up to" in message
        assert f"for process {size - 1} of {size}, which has ended" in message
        assert "torchrun --max-restarts" in message
        assert seconds < 12
        assert same
