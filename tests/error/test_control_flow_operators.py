"""Operators that take functions: conditions and loops on the device."""

import pytest
import torch
from torch import _higher_order_ops as operators

import popsim_torch as poptorch

MISTAKES = {
    "cond": lambda _, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    "while_loop": lambda _, x: operators.while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (x[0, 0], x)
    ),
    "scan": lambda _, x: operators.scan(lambda c, row: (c + row, c * 1), x[0], x),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_in_forward(refused, name):
    match = rf"\[{name}\] at .*test_control_flow_operators.py:\d+"
    error = refused(MISTAKES[name], poptorch.Error, match)
    assert "torch.where" in str(error)
