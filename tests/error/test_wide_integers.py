"""int64 values that do not fit the device's integers are refused, not cut off."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch

WIDE = (2**31, -(2**31) - 1, 2**40, torch.iinfo(torch.int64).min)


class Next(nn.Module):
    def forward(self, x):
        return x + 0


def next_model():
    return poptorch.inferenceModel(Next())


@pytest.mark.parametrize("value", WIDE)
@pytest.mark.parametrize("compiled", [False, True])
def test_in_a_call(value, compiled):
    model = next_model()
    x = torch.tensor([[1, 2, 3], [4, 5, 6]])
    if compiled:
        model(x)
    for wide in (x.clone(), x.clone().t().contiguous().t()):  # in order, and not
        wide[1, 2] = value
        with pytest.raises(poptorch.Error, match=f"Input x has the integer {value}, .* to 2147"):
            model(wide)
    assert torch.equal(model(x), x.int())


def test_the_limits_themselves():
    x = torch.tensor([2**31 - 1, -(2**31), 0])
    result = next_model()(x)
    assert result.dtype == torch.int32 and torch.equal(result.long(), x)


def test_in_keywords_and_structures():
    class Pair(nn.Module):
        def forward(self, pair, *, more):
            return pair[0] + pair[1] + more

    model = poptorch.inferenceModel(Pair())
    small, wide = torch.tensor([1]), torch.tensor([2**40])
    with pytest.raises(poptorch.Error, match=r"Input pair\[1\] has the integer 1099511627776"):
        model([small, wide], more=small)
    model([small, small], more=small)
    with pytest.raises(poptorch.Error, match="Input more has the integer"):
        model([small, small], more=wide)
    assert model([small, small], more=small).item() == 3


def test_in_a_queue():
    def elements():
        yield torch.tensor([1], dtype=torch.int64)
        yield torch.tensor([2**40])

    queue = poptorch.InfeedQueue(elements)

    @poptorch.function
    def total():
        return poptorch.repeat(2, lambda value, x: value + x, torch.zeros(1), queue)

    with pytest.raises(poptorch.Error, match=r"element 1.*has the integer 1099511627776"):
        total()


def test_in_what_a_loop_reads():
    @poptorch.function
    def total(step):
        return poptorch.repeat(2, lambda value: value + step, torch.zeros(1, dtype=torch.int32))

    with pytest.raises(poptorch.Error, match="loop reads has the integer 1099511627776"):
        total(torch.tensor([2**40]))
    assert total(torch.tensor([3])).item() == 6
