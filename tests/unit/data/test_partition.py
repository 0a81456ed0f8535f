"""Blocks of a dataset for several processes."""

import pickle
from itertools import chain

import pytest
import torch

from popsim_torch.data.partition import Partition


def parts(num_samples, num_processes, batch_size, drop_last, seed=None):
    return [
        Partition(num_samples, process, num_processes, batch_size, drop_last, seed)
        for process in range(num_processes)
    ]


def joined(processes):
    return list(chain.from_iterable(processes))


def test_each_process_gets_a_contiguous_block_of_whole_batches():
    blocks = [list(part) for part in parts(23, 2, 3, drop_last=True)]
    assert blocks == [list(range(0, 9)), list(range(9, 18))]


def test_without_dropping_the_first_processes_get_one_more():
    blocks = [list(part) for part in parts(11, 3, 2, drop_last=False)]
    assert blocks == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("num_samples", [0, 1, 7, 24, 100])
@pytest.mark.parametrize("num_processes", [2, 5])
def test_lengths_are_those_of_the_blocks(drop_last, num_samples, num_processes):
    for part in parts(num_samples, num_processes, 3, drop_last, seed=1):
        assert len(list(part)) == len(part)


def test_too_few_samples_make_empty_blocks():
    assert [list(part) for part in parts(5, 2, 3, drop_last=True)] == [[], []]


def test_passes_in_the_order_of_the_dataset_are_alike():
    (part, _) = parts(8, 2, 2, drop_last=True)
    assert list(part) == list(part) == [0, 1, 2, 3]


def test_shuffled_blocks_are_those_of_one_permutation_that_goes_on():
    generator = torch.Generator().manual_seed(7)
    processes = parts(12, 3, 2, drop_last=True, seed=7)
    for _ in range(3):
        permutation = torch.randperm(12, generator=generator).tolist()
        assert joined(processes) == permutation


def test_every_other_pass_takes_what_the_next_one_leaves_out():
    generator = torch.Generator().manual_seed(5)
    processes = parts(13, 2, 3, drop_last=True, seed=5)  # 1 sample is left over
    for expected in (slice(1, 13), slice(0, 12), slice(1, 13)):
        permutation = torch.randperm(13, generator=generator).tolist()
        assert joined(processes) == permutation[expected]


def test_two_passes_touch_every_position_when_more_is_left_over_than_a_block():
    positions = set()
    generator = torch.Generator().manual_seed(5)
    processes = parts(7, 4, 1, drop_last=True, seed=5)  # blocks of 1, 3 samples left over
    for _ in range(2):
        permutation = torch.randperm(7, generator=generator).tolist()
        positions |= {permutation.index(i) for part in processes for i in part}
    assert positions == set(range(7))


def test_shuffling_without_dropping_uses_all_samples():
    blocks = [list(part) for part in parts(11, 3, 2, drop_last=False, seed=3)]
    assert [len(block) for block in blocks] == [4, 4, 3]
    assert sorted(chain.from_iterable(blocks)) == list(range(11))


def test_a_copy_in_another_process_goes_on_with_the_same_passes():
    (part, _) = parts(20, 2, 1, drop_last=True, seed=3)
    next(iter(part))
    copy = pickle.loads(pickle.dumps(part))
    assert list(copy) == list(part)
