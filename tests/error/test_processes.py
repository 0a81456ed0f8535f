"""What happens if the processes that train a model do not do the same."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import optim
from popsim_torch.errors import Error
from popsim_torch.processes import peers
from tests.ranks import ROOT, run_ranks

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
    for message, _, same, _ in ranks:
        assert "process 1 of 2 and process 0 have different hyper-parameters" in message
        assert "process 0 has groups [{'lr': 0.1," in message
        assert "and process 1 has groups [{'lr': 1.1," in message
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
    if size == 2:
        peers._ROLL_CALL = 0.5  # (nobody can answer)
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
            time.sleep(3 + peers._ROLL_CALL + 2)
        return None
    message, seconds, same = failing_call(training)
    with pytest.raises(Error, match="has lost the connection"):
        training(*data())
    return message, seconds, same and all(map(torch.equal, before, weights(training)))


@pytest.mark.parametrize(
    ("how", "size"),
    [
        ("die", 2),
        ("raise", 2),
        pytest.param("die", 3, marks=pytest.mark.slow),
        pytest.param("hang", 3, marks=pytest.mark.slow),
        pytest.param("end", 2, marks=pytest.mark.slow),
    ],
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


def interrupted() -> Any:
    training = wrapped(seconds=30)
    training(*data())
    if RANK == 1:
        time.sleep(3)
        return None
    before = weights(training)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored in background jobs of a shell
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        training(*data())
    seconds = time.monotonic() - began
    with pytest.raises(Error, match="has broken off an exchange"):
        training(*data())
    return seconds, all(map(torch.equal, before, weights(training)))


def test_a_keyboard_interrupt_while_waiting(tmp_path):
    seconds, same = run_ranks(interrupted, 2, tmp_path)[0]
    assert seconds < 2.5
    assert same


def bring_another_program() -> Any:
    training = wrapped(width=4 + RANK)
    messages = []
    for _ in range(2):
        with pytest.raises(Error) as caught:
            training(*data())
        messages.append(str(caught.value))
    # It is not compiled, and the same model trains in both afterwards.
    assert not training.isCompiled()
    again = wrapped()
    again(*data())
    return messages, weights(again)[5:]


def test_other_programs(tmp_path):
    (messages, one), (others, other) = run_ranks(bring_another_program, 2, tmp_path)
    for message in (*messages, *others):
        assert "process 1 of 2 and process 0 have compiled different programs" in message
    assert all(map(torch.equal, one, other))


def come_alone() -> Any:
    if RANK == 1:
        return None
    training = wrapped(seconds=1)
    began = time.monotonic()
    with pytest.raises(Error) as caught:
        training(*data())
    return str(caught.value), time.monotonic() - began


def test_nobody_comes(tmp_path):
    message, seconds = run_ranks(come_alone, 2, tmp_path)[0]
    assert "process 0 of 2 cannot meet the others at 127.0.0.1:" in message
    assert "within 1 s: process 1 did not come" in message
    assert seconds < 20


def train_three_models() -> Any:
    found = []
    for _ in range(3):
        training = wrapped()
        training(*data())
        found += weights(training)[5:]
        training.destroy()
        time.sleep(0.5 * (1 - RANK))  # process 1 waits at the next meeting already
    return found


def test_process_0_has_the_store(tmp_path):
    """There is no agent of torchrun, as under mpirun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": ""}
    one, other = run_ranks(train_three_models, 2, tmp_path, env=env)
    assert all(map(torch.equal, one, other))


def have_another_rank() -> str:
    torch.distributed.init_process_group("gloo")
    options = poptorch.Options()
    options.Distributed.configureProcessId(1 - RANK, 2)
    training = poptorch.trainingModel(Model(), options)
    with pytest.raises(Error) as caught:
        training(*data())
    return str(caught.value)


def test_another_rank_in_the_default_group(tmp_path):
    for rank, message in enumerate(run_ranks(have_another_rank, 2, tmp_path)):
        assert f"process {1 - rank} of 2 is process {rank} of 2 in the default process" in message


def test_a_step_in_the_middle_of_an_iteration():
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    layer = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def body(x):
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()
        return x + layer(x)

    @poptorch.function(options=options)
    def train():
        return poptorch.repeat(2, body, inputs=torch.ones(1, 3))

    with pytest.raises(Error, match=r"With 2 replicas, in all processes, weights change only at"):
        train()


RESTARTING = """
import os
import torch
import popsim_torch as poptorch
from tests.error.test_processes import Model

options = poptorch.Options().randomSeed(1)
rank, file = options.Distributed.processId, "checkpoint.pt"
assert options.Distributed.numProcesses == 2
torch.manual_seed(rank)
model = Model()
optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
done = 0
if os.path.exists(file):
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["done"]
training = poptorch.trainingModel(model, options, optimizer)
inputs = torch.randn(6, 2, 2, 3, generator=torch.Generator().manual_seed(0))
for step in range(done, 6):
    training(inputs[step, rank], torch.ones(2, 1))
    dies = os.environ.get("DIES") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if dies and rank == 1 and step == 3:
        os._exit(1)
    if rank == 0:
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**parts, "done": step + 1}, file + ".new")
        os.replace(file + ".new", file)
    print(f"rank {rank} made step {step}", flush=True)
torch.save([p.detach().clone() for p in model.parameters()], f"rank{rank}.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["", "1"])
def test_torchrun_restarts_from_the_last_checkpoint(dies, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(RESTARTING)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*torchrun, "--nproc-per-node=2", "--max-restarts=1", str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DIES": dies},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert all(map(torch.equal, *ranks))
    assert run.stdout.count("rank 0 made step 0") == 1
    if not dies:
        return
    # One process with the gradients of both, without an end in between.
    torch.manual_seed(0)
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    model = Model()
    training = poptorch.trainingModel(model, options, optim.Adam(model.parameters(), lr=0.1))
    inputs = torch.randn(6, 2, 2, 3, generator=torch.Generator().manual_seed(0))
    for x in inputs:
        training(x.flatten(0, 1), torch.ones(4, 1))
    for ours, expected in zip(ranks[0], model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-4, atol=1e-5)
