"""int64 values out of the range of int32: computed with in full, and said so once."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch

WIDE = (2**31, -(2**31) - 1, 2**40 + 5, torch.iinfo(torch.int64).min)


class Bucket(nn.Module):
    def forward(self, x):
        return x % 1000


def warnings_in(caplog):
    return [
        one.getMessage() for one in caplog.records if "out of the range of int32" in one.message
    ]


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch):
    monkeypatch.setattr("popsim_torch.logs._warned", set())


@pytest.mark.parametrize("value", WIDE)
@pytest.mark.parametrize("compiled", [False, True])
def test_in_a_call(value, compiled, caplog):
    model = poptorch.inferenceModel(Bucket())
    x = torch.tensor([[1, 2, 3], [4, 5, 6]])
    if compiled:
        model(x)
    assert not warnings_in(caplog)
    for wide in (x.clone(), x.clone().t().contiguous().t()):  # in order, and not
        wide[1, 2] = value
        assert torch.equal(model(wide), (wide % 1000).int())
    (told,) = warnings_in(caplog)
    assert told.startswith("Input x has integers")
    assert torch.equal(model(x), x.int())


def test_the_limits_themselves(caplog):
    x = torch.tensor([2**31 - 1, -(2**31), 0])
    assert torch.equal(poptorch.inferenceModel(Bucket())(x), (x % 1000).int())
    assert not warnings_in(caplog)


def test_in_structures(caplog):
    class Both(nn.Module):
        def forward(self, pair):
            return (pair[0] + pair[1]) % 7

    model = poptorch.inferenceModel(Both())
    pair = [torch.tensor([1]), torch.tensor([2**40])]
    assert model(pair).item() == (1 + 2**40) % 7
    (told,) = warnings_in(caplog)
    assert told.startswith("Input pair[1] has")


def test_in_a_queue(caplog):
    elements = [torch.tensor([1]), torch.tensor([2**40])]
    queue = poptorch.InfeedQueue(elements)

    @poptorch.function
    def total():
        return poptorch.repeat(2, lambda value, x: value + x % 1000, torch.zeros(1), queue)

    assert total().item() == 1 + 2**40 % 1000
    (told,) = warnings_in(caplog)
    assert told.startswith("InfeedQueue: element 1 has")


def test_in_what_a_loop_reads(caplog):
    @poptorch.function
    def total(step):
        zero = torch.zeros(1, dtype=torch.int32)
        return poptorch.repeat(2, lambda value: value + (step % 1000).int(), zero)

    assert total(torch.tensor([2**40])).item() == 2 * (2**40 % 1000)
    assert total(torch.tensor([3])).item() == 6
    (told,) = warnings_in(caplog)
    assert told.startswith("A tensor that the loop reads")
