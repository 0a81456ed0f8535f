"""The worker process: how it starts and ends, and that it leaves nothing behind."""

import gc
import itertools
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import TensorDataset

from popsim_torch.data.accessor import AsynchronousDataAccessor
from popsim_torch.dataloader import DataLoader
from popsim_torch.enums import DataLoaderMode, SharingStrategy
from popsim_torch.errors import UsageAssertionError
from popsim_torch.options import Options
from tests.unit.data.processes import TIMEOUT, children, is_running, wait_for_end, worker_pid

ALL = list(SharingStrategy)
FORK = SharingStrategy.Fork


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


class Endless:
    """An endless dataset of numbers, each of which takes some time."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def __iter__(self):
        for i in itertools.count():
            yield torch.tensor(i)
            time.sleep(self.seconds)


class RandomNumbers:
    def __iter__(self):
        numbers = [torch.rand(()), torch.tensor(random.random()), torch.tensor(numpy.random.rand())]
        yield torch.stack([number.float() for number in numbers])


class Counts:
    """A dataset that counts its passes in a value that processes share."""

    def __init__(self):
        self.passes = multiprocessing.get_context("spawn").Value("i", 0)

    def __iter__(self):
        self.passes.value += 1
        yield torch.tensor(1)


# Start


@pytest.mark.parametrize(
    "strategy",
    [
        FORK,
        SharingStrategy.ForkServer,
        *map(slow, (SharingStrategy.SharedMemory, SharingStrategy.FileSystem)),
    ],
)
def test_data_reaches_the_worker_by_every_strategy(strategy, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    data = TensorDataset(torch.arange(6).view(3, 2))
    accessor = AsynchronousDataAccessor(data, sharing_strategy=strategy)
    assert list(tmp_path.glob("popsim_torch_*")) == []
    assert [x.tolist() for (x,) in accessor] == [[0, 1], [2, 3], [4, 5]]
    accessor.terminate()


def test_many_tensors_and_views_reach_the_worker():
    data = [*torch.arange(5000.0), *(torch.tensor(float(i)) for i in range(1000))]
    accessor = AsynchronousDataAccessor(data, sharing_strategy=SharingStrategy.ForkServer)
    assert sum(int(element) for element in accessor) == sum(range(5000)) + sum(range(1000))


def test_values_that_processes_share_reach_the_worker():
    data = Counts()
    accessor = AsynchronousDataAccessor(
        data, sharing_strategy=SharingStrategy.ForkServer, load_indefinitely=False
    )
    assert len(list(accessor)) == len(list(accessor)) == 1
    assert data.passes.value == 2


@pytest.mark.parametrize("strategy", [FORK, SharingStrategy.ForkServer])
def test_random_numbers_are_those_of_the_caller(strategy):
    torch.manual_seed(1)
    random.seed(2)
    numpy.random.seed(3)
    accessor = AsynchronousDataAccessor(RandomNumbers(), sharing_strategy=strategy)
    (expected,) = RandomNumbers()
    assert torch.equal(next(accessor), expected)


def test_pid_of_the_worker_is_logged(caplog):
    with caplog.at_level(logging.DEBUG, "poptorch::python"):
        accessor = AsynchronousDataAccessor([torch.ones(1)], sharing_strategy=FORK)
    text = f"AsynchronousDataAccessor worker process: {worker_pid(accessor)}"
    assert [record.getMessage() for record in caplog.records] == [text]
    assert worker_pid(accessor) in children(os.getpid())


def make_in_child(connection):
    try:
        AsynchronousDataAccessor([torch.ones(1)], sharing_strategy=FORK)
    except UsageAssertionError as error:
        connection.send(str(error))


def test_accessors_are_made_in_the_main_process():
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=make_in_child, args=(theirs,))
    process.start()
    assert ours.poll(TIMEOUT)
    assert "must be made in the main process" in ours.recv()
    process.join(TIMEOUT)


# End


def test_terminate_ends_the_worker_and_can_be_repeated():
    accessor = AsynchronousDataAccessor(Endless(), sharing_strategy=FORK)
    next(accessor)
    accessor.terminate()
    assert not is_running(worker_pid(accessor))
    accessor.terminate()


@pytest.mark.parametrize("num_elements", [0, 1, 5])
def test_deleting_ends_the_worker(num_elements):
    accessor = AsynchronousDataAccessor(Endless(), sharing_strategy=FORK)
    assert len(list(itertools.islice(accessor, num_elements))) == num_elements
    pid = worker_pid(accessor)
    del accessor
    assert not is_running(pid)


def test_deleting_a_loader_ends_the_worker():
    loader = DataLoader(
        Options(),
        list(range(10)),
        mode=DataLoaderMode.Async,
        async_options={"sharing_strategy": FORK},
    )
    next(iter(loader))
    pid = worker_pid(loader._accessor)
    del loader
    assert not is_running(pid)


def test_a_worker_that_is_busy_is_interrupted(monkeypatch, capfd):
    monkeypatch.setattr("popsim_torch.data.process._ASK_SECONDS", 0.05)
    accessor = AsynchronousDataAccessor(Endless(seconds=1000), sharing_strategy=FORK)
    iter(accessor)
    accessor.terminate()
    assert not is_running(worker_pid(accessor))
    assert capfd.readouterr().err == ""


class Stubborn:
    def __iter__(self):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        yield torch.ones(1)
        time.sleep(1000)


def test_a_worker_that_does_not_listen_is_killed(monkeypatch):
    monkeypatch.setattr("popsim_torch.data.process._ASK_SECONDS", 0.05)
    monkeypatch.setattr("popsim_torch.data.process._INTERRUPT_SECONDS", 0.05)
    accessor = AsynchronousDataAccessor(Stubborn(), sharing_strategy=FORK)
    iter(accessor)
    accessor.terminate()
    assert not is_running(worker_pid(accessor))


def test_several_forked_workers_end_at_once():
    accessors = [AsynchronousDataAccessor(Endless(), sharing_strategy=FORK) for _ in range(3)]
    start = time.monotonic()
    for accessor in accessors:
        accessor.terminate()
    assert not any(is_running(worker_pid(accessor)) for accessor in accessors)
    assert time.monotonic() - start < 2.0  # (after which workers are interrupted)


def test_a_killed_worker_is_an_error():
    accessor = AsynchronousDataAccessor(Endless(), sharing_strategy=FORK)
    next(accessor)
    os.kill(worker_pid(accessor), signal.SIGKILL)
    with pytest.raises(UsageAssertionError, match=f"worker process {worker_pid(accessor)} died"):
        list(accessor)
    assert not is_running(worker_pid(accessor))


def test_a_worker_that_is_killed_while_it_is_waited_for_is_an_error():
    accessor = AsynchronousDataAccessor(Endless(seconds=1000), sharing_strategy=FORK)
    next(accessor)
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -9 {worker_pid(accessor)}"])
    with pytest.raises(UsageAssertionError, match="died"):
        next(accessor)
    assert killer.wait(TIMEOUT) == 0


def test_a_worker_that_exits_is_an_error():
    class Exits:
        def __iter__(self):
            yield torch.ones(1)
            os._exit(3)

    accessor = AsynchronousDataAccessor(Exits(), sharing_strategy=FORK)
    next(accessor)
    with pytest.raises(UsageAssertionError, match="died"):
        next(accessor)


def check_killed_loader(strategy):
    """Kill the worker of a loader that has its own workers."""
    loader = DataLoader(
        Options(),
        TensorDataset(torch.arange(10000)),
        num_workers=2,
        mode=DataLoaderMode.Async,
        async_options={"sharing_strategy": strategy},
    )
    # One element of each: PyTorch's workers look from then on whether their parent lives.
    assert len(list(itertools.islice(loader, 2))) == 2
    pid = worker_pid(loader._accessor)
    grandchildren = children(pid)
    assert len(grandchildren) >= 2
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(UsageAssertionError, match="died"):
        list(loader)
    wait_for_end(pid, *grandchildren)
    loader.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ALL)
def test_a_killed_worker_with_workers_is_an_error_by_every_strategy(strategy):
    check_killed_loader(strategy)


# Nothing stays behind


def use_once(strategy, num_elements):
    accessor = AsynchronousDataAccessor(
        TensorDataset(torch.arange(10)), sharing_strategy=strategy, buffer_size=2
    )
    assert len(list(itertools.islice(accessor, num_elements))) == num_elements
    accessor.terminate()
    assert not is_running(worker_pid(accessor))
    return worker_pid(accessor)


def check_cycles(num_cycles, strategy):
    pids = [use_once(strategy, 3)]  # (starts server processes that stay)
    gc.collect()
    num_files = len(os.listdir("/proc/self/fd"))
    num_maps = len(Path("/proc/self/maps").read_text().split("popsim_torch (deleted)"))
    shared = set(os.listdir("/dev/shm"))
    others = set(multiprocessing.active_children())  # of earlier tests
    for i in range(num_cycles):
        pids.append(use_once(strategy, i % 12 if i % 12 <= 10 else 0))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= num_files
    assert len(Path("/proc/self/maps").read_text().split("popsim_torch (deleted)")) <= num_maps
    assert set(multiprocessing.active_children()) <= others
    # (other tests may run at the same time)
    owners = {str(pid) for pid in [*pids, os.getpid()]}
    left = [name for name in set(os.listdir("/dev/shm")) - shared if owners & set(name.split("_"))]
    assert left == []


def test_nothing_stays_behind():
    check_cycles(20, FORK)


@pytest.mark.slow
def test_nothing_stays_behind_a_thousand_workers():
    check_cycles(1000, FORK)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ALL)
def test_nothing_stays_behind_by_any_strategy(strategy):
    check_cycles(5, strategy)


# No sample lost or repeated


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize("consumer_seconds", [0.0, 0.002])
@pytest.mark.parametrize("mode", [DataLoaderMode.Async, DataLoaderMode.AsyncRebatched])
def test_no_sample_is_lost_or_repeated(consumer_seconds, mode):
    data = TensorDataset(torch.arange(100_000))
    loader = DataLoader(
        Options().deviceIterations(5), data, batch_size=8, num_workers=4, shuffle=True, mode=mode
    )
    for _ in range(2):
        seen = []
        for (batch,) in loader:
            seen.append(batch)
            time.sleep(consumer_seconds)
        assert torch.equal(torch.cat(seen).sort().values, torch.arange(100_000))
    loader.terminate()
