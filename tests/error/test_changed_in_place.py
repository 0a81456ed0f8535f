"""An in-place change of a value that a gradient needs: autograd's message, and the line."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


class Model(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.program = program

    def forward(self, x):
        return poptorch.identity_loss(self.program(x * self.weight), "sum")


def in_forward(a):
    b = torch.exp(a)  # here
    b += 1
    return b


def behind_a_loop(a):
    a, i = poptorch.for_loop(3, lambda a, i: (a * 2, i + 1), [a, torch.zeros(1)])
    square = a * a  # here
    a += i
    return square


def in_a_loop(a):
    def body(a, i):
        b = torch.exp(a)
        b += 1
        return b, i + 1

    a, _ = poptorch.for_loop(3, body, [a, torch.zeros(1)])  # here
    return a


def line_of(function):
    with open(__file__, encoding="utf-8") as file:
        lines = file.read().splitlines()
    first = function.__code__.co_firstlineno
    return next(n for n, text in enumerate(lines[first:], first + 1) if text.endswith("# here"))


@pytest.mark.parametrize("program", [in_forward, behind_a_loop, in_a_loop])
def test_in_a_training_model(program):
    model = Model(program)
    executor = poptorch.trainingModel(
        model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.1)
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        executor(torch.ones(3))
    assert isinstance(caught.value, poptorch.Error)
    assert f"gradient of the call at {__file__}:{line_of(program)};" in str(caught.value)


@pytest.mark.parametrize("program", [in_forward, behind_a_loop])
def test_in_the_body_of_a_device_loop(program):
    model = Model(program)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @poptorch.function
    def train():
        def body(a, i):
            optimizer.zero_grad()
            model(a).backward()
            optimizer.step()
            return a, i + 1

        return poptorch.repeat(2, body, (torch.ones(3), 0))

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        train()
    assert isinstance(caught.value, poptorch.Error)
    assert f"gradient of the call at {__file__}:{line_of(program)};" in str(caught.value)
