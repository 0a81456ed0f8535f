"""Programs whose ops share their work with helpers: several programs, forks, ends, errors."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import build_info
from tests.options import make_options

ROOT = Path(__file__).resolve().parents[3]
TASKS = Path("/proc/self/task")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.LayerNorm(256))
    return poptorch.inferenceModel(model, make_options()), model


def test_programs_of_several_threads_run_at_the_same_time():
    x = torch.randn(128, 256)
    pairs = [make_model() for _ in range(3)]
    expected = pairs[0][1](x).detach()
    wrong = []

    def work(executor):
        torch.set_num_threads(4)
        for _ in range(50):
            try:
                torch.testing.assert_close(executor(x), expected)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(executor,)) for executor, _ in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []


def test_a_process_that_was_forked_starts_its_own():
    executor, model = make_model()
    x = torch.randn(128, 256)
    expected = executor(x)
    child = os.fork()
    if child == 0:
        same = all(torch.equal(executor(x), expected) for _ in range(5))
        os._exit(7 if same else 1)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        assert torch.equal(executor(x), expected)  # meanwhile
    assert os.waitstatus_to_exitcode(ended[1]) == 7
    torch.testing.assert_close(expected, model(x).detach())


@pytest.mark.skipif(not TASKS.exists(), reason="names of threads are in /proc")
@pytest.mark.skipif(build_info().target == "baseline", reason="it may be built for one thread")
def test_tools_see_names_of_threads():
    executor, _ = make_model()
    executor(torch.randn(128, 256))
    names = [path.joinpath("comm").read_text().strip() for path in TASKS.iterdir()]
    assert {"popsim-1", "popsim-2", "popsim-3"} <= set(names)


def test_the_error_is_that_of_the_first_index_that_is_wrong():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(100, 64)

        def forward(self, indices):
            return self.table(indices)

    executor = poptorch.inferenceModel(Table(), make_options())
    indices = torch.randint(100, (20_000,))
    executor(indices)
    wrong = indices.clone()
    wrong[[3_000, 8_000, 13_000, 18_000]] = torch.tensor([101, 102, 103, 104])
    for _ in range(20):
        with pytest.raises(poptorch.Error, match="101"):
            executor(wrong)
    torch.testing.assert_close(executor(indices).shape, torch.Size([20_000, 64]))


SCRIPT = """
import torch
import popsim_torch as poptorch
torch.set_num_threads(3)
options = poptorch.Options().showCompilationProgressBar(False)
executor = poptorch.inferenceModel(torch.nn.Linear(256, 256), options)
executor(torch.randn(256, 256))
print("done")
"""


@pytest.mark.parametrize("policy", ["PASSIVE", "ACTIVE"])
def test_a_process_ends_with_helpers_that_wait(policy):
    env = os.environ | {"OMP_WAIT_POLICY": policy, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


class Quarter(nn.Module):
    """Makes the smallest normal numbers denormal."""

    def forward(self, x):
        return x * 0.25


def test_small_numbers_are_flushed_as_the_caller_says():
    executor = poptorch.inferenceModel(Quarter(), make_options())
    for on in (True, False):
        torch.set_flush_denormal(on)
        try:
            found = executor(torch.full((1 << 20,), 1.2e-38))
        finally:
            torch.set_flush_denormal(False)
        assert found.eq(0).sum() == (found.numel() if on else 0)


CONVOLUTIONS = """
import os
import time

import torch
from torch import nn

import popsim_torch as poptorch

torch.set_num_threads(2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.last = nn.Linear(32 * 64, 10)

    def forward(self, x, labels):
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return nn.functional.cross_entropy(self.last(x.flatten(1)), labels)


def num_threads_of_libraries():
    names = [open(f"/proc/self/task/{one}/comm").read() for one in os.listdir("/proc/self/task")]
    return sum(not name.startswith(("popsim-", "pt_autograd")) for name in names)


net = Net()
options = poptorch.Options().showCompilationProgressBar(False)
model = poptorch.trainingModel(net, options, torch.optim.SGD(net.parameters(), lr=0.01))
x, labels = torch.randn(32, 3, 8, 8), torch.randint(10, (32,))
before = num_threads_of_libraries()
for _ in range(3):
    model(x, labels)
for _ in range(40):  # (threads of a library stay; one that a compilation has used ends)
    if num_threads_of_libraries() == before:
        break
    time.sleep(0.05)
print("more threads:", num_threads_of_libraries() - before)
"""


@pytest.mark.skipif(not TASKS.exists(), reason="threads have no names here")
def test_convolutions_of_small_weights_wake_no_threads_of_libraries():
    """Such threads look for more work for milliseconds, on the cores of the helpers."""
    done = subprocess.run(
        [sys.executable, "-c", CONVOLUTIONS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "more threads: 0\n", done.stderr
