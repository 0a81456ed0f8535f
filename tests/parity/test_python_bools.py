"""Arithmetic of tensors with Python's True and False."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

CALLS = {
    "add": lambda x, flag: x + flag,
    "radd": lambda x, flag: flag + x,
    "mul": lambda x, flag: x * flag,
    "rmul": lambda x, flag: flag * x,
    "sub": lambda x, flag: x - flag,
    "rsub": lambda x, flag: flag - x,
    "div": lambda x, flag: x / flag,
    "rdiv": lambda x, flag: flag / x,
    "div rounded": lambda x, flag: torch.div(x, flag, rounding_mode="trunc"),
    "floordiv": lambda x, flag: x // (flag or 2),
    "rfloordiv": lambda x, flag: flag // x,
    "mod": lambda x, flag: x % (flag or 2),
    "rmod": lambda x, flag: flag % x,
    "pow": lambda x, flag: x**flag,
    "pow_": lambda x, flag: x.clone().pow_(flag),
    "rpow": lambda x, flag: flag**x,
    "add_": lambda x, flag: x.clone().add_(flag),
    "mul_": lambda x, flag: x.clone().mul_(flag),
    "alpha of a bool": lambda x, flag: torch.add(x, flag, alpha=2),
    "alpha of a bool in place": lambda x, flag: x.clone().add_(flag, alpha=True),
    "alpha": lambda x, flag: torch.add(x, x, alpha=flag),
    "clamp": lambda x, flag: x.clamp(min=flag),
    "keyword": lambda x, flag: torch.mul(x, other=flag),
    "aten": lambda x, flag: torch.ops.aten.add(x, flag),
    "aten overload": lambda x, flag: torch.ops.aten.mul.Tensor(x, flag),
    "training": lambda x, flag: x * (not torch.is_grad_enabled()),
    "vmap": lambda x, flag: torch.vmap(lambda one: one * flag)(x),
}
VALUES = {
    "float32": torch.tensor([1.0, -2.5]),
    "float16": torch.tensor([1.0, -2.5], dtype=torch.float16),
    "int32": torch.tensor([1, -2], dtype=torch.int32),
    "int64": torch.tensor([1, -2]),
    "uint8": torch.tensor([1, 2], dtype=torch.uint8),
    "bool": torch.tensor([True, True]),
    "complex64": torch.tensor([1 + 2j, 3.0]),
}


class Call(nn.Module):
    def __init__(self, function, flag):
        super().__init__()
        self._function = function
        self._flag = flag

    def forward(self, x):
        return self._function(x, self._flag)


@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("name", CALLS)
def test_like_eager(name, dtype):
    x = VALUES[dtype]
    for flag in (True, False):
        model = Call(CALLS[name], flag)
        device = poptorch.inferenceModel(model, make_options())
        try:
            with torch.no_grad():
                expected = model(x)
        except (RuntimeError, NotImplementedError) as error:
            with pytest.raises(Exception, match=str(error).split(",")[0].split("(")[0]):
                device(x)
            continue
        out = device(x)
        assert out.dtype == (torch.int32 if expected.dtype == torch.int64 else expected.dtype)
        torch.testing.assert_close(out, expected.to(out.dtype), equal_nan=True)


BOOLS = torch.tensor([True, False])
SHIFTS = {
    "left": lambda x, y: x << y,
    "right": lambda x, y: x >> y,
    "left in place": lambda x, y: x.clone().__ilshift__(y),
    "left of a number": lambda x, y: (x << 1, y << 2),
}


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("shift", [torch.tensor([3, 1]), torch.tensor([3, 1]).byte(), BOOLS])
@pytest.mark.parametrize("bools_first", [True, False])
def test_shifts(name, shift, bools_first):
    model = Shift(SHIFTS[name])
    inputs = (BOOLS, shift) if bools_first else (shift, BOOLS)
    device = poptorch.inferenceModel(model, make_options())
    try:
        expected = model(*inputs)
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises(type(error), match=str(error)):
            device(*inputs)
        return
    torch.testing.assert_close(device(*inputs), expected, check_dtype=False)


class Shift(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, x, y):
        return self._function(x, y)


def test_training():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, ids):
            y = self.w * (ids + self.training) - ids * (not self.training)
            return y, poptorch.identity_loss((y * True).sum(), "none")

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    device = poptorch.trainingModel(model, make_options(), optimizer)
    out, _ = device(torch.arange(3))
    assert torch.equal(out, torch.tensor([1.0, 2.0, 3.0]))
    device.copyWeightsToHost()
    assert torch.equal(model.w.detach(), torch.tensor([0.0, -1.0, -2.0]))
