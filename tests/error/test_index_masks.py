"""Masks as indices that have another shape than the tensor: eager PyTorch's error."""

import numpy as np
import pytest
import torch
from torch import nn

import popsim_torch as poptorch

SHORT, ROWS = torch.tensor([True, False]), torch.tensor([True, False, True])
WRONG = {
    "short": lambda x: x[SHORT],
    "long": lambda x: x[torch.tensor([True, False, True, True])],
    "uint8": lambda x: x[torch.tensor([1, 0], dtype=torch.uint8)],
    "list": lambda x: x[[True, False]],
    "array": lambda x: x[np.array([True, False])],
    "of the device": lambda x: x[x[:2, 0] > 0],
    "second dimension": lambda x: x[:, ROWS],
    "last dimension": lambda x: x[..., ROWS],
    "two dimensions": lambda x: x[torch.ones(2, 2, dtype=torch.bool, device="cpu")],
    "written": lambda x: x.__setitem__(SHORT, 1.0),
    "index_put_": lambda x: x.index_put_((SHORT,), torch.tensor(1.0)),
}
GOOD = {
    "rows": lambda x: x[ROWS],
    "columns": lambda x: x[:, SHORT],
    "last dimension": lambda x: x[..., SHORT],
    "with indices": lambda x: x[ROWS, torch.tensor([0, 1])],
    "behind None": lambda x: x[None, :, SHORT],
    "written": lambda x: x.__setitem__((ROWS, 1), torch.tensor([8.0, 9.0])),
    "written on the device": lambda x: x.__setitem__(x[:, 0] > 0, 7.0),
}


class Indexed(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, x):
        x = x.clone()
        found = self._function(x)
        return x if found is None else found


X = torch.arange(6.0).reshape(3, 2)


@pytest.mark.parametrize("name", WRONG)
def test_it_is_refused(name):
    model = Indexed(WRONG[name])
    with pytest.raises(IndexError, match="shape of the mask") as eager:
        model(X)
    with pytest.raises(IndexError, match="shape of the mask") as caught:
        poptorch.inferenceModel(model)(X)
    assert str(eager.value) in str(caught.value)


@pytest.mark.parametrize("name", GOOD)
def test_it_works(name):
    model = Indexed(GOOD[name])
    assert torch.equal(poptorch.inferenceModel(model)(X), model(X))
