"""Lists, ranges and arrays as indices mean what they mean in PyTorch."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options


def assigned(x):
    y = x.clone()
    y[:, [1]] = y[:, [0]]
    y[..., [0, 3]] = 2
    y[[0]] += 1
    return y


READS = {
    "one": lambda x: x[[1]],
    "one of an axis": lambda x: x[:, [-1]],
    "several": lambda x: x[:, [0, 2]],
    "behind an ellipsis": lambda x: x[..., [-2], :],
    "none": lambda x: x[:, []].sum() + x,
    "two lists": lambda x: x[[1], [0, 2]],
    "two lists alike": lambda x: x[[0, 1], [1, 2]],
    "nested": lambda x: x[:, [[0, 1], [1, 2]]],
    "list as a tuple": lambda x: x[[[0]]],
    "list of lists as a tuple": lambda x: x[[[0, 1], [1, 2]]],
    "with a new axis": lambda x: x[None, [1]],
    "beside a slice": lambda x: x[[0], 1:2],
    "beside a tensor": lambda x: x[torch.tensor(1), [0]],
    "truth": lambda x: x[[True, False]],
    "truth of an axis": lambda x: x[:, [True, False, True]],
    "tuple": lambda x: x[..., (1, 2)],
    "range": lambda x: x[range(1)],
    "array": lambda x: x[:, np.array([1])],
    "truth in an array": lambda x: x[:, np.array([True, False, True])],
    "numbers of numpy": lambda x: x[:, [np.int64(1)]],
    "assigned": assigned,
}


class Model(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 4))
        self.read = read

    def forward(self, x):
        y = self.read(x * self.weight)
        return y, poptorch.identity_loss(y.square(), "sum")


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_values_and_gradients(read):
    torch.manual_seed(0)
    model, x = Model(read), torch.randn(2, 3, 4)
    twin = copy.deepcopy(model)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    y, loss = poptorch.trainingModel(model, make_options(), optimizer)(x)
    expected, expected_loss = twin(x)
    expected_loss.backward()
    torch.testing.assert_close(y, expected.detach())
    torch.testing.assert_close(loss, expected_loss.detach())
    changed = twin.weight - 0.1 * twin.weight.grad
    torch.testing.assert_close(model.weight.detach(), changed.detach())
