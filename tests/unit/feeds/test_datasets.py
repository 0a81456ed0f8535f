"""The objects from which a queue can be made."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import popsim_torch as poptorch
from popsim_torch.errors import Error
from popsim_torch.feeds.datasets import Source


class Squares(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(float(index * index))  # never an IndexError


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.tensor(0.0), torch.tensor(1.0)])


class Sequence:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return (10.0, 20.0)[index]


def numbers():
    yield from (5.0, 6.0)


DATASETS = [
    ([1.0, 2.0], [1, 2]),
    (range(3), [0, 1, 2]),
    (torch.arange(3.0), [0, 1, 2]),
    (np.arange(2.0), [0, 1]),
    (Squares(), [0, 1, 4, 9]),
    (Squares, [0, 1, 4, 9]),
    (Stream(), [0, 1]),
    (Stream, [0, 1]),
    (Sequence(), [10, 20]),
    (numbers, [5, 6]),
    (lambda: torch.arange(2.0), [0, 1]),
    (DataLoader(Squares(), batch_size=None), [0, 1, 4, 9]),
    (poptorch.DataLoader(poptorch.Options(), Squares(), batch_size=1), [0, 1, 4, 9]),
]


def test_a_file_in_memory(tmp_path):
    path = tmp_path / "numbers.bin"
    np.arange(12, dtype=np.float32).tofile(path)
    mapped = np.memmap(path, dtype=np.float32, mode="r", shape=(4, 3))
    queue = poptorch.OutfeedQueue()
    infeed = poptorch.InfeedQueue(mapped)

    @poptorch.function
    def run():
        poptorch.repeat(4, queue.enqueue, infeed=infeed)

    run()
    assert queue.dequeue().tolist() == mapped.tolist()
    infeed.close()


@pytest.mark.parametrize(("dataset", "expected"), DATASETS, ids=lambda one: type(one).__name__)
def test_a_pass_and_another_one(dataset, expected):
    source = Source(dataset)
    assert source.can_restart
    for _ in range(2):
        assert [float(item) for item in source.items()] == expected


@pytest.mark.parametrize(("dataset", "expected"), DATASETS, ids=lambda one: type(one).__name__)
def test_repeated(dataset, expected):
    items = Source(dataset, repeat=True).items()
    found = [float(next(items)) for _ in range(2 * len(expected) + 1)]
    assert found == [*expected, *expected, expected[0]]


def test_batches_of_tuples():
    loader = DataLoader(TensorDataset(torch.arange(4.0), torch.arange(4)), batch_size=2)
    assert [[x.tolist() for x in batch] for batch in Source(loader).items()] == [
        [[0, 1], [0, 1]],
        [[2, 3], [2, 3]],
    ]


def test_a_generator_has_one_pass():
    source = Source(numbers())
    assert not source.can_restart
    assert list(source.items()) == [5.0, 6.0]
    with pytest.raises(Error, match=r"a generator cannot\. Give a function"):
        Source(numbers(), repeat=True)


def test_nothing_cannot_be_repeated():
    with pytest.raises(Error, match="no element, so it cannot be repeated"):
        next(Source([], repeat=True).items())


def test_a_loader_draws_its_seed_where_it_is_asked_for_the_first_element():
    loader = DataLoader(TensorDataset(torch.arange(50)), shuffle=True)
    orders = []
    for _ in range(2):
        torch.manual_seed(3)
        orders.append([int(batch[0]) for batch in Source(loader).items()])
    assert orders[0] == orders[1] != sorted(orders[0])


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (None, "a NoneType is not a dataset"),
        ("text", "a str is not a dataset"),
        ({"x": torch.ones(2)}, "a dict is not a dataset"),
        (3, "a int cannot be iterated"),
        (torch.tensor(1.0), "a single number"),
    ],
    ids=str,
)
def test_no_dataset(dataset, text):
    with pytest.raises(Error, match=text):
        Source(dataset)


def test_a_function_that_makes_no_dataset():
    source = Source(lambda: 3)
    with pytest.raises(Error, match="a int cannot be iterated"):
        source.items()
