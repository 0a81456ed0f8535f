"""The quotient of the least integer and -1, which ends the process of eager PyTorch."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch

QUOTIENTS = {
    "tensor": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "number": lambda x, y: torch.div(x, -1, rounding_mode="trunc"),
    "one number": lambda x, y: torch.div(x[0, 0], -1, rounding_mode="trunc"),
    "in place": lambda x, y: x.clone().div_(y, rounding_mode="trunc"),
    # PyTorch's greatest common divisor of these two is -1.
    "lcm": lambda x, y: torch.lcm(x, y * -5),
}


class Quotient(nn.Module):
    def __init__(self, function, dtype):
        super().__init__()
        self._function = function
        self._dtype = dtype

    def forward(self, x, y):
        x = x.to(self._dtype)
        return self._function(x.masked_fill(x == -100, torch.iinfo(self._dtype).min), y)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", QUOTIENTS)
def test_a_run_fails(h, name, dtype):
    model = poptorch.inferenceModel(Quotient(QUOTIENTS[name], dtype), h.make_options())
    x = torch.tensor([[-100, 7], [12, -3]], dtype=torch.int32)
    y = torch.full((2, 2), -1, dtype=torch.int32)
    for _ in range(2):
        line = r"while running '.*' \(aten, .*test_integer_quotients.py:\d+\): "
        with pytest.raises(poptorch.Error, match=rf"{line}.*too large for {str(dtype)[6:]}"):
            model(x, y)
        good = x.clone()
        good[0, 0] = 30
        assert torch.equal(model(good, y), QUOTIENTS[name](good, y))


def test_other_divisors_and_shorter_integers(h):
    class Divided(nn.Module):
        def forward(self, x, y, short):
            shorter = torch.div(short, torch.full_like(short, -1), rounding_mode="trunc")
            return torch.div(x, y, rounding_mode="trunc"), shorter, torch.lcm(x, y)

    x = torch.tensor([-(2**31), -(2**31), 9], dtype=torch.int32)
    inputs = x, torch.tensor([2, 1, -1], dtype=torch.int32), torch.tensor([-128], dtype=torch.int8)
    results = poptorch.inferenceModel(Divided(), h.make_options())(*inputs)
    for result, expected in zip(results, Divided()(*inputs), strict=True):
        assert torch.equal(result, expected)
