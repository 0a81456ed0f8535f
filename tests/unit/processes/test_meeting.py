"""Processes find each other in a store, also in one that earlier processes have left."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from popsim_torch.processes.meeting import Absent, meet


def meet_all(store, size):
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: meet(store, rank, size, 20), range(size)))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_get_one_name(size):
    store = dist.HashStore()
    names = [meet_all(store, size) for _ in range(3)]  # with the values of earlier meetings
    assert all(len(set(one)) == 1 for one in names)
    assert len({one[0] for one in names}) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_earlier_processes_do_not_count(rank):
    store = dist.HashStore()
    meet_all(store, 2)
    with pytest.raises(Absent) as caught:
        meet(store, rank, 2, 0.3)
    if rank == 0:
        assert caught.value.ranks == {1}


def test_the_absent_are_named():
    with pytest.raises(Absent) as caught:
        meet(dist.HashStore(), 1, 4, 0.1)
    assert caught.value.ranks == {0, 2, 3}
