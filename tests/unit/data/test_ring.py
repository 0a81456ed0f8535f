"""The shared memory of the ring buffer."""

import gc
import os

import pytest
import torch

from popsim_torch.data.layout import TensorType
from popsim_torch.data.ring import Ring, nameless_file

TYPES = [
    TensorType(torch.float32, (2, 3)),
    TensorType(torch.bool, ()),
    TensorType(torch.int64, (0, 4)),
]


@pytest.fixture
def file():
    descriptor = nameless_file()
    yield descriptor
    os.close(descriptor)


def test_tensors_have_the_types_asked_for(file):
    tensors = Ring(TYPES, 2, file).tensors(1)
    assert [(t.dtype, tuple(t.shape)) for t in tensors] == TYPES


def test_two_rings_on_one_file_share_their_slots(file):
    ours, others = Ring(TYPES, 3, file), Ring(TYPES, 3, file)
    for slot in range(3):
        ours.tensors(slot)[0].fill_(slot)
    assert [others.tensors(slot)[0].sum() for slot in range(3)] == [0, 6, 12]


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.complex64, torch.int16],
)
def test_every_element_type_keeps_its_values(file, dtype):
    (tensor,) = Ring([TensorType(dtype, (5,))], 1, file).tensors(0)
    tensor.copy_(torch.arange(5))
    assert torch.equal(tensor, torch.arange(5).to(dtype))


def test_tensors_begin_at_cache_lines(file):
    for tensor in Ring([TensorType(torch.int8, (3,))] * 4, 1, file).tensors(0):
        assert tensor.data_ptr() % 64 == 0


def test_a_slot_is_dead_when_the_last_view_of_it_is_gone(file):
    dead = []
    tensors = Ring(TYPES, 2, file).tensors(1, dead.append)
    row = tensors[0][1]
    del tensors
    gc.collect()
    assert dead == []
    del row
    assert dead == [1]


def test_a_slot_without_numbers_is_dead_at_once(file):
    dead = []
    Ring([TensorType(torch.float32, (0,))], 1, file).tensors(0, dead.append)
    assert dead == [0]


def test_tensors_outlive_the_ring_and_the_file():
    descriptor = nameless_file()
    ring = Ring(TYPES, 1, descriptor)
    tensor = ring.tensors(0)[0].fill_(3)
    os.close(descriptor)
    del ring
    assert tensor.sum() == 18


def test_memory_and_descriptors_are_given_back():
    def use():
        descriptor = nameless_file()
        Ring(TYPES, 2, descriptor).tensors(0)
        os.close(descriptor)

    use()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        use()
    assert len(os.listdir("/proc/self/fd")) == before
