"""The data loader: sizes, order, leftovers, samplers, warnings and errors."""

import logging
from collections import namedtuple

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from popsim_torch.arguments.parsers import ICustomArgParser, registerCustomArgParser
from popsim_torch.dataloader import DataLoader
from popsim_torch.enums import DataLoaderMode
from popsim_torch.errors import Error, UsageAssertionError, UsageTypeError, UsageValueError
from popsim_torch.options import Options


class Numbers(Dataset):
    """The numbers from 0 to n - 1, one at a time."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor(index)


class Stream(IterableDataset):
    """The same numbers without random access."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


class SizedStream(Stream):
    """A stream that knows its length."""

    def __len__(self):
        return self.count


class AnySampler:
    """A batch sampler of given batches, with no length and no batch size."""

    def __init__(self, *batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def batches(loader):
    return [batch.tolist() for batch in loader]


def training_options(iterations=2, accumulation=3):
    options = Options().deviceIterations(iterations)
    options.Training.gradientAccumulation(accumulation)
    return options


# Sizes and order


def test_combined_batch_holds_all_micro_batches_of_one_call():
    loader = DataLoader(training_options(2, 3), Numbers(100), batch_size=4)
    assert loader.combinedBatchSize == 4 * 2 * 3
    assert next(iter(loader)).shape == (24,)


def test_batches_follow_the_order_of_the_dataset():
    loader = DataLoader(Options().deviceIterations(2), Numbers(6))
    assert batches(loader) == [[0, 1], [2, 3], [4, 5]]


def test_a_second_pass_gives_the_same_batches():
    loader = DataLoader(Options(), Numbers(4), batch_size=2)
    assert batches(loader) == batches(loader)


def test_structure_of_the_samples_is_kept():
    data = TensorDataset(torch.arange(8.0).reshape(4, 2), torch.arange(4))
    x, y = next(iter(DataLoader(Options(), data, batch_size=4)))
    assert torch.equal(x, data.tensors[0])
    assert torch.equal(y, data.tensors[1])


def test_batch_size_attribute_is_the_combined_size():
    assert DataLoader(training_options(2, 3), Numbers(100), batch_size=4).batch_size == 24


def test_incomplete_last_batch_is_dropped_by_default():
    loader = DataLoader(Options(), Numbers(5), batch_size=2)
    assert batches(loader) == [[0, 1], [2, 3]]
    assert len(loader) == 2


def test_incomplete_last_batch_is_kept_on_request():
    loader = DataLoader(Options(), Numbers(5), batch_size=2, drop_last=False)
    assert batches(loader) == [[0, 1], [2, 3], [4]]
    assert len(loader) == 3


def test_shuffling_visits_every_sample_in_another_order():
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Options(), Numbers(32), batch_size=32, shuffle=True, generator=generator)
    (batch,) = batches(loader)
    assert batch != list(range(32))
    assert sorted(batch) == list(range(32))


def test_samples_come_without_a_batch_dimension_when_there_is_no_batch_size():
    loader = DataLoader(Options(), Numbers(3), batch_size=None, drop_last=False)
    assert loader.combinedBatchSize is None
    assert batches(loader) == [0, 1, 2]


def test_no_batch_size_excludes_dropping_the_last_batch():
    with pytest.raises(ValueError, match="drop_last"):
        DataLoader(Options(), Numbers(3), batch_size=None)


def test_other_arguments_reach_pytorch():
    loader = DataLoader(Options(), Numbers(4), batch_size=2, collate_fn=lambda items: sum(items))
    assert [int(total) for total in loader] == [0 + 1, 2 + 3]


def test_workers_load_the_same_batches():
    loader = DataLoader(Options().deviceIterations(2), Numbers(8), batch_size=2, num_workers=1)
    assert batches(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_workers_persist_by_default():
    assert DataLoader(Options(), Numbers(4), num_workers=1).persistent_workers is True
    assert DataLoader(Options(), Numbers(4)).persistent_workers is False


def test_workers_need_not_persist():
    loader = DataLoader(Options(), Numbers(4), num_workers=1, persistent_workers=False)
    assert loader.persistent_workers is False


# Iterable datasets


def test_iterable_dataset_is_batched_in_order():
    assert batches(DataLoader(Options(), Stream(5), batch_size=2)) == [[0, 1], [2, 3]]


def test_iterable_dataset_without_a_length_has_none():
    with pytest.raises(TypeError):
        len(DataLoader(Options(), Stream(5), batch_size=2))


@pytest.mark.parametrize(("drop_last", "expected"), [(True, 2), (False, 3)])
def test_length_of_an_iterable_dataset_that_has_one(drop_last, expected):
    loader = DataLoader(Options(), SizedStream(5), batch_size=2, drop_last=drop_last)
    assert len(loader) == expected


# Options


def test_options_are_kept_and_frozen():
    options = Options()
    loader = DataLoader(options, Numbers(4))
    assert loader.options is options
    with pytest.raises(AttributeError, match="can't modify frozen options"):
        options.deviceIterations(2)


def test_options_are_kept_without_a_batch_size():
    options = Options()
    assert DataLoader(options, Numbers(4), batch_size=None, drop_last=False).options is options


def test_frozen_options_serve_several_loaders():
    options = Options()
    DataLoader(options, Numbers(4))
    assert len(DataLoader(options, Numbers(4))) == 4


def test_options_of_a_refused_loader_are_not_frozen():
    options = Options()
    with pytest.raises(ValueError):
        DataLoader(options, Numbers(4), batch_size=None)
    options.deviceIterations(2)


def test_options_come_first():
    with pytest.raises(UsageAssertionError, match=r"options is a Numbers\. Pass a poptorch\.Opt"):
        DataLoader(Numbers(4), Options())


@pytest.mark.parametrize("value", [0, -1])
def test_options_must_leave_a_micro_batch(value):
    with pytest.raises(UsageValueError, match=f"{value} device iterations"):
        DataLoader(Options().deviceIterations(value), Numbers(4))


# Batch samplers


def in_twos(count, drop_last=False):
    return BatchSampler(SequentialSampler(range(count)), batch_size=2, drop_last=drop_last)


def test_batch_sampler_gives_micro_batches_that_are_joined():
    loader = DataLoader(Options().deviceIterations(2), Numbers(8), batch_sampler=in_twos(8))
    assert batches(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_batch_sampler_decides_the_combined_size():
    loader = DataLoader(training_options(2, 3), Numbers(8), batch_sampler=in_twos(8))
    assert loader.combinedBatchSize == 2 * 2 * 3
    assert loader.batch_size == 1


def test_batch_sampler_without_a_batch_size_counts_as_1():
    loader = DataLoader(training_options(2, 3), Numbers(8), batch_sampler=AnySampler([0, 1]))
    assert loader.combinedBatchSize == 6


def test_batch_sampler_may_give_batches_of_different_lengths():
    sampler = AnySampler([5], [1, 2, 3], [0, 4], [6])
    loader = DataLoader(Options().deviceIterations(2), Numbers(8), batch_sampler=sampler)
    assert batches(loader) == [[5, 1, 2, 3], [0, 4, 6]]


def test_length_with_a_batch_sampler_is_that_of_the_sampler():
    loader = DataLoader(Options().deviceIterations(2), Numbers(8), batch_sampler=in_twos(8))
    assert len(loader) == 4


def test_group_of_too_few_micro_batches_is_dropped():
    loader = DataLoader(Options().deviceIterations(2), Numbers(6), batch_sampler=in_twos(6))
    assert batches(loader) == [[0, 1, 2, 3]]
    assert loader.drop_last is True


def test_group_of_too_few_micro_batches_is_kept_on_request():
    loader = DataLoader(
        Options().deviceIterations(2), Numbers(6), batch_sampler=in_twos(6), drop_last=False
    )
    assert batches(loader) == [[0, 1, 2, 3], [4, 5]]


def test_batch_sampler_works_with_workers():
    loader = DataLoader(
        Options().deviceIterations(2), Numbers(8), batch_sampler=in_twos(8), num_workers=1
    )
    assert batches(loader) == batches(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


Pair = namedtuple("Pair", "x y")


def test_joining_keeps_the_structure_of_the_batches():
    def collate(items):
        t = torch.stack(items)
        return {"a": t, "b": (t, [t]), "c": Pair(t, t + 1)}

    loader = DataLoader(
        Options().deviceIterations(2), Numbers(4), batch_sampler=in_twos(4), collate_fn=collate
    )
    (batch,) = loader
    assert batch["a"].tolist() == [0, 1, 2, 3]
    assert type(batch["b"]) is tuple
    assert batch["b"][1][0].tolist() == [0, 1, 2, 3]
    assert type(batch["c"]) is Pair
    assert batch["c"].y.tolist() == [1, 2, 3, 4]


def test_joining_needs_tensors():
    loader = DataLoader(
        Options().deviceIterations(2),
        Numbers(4),
        batch_sampler=in_twos(4),
        collate_fn=lambda items: len(items),
    )
    with pytest.raises(UsageTypeError, match="cannot join batches, as batch is a int"):
        next(iter(loader))


class Labelled:
    """Numbers with a label, in a type that only a registered parser can read."""

    def __init__(self, numbers, label):
        self.numbers = numbers
        self.label = label


class LabelledParser(ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.numbers

    def reconstruct(self, original_structure, tensor_iterator):
        return Labelled(next(tensor_iterator), original_structure.label)


def test_joining_honours_registered_types():
    registerCustomArgParser(Labelled, LabelledParser())
    try:
        (batch,) = DataLoader(
            Options().deviceIterations(2),
            Numbers(4),
            batch_sampler=in_twos(4),
            collate_fn=lambda items: Labelled(torch.stack(items), "mine"),
        )
    finally:
        registerCustomArgParser(Labelled, None)
    assert batch.numbers.tolist() == [0, 1, 2, 3]
    assert batch.label == "mine"


def test_joined_batches_must_have_one_structure():
    loader = DataLoader(
        Options().deviceIterations(2),
        Numbers(4),
        batch_sampler=in_twos(4),
        collate_fn=lambda items: [items[0]] * (1 + int(items[0]) // 2),
    )
    with pytest.raises(UsageTypeError, match="different structures"):
        next(iter(loader))


@pytest.mark.parametrize("arguments", [{"batch_size": 2}, {"batch_size": None}, {"shuffle": True}])
def test_batch_sampler_excludes_batch_size_and_shuffling(arguments):
    with pytest.raises(Error, match="batch_sampler decides size and order"):
        DataLoader(Options(), Numbers(4), batch_sampler=in_twos(4), **arguments)


# Warnings


def warnings_of(caplog, *arguments, **keywords):
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        DataLoader(*arguments, **keywords)
    return [record.getMessage() for record in caplog.records]


def test_short_last_batch_is_warned_about(caplog):
    (message,) = warnings_of(caplog, Options(), Numbers(10), batch_size=4, drop_last=False)
    assert "the last batch has 2 samples instead of 4" in message


def test_full_last_batch_is_not_warned_about(caplog):
    assert warnings_of(caplog, Options(), Numbers(8), batch_size=4, drop_last=False) == []


def test_dropped_last_batch_is_not_warned_about(caplog):
    assert warnings_of(caplog, Options(), Numbers(10), batch_size=4) == []


def test_short_last_group_of_a_batch_sampler_is_warned_about(caplog):
    options = Options().deviceIterations(2)
    (message,) = warnings_of(caplog, options, Numbers(6), batch_sampler=in_twos(6), drop_last=False)
    assert "the last batch has 1 micro-batches instead of 2" in message


def test_batch_sampler_of_unknown_length_is_not_warned_about(caplog):
    options = Options().deviceIterations(2)
    sampler = AnySampler([0], [1], [2])
    assert warnings_of(caplog, options, Numbers(6), batch_sampler=sampler, drop_last=False) == []


def test_iterable_dataset_on_several_workers_is_warned_about(caplog):
    (message,) = warnings_of(caplog, Options(), Stream(4), num_workers=2)
    assert "each of the 2 workers returns every element" in message


@pytest.mark.parametrize(
    "arguments", [{"num_workers": 1}, {"num_workers": 2, "worker_init_fn": id}]
)
def test_iterable_dataset_divided_among_workers_is_not_warned_about(caplog, arguments):
    assert warnings_of(caplog, Options(), Stream(4), **arguments) == []


# Modes


def test_mode_must_be_the_enum():
    with pytest.raises(UsageAssertionError, match="mode=0 is not"):
        DataLoader(Options(), Numbers(4), mode=0)


def test_async_options_may_not_set_the_rebatched_size():
    with pytest.raises(UsageAssertionError, match="rebatched_size"):
        DataLoader(Options(), Numbers(4), async_options={"rebatched_size": 2})


@pytest.mark.parametrize("mode", list(DataLoaderMode))
@pytest.mark.parametrize("value", [[1], "buffer_size", 3, {1: 2}], ids=repr)
def test_async_options_are_arguments_by_name(mode, value):
    with pytest.raises(UsageAssertionError, match=r"async_options=.* is not a dict of arguments"):
        DataLoader(Options(), Numbers(4), mode=mode, async_options=value)


@pytest.mark.parametrize("mode", list(DataLoaderMode))
@pytest.mark.parametrize("size", [0, -1])
def test_batches_have_samples_in_all_modes(mode, size):
    with pytest.raises(ValueError, match="batch_size should be a positive integer"):
        DataLoader(Options(), Numbers(4), size, mode=mode)


def test_rebatched_worker_size_is_at_most_the_combined_size():
    with pytest.raises(UsageAssertionError, match="rebatched_worker_size=5 exceeds"):
        DataLoader(Options(), Numbers(4), batch_size=4, rebatched_worker_size=5)


def test_terminate_can_be_called_at_any_time():
    loader = DataLoader(Options(), Numbers(2))
    loader.terminate()
    loader.terminate()
    assert batches(loader) == [[0], [1]]
