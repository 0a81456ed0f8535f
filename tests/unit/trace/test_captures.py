"""Placeholders in bodies for tensors from outside."""

from unittest import mock

import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.trace.control import captures as bodies
from popsim_torch.trace.control.captures import Captures
from tests.options import make_options


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        h = self.fc(x)

        def body(a):
            (b,) = poptorch.for_loop(2, lambda c: c * 2, [h])
            (c,) = poptorch.cond(h.sum() > 0, lambda d: d * 2, [h], lambda d: d, [h])
            return a + b + c

        (y,) = poptorch.for_loop(2, body, [x])
        return poptorch.identity_loss(y, "sum")


def test_one_tensor_stands_for_one_from_outside():
    # A second placeholder would replace the first: its identity could be that of any later tensor,
    # which would then be taken for the tensor from outside.
    made = []

    class Noted(Captures):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(bodies, "Captures", Noted):
        poptorch.trainingModel(model, make_options(), optimizer).compile(torch.ones(2, 4))
    assert any(captures._found for captures in made)
    for captures in made:
        assert set(captures._outside) == {id(own.tensor) for _, own in captures._found.values()}
