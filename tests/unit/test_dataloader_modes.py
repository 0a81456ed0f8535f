"""The data loader in its asynchronous modes."""

import copy
import itertools
import logging

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler, TensorDataset

from popsim_torch.dataloader import DataLoader
from popsim_torch.enums import DataLoaderMode, SharingStrategy
from popsim_torch.errors import Error, UsageAssertionError
from popsim_torch.options import Options

Sync, Async, Rebatched = DataLoaderMode
MODES = [Async, Rebatched]


class Stream(IterableDataset):
    """The numbers from 0 to n - 1."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


class Divided(Stream):
    """The same numbers, divided among the workers."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return iter(range(info.id, self.count, info.num_workers))

    def __len__(self):
        return self.count


def load(dataset, *arguments, mode, options=None, iterations=1, async_options=None, **keywords):
    """A loader that starts quickly."""
    options = options or Options().deviceIterations(iterations)
    async_options = {"sharing_strategy": SharingStrategy.Fork, **(async_options or {})}
    return DataLoader(
        options, dataset, *arguments, mode=mode, async_options=async_options, **keywords
    )


def batches(loader):
    return [batch.tolist() for batch in loader]


# Content


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("count", [8, 11])
def test_batches_are_those_of_the_synchronous_mode(mode, drop_last, num_workers, count):
    arguments = {"batch_size": 2, "iterations": 2, "drop_last": drop_last}
    expected = load(range(count), mode=Sync, **arguments)
    loader = load(range(count), mode=mode, num_workers=num_workers, **arguments)
    for _ in range(2):
        assert batches(loader) == batches(expected)
    assert len(loader) == len(expected)
    assert loader.combinedBatchSize == 4
    loader.terminate()


@pytest.mark.parametrize("mode", MODES)
def test_leaving_a_pass_early_starts_the_next_one_from_the_beginning(mode):
    loader = load(range(40), mode=mode, batch_size=4)
    for length in (1, 4, 9):
        part = [batch.tolist() for batch in itertools.islice(loader, length)]
        assert part == batches(loader)[:length]
    assert len(batches(loader)) == 10


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drop_last", [True, False])
def test_shuffling_gives_the_order_of_the_synchronous_mode(mode, drop_last):
    def order(mode):
        torch.manual_seed(4)
        loader = load(range(30), 5, True, mode=mode, drop_last=drop_last)
        return [*batches(loader), *batches(loader)]

    assert order(mode) == order(Sync)


@pytest.mark.parametrize("mode", MODES)
def test_a_generator_decides_on_the_order(mode):
    def order(mode):
        generator = torch.Generator().manual_seed(4)
        return batches(load(range(30), 5, True, mode=mode, generator=generator))

    assert order(mode) == order(Sync)


def test_containers_become_lists():
    data = TensorDataset(torch.arange(4.0), torch.arange(4))
    (batch,) = load(data, 4, mode=Async)
    assert type(batch) is list
    assert [part.tolist() for part in batch] == [[0, 1, 2, 3]] * 2


def test_dicts_become_dicts():
    data = [{"x": torch.tensor(i), "y": torch.ones(2) * i} for i in range(4)]
    (batch,) = load(data, 4, mode=Rebatched)
    assert batch["x"].tolist() == [0, 1, 2, 3]
    assert batch["y"].shape == (4, 2)


def test_no_batch_size():
    loader = load([torch.tensor(i) for i in range(3)], None, mode=Async, drop_last=False)
    assert batches(loader) == [0, 1, 2]


def test_data_sent_by_the_default_strategy():
    loader = DataLoader(Options(), TensorDataset(torch.arange(6)), 2, mode=Async, num_workers=1)
    assert [x.tolist() for (x,) in loader] == [[0, 1], [2, 3], [4, 5]]
    loader.terminate()


# Iterable datasets


def test_several_workers_lose_a_batch_each_in_the_asynchronous_mode():
    loader = load(Divided(22), 4, mode=Async, num_workers=2)
    assert len(batches(loader)) == 4  # of 11 samples of each worker
    loader.terminate()


@pytest.mark.parametrize("worker_size", [None, 1, 3])
def test_several_workers_lose_one_batch_in_all_when_rebatched(worker_size):
    loader = load(Divided(22), 4, mode=Rebatched, num_workers=2, rebatched_worker_size=worker_size)
    for _ in range(2):
        found = batches(loader)
        assert [len(batch) for batch in found] == [4] * 5
        assert len({number for batch in found for number in batch}) == 20
    loader.terminate()


def test_all_samples_of_several_workers_come_without_dropping():
    loader = load(Divided(22), 4, mode=Rebatched, num_workers=2, drop_last=False)
    found = batches(loader)
    assert [len(batch) for batch in found] == [4] * 5 + [2]
    assert sorted(number for batch in found for number in batch) == list(range(22))
    assert len(loader) == 6
    loader.terminate()


@pytest.mark.parametrize("mode", MODES)
def test_streams_are_batched_in_order(mode):
    loader = load(Stream(7), 3, mode=mode)
    assert batches(loader) == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(TypeError):
        len(loader)


# Sizes of the workers' batches


@pytest.mark.parametrize("worker_size", [1, 3, 4])
@pytest.mark.parametrize("drop_last", [True, False])
def test_worker_size_changes_nothing(worker_size, drop_last):
    loader = load(
        range(10), 4, mode=Rebatched, rebatched_worker_size=worker_size, drop_last=drop_last
    )
    assert loader.batch_size == worker_size
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches(loader) == expected[: 2 if drop_last else 3]
    assert len(loader) == (2 if drop_last else 3)


def test_a_short_only_batch_is_delivered():
    assert batches(load(range(3), 4, mode=Async, drop_last=False)) == [[0, 1, 2]]


@pytest.mark.parametrize("size", [0, -1])
def test_worker_size_is_at_least_one(size):
    with pytest.raises(UsageAssertionError, match="must be at least 1"):
        load(range(10), 4, mode=Rebatched, rebatched_worker_size=size)


@pytest.mark.parametrize("arguments", [{"batch_size": 1}, {"batch_size": None, "drop_last": False}])
def test_rebatching_needs_batches(arguments):
    with pytest.raises(UsageAssertionError, match="the rebatched size must exceed 1"):
        load(range(4), mode=Rebatched, **arguments)


# Batch samplers


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("groups", [[[0, 1], [2], [3, 4, 5], [6]], [[0], [1, 2], [3, 4, 5, 6]]])
def test_batch_samplers_give_the_batches_of_the_synchronous_mode(mode, drop_last, groups):
    arguments = {"batch_sampler": groups, "drop_last": drop_last, "iterations": 2}
    loader = load(range(7), mode=mode, **arguments)
    for _ in range(2):
        assert batches(loader) == batches(load(range(7), mode=Sync, **arguments))
    assert len(loader) == len(groups)


def test_short_last_batch_of_a_sampler_makes_its_item_shorter():
    sampler = BatchSampler(SequentialSampler(range(7)), 2, drop_last=False)
    loader = load(range(7), mode=Async, batch_sampler=sampler, iterations=2)
    assert batches(loader) == [[0, 1, 2, 3], [4, 5, 6]]


# Life


@pytest.mark.parametrize("mode", list(DataLoaderMode))
def test_terminate_can_be_repeated(mode):
    loader = load(range(4), 2, mode=mode)
    loader.terminate()
    loader.terminate()


def test_a_terminated_loader_cannot_be_iterated():
    loader = load(range(4), 2, mode=Async)
    loader.terminate()
    with pytest.raises(UsageAssertionError, match="was terminated"):
        iter(loader)
    assert len(loader) == 2


def test_a_terminated_synchronous_loader_can():
    loader = load(range(4), 2, mode=Sync)
    loader.terminate()
    assert batches(loader) == [[0, 1], [2, 3]]


def test_arguments_reach_the_accessor(caplog):
    with pytest.raises(ValueError, match="buffer_size=0"):
        load(range(4), mode=Async, async_options={"buffer_size": 0})


def test_options_of_a_loader_that_cannot_load_are_not_frozen(capfd):
    options = Options()
    with pytest.raises(Error, match="failed to start"):
        load([], mode=Async, options=options)
    options.deviceIterations(2)
    assert "the dataset is empty" in capfd.readouterr().err


def test_options_are_frozen_and_kept():
    options = Options()
    loader = load(range(4), mode=Async, options=options)
    assert loader.options is options
    with pytest.raises(AttributeError):
        options.deviceIterations(2)


def test_a_copy_loads_by_itself():
    loader = load(range(4), 2, mode=Async)
    other = copy.copy(loader)
    loader.terminate()
    assert batches(other) == [[0, 1], [2, 3]]


def test_short_last_batch_is_warned_about_once(caplog):
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        load(range(6), 4, mode=Async, drop_last=False)
    (record,) = caplog.records
    assert "the last batch has 2 samples instead of 4" in record.getMessage()


# Several processes


def process_loaders(num_processes, dataset, *arguments, seed=None, **keywords):
    loaders = []
    for process in range(num_processes):
        options = Options()
        options.Distributed.configureProcessId(process, num_processes)
        if seed is not None:
            options.randomSeed(seed)
        loaders.append(load(dataset, *arguments, options=options, **keywords))
    return loaders


@pytest.mark.parametrize("mode", list(DataLoaderMode))
def test_processes_load_blocks_of_the_data(mode):
    loaders = process_loaders(2, range(11), 2, mode=mode)
    assert [batches(loader) for loader in loaders] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert [len(loader) for loader in loaders] == [2, 2]


@pytest.mark.parametrize("mode", list(DataLoaderMode))
def test_processes_load_everything_without_dropping(mode):
    loaders = process_loaders(2, range(7), 3, mode=mode, drop_last=False)
    assert [batches(loader) for loader in loaders] == [[[0, 1, 2], [3]], [[4, 5, 6]]]
    assert [len(loader) for loader in loaders] == [2, 1]


@pytest.mark.parametrize("mode", list(DataLoaderMode))
@pytest.mark.parametrize("num_workers", [0, 2])
def test_processes_share_one_permutation_in_each_pass(mode, num_workers):
    loaders = process_loaders(2, range(13), 3, True, num_workers=num_workers, mode=mode, seed=9)
    generator = torch.Generator().manual_seed(9)
    for expected in (slice(1, 13), slice(0, 12), slice(1, 13)):
        permutation = torch.randperm(13, generator=generator).tolist()
        found = [number for loader in loaders for batch in batches(loader) for number in batch]
        assert found == permutation[expected]
    for loader in loaders:
        loader.terminate()


@pytest.mark.parametrize("mode", list(DataLoaderMode))
def test_each_process_loads_everything_without_partitioning(mode):
    loaders = process_loaders(2, range(4), 2, mode=mode, auto_distributed_partitioning=False)
    assert [batches(loader) for loader in loaders] == [[[0, 1], [2, 3]]] * 2


@pytest.mark.parametrize(
    ("dataset", "arguments", "text"),
    [
        (Stream(8), {}, "an IterableDataset cannot be divided among 2 processes"),
        (range(8), {"batch_size": None, "drop_last": False}, "batch_size=None excludes"),
        (range(8), {"shuffle": True}, r"Call options\.randomSeed"),
    ],
)
def test_what_cannot_be_divided(dataset, arguments, text):
    with pytest.raises(UsageAssertionError, match=text):
        process_loaders(2, dataset, mode=Sync, **arguments)
    (loader, _) = process_loaders(
        2, dataset, mode=Sync, auto_distributed_partitioning=False, **arguments
    )
    assert sorted(number for batch in loader for number in torch.as_tensor(batch).view(-1)) == list(
        range(8)
    )


@pytest.mark.parametrize("name", ["batch_sampler", "sampler"])
def test_samplers_exclude_dividing(name):
    sampler = [[0, 1], [2]] if name == "batch_sampler" else [0, 1, 2]
    with pytest.raises(Error, match=f"{name} excludes dividing the data among 2 processes"):
        process_loaders(2, range(4), mode=Sync, **{name: sampler})
    (loader, _) = process_loaders(
        2, range(4), mode=Sync, auto_distributed_partitioning=False, **{name: sampler}
    )
    assert sum(batches(loader), []) == [0, 1, 2]  # noqa: RUF017


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (12, []),
        (13, ["the last batch of this process has 1 samples of 3", "has 3 samples of 3"]),
        (15, ["has 2 samples of 3", "has 1 samples of 3"]),
    ],
)
def test_short_batches_of_processes_are_warned_about(count, expected, caplog):
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        process_loaders(2, range(count), 3, mode=Sync, drop_last=False)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(expected)
    for message, text in zip(messages, expected, strict=True):
        assert text in message
