"""Changes in place whose result does not fit into the tensor: eager PyTorch's error."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch

HALF = torch.tensor([0.5])
INTEGERS, BOOLS, FLOATS = (
    torch.tensor([1, 5]),
    torch.tensor([True, False]),
    torch.tensor([1.0, 2.5]),
)
WRONG = {
    "number": (INTEGERS, lambda x: x.__imul__(2.5)),
    "bools": (BOOLS, lambda x: x.mul_(2.5)),
    "integer to bools": (BOOLS, lambda x: x.mul_(2)),
    "tensor": (INTEGERS, lambda x: x.mul_(HALF)),
    "no dimension": (INTEGERS, lambda x: x.mul_(HALF[0])),
    "addcmul_": (INTEGERS, lambda x: x.addcmul_(HALF, HALF)),
    "complex": (FLOATS, lambda x: x.__iadd__(1j)),
    "complex product": (FLOATS, lambda x: x.mul_(torch.tensor([1j]))),
    "out": (INTEGERS, lambda x: torch.mul(x, 2.5, out=x)),
    "list": (INTEGERS, lambda x: torch._foreach_mul_([x], 2.5)),
    "sum": (INTEGERS, lambda x: x.__iadd__(0.5)),
}
GOOD = {
    "fill_": (INTEGERS, lambda x: x.fill_(2.5)),
    "copy_": (INTEGERS, lambda x: x.copy_(torch.tensor([1.5, 2.5]))),
    "element": (INTEGERS, lambda x: x.__setitem__(0, 2.5)),
    "integers": (FLOATS, lambda x: x.mul_(INTEGERS)),
    "bool": (INTEGERS, lambda x: x.mul_(True)),
    "comparison": (INTEGERS, lambda x: x.gt_(1.5)),
    "out": (FLOATS, lambda x: torch.mul(INTEGERS, 3, out=x)),
}


class Changed(nn.Module):
    def __init__(self, change):
        super().__init__()
        self._change = change

    def forward(self, x):
        x = x.clone()
        self._change(x)
        return x


@pytest.mark.parametrize("name", WRONG)
def test_it_is_refused(name):
    x, change = WRONG[name]
    with pytest.raises(RuntimeError, match="can't be cast to the desired output"):
        Changed(change)(x)
    with pytest.raises(RuntimeError, match="can't be cast to the desired output"):
        poptorch.inferenceModel(Changed(change))(x)


@pytest.mark.parametrize("name", GOOD)
def test_it_is_converted(name):
    x, change = GOOD[name]
    expected = Changed(change)(x)
    out = poptorch.inferenceModel(Changed(change))(x)
    assert torch.equal(out.to(expected.dtype), expected)
