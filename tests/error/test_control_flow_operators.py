"""Operators that take functions and that the device does not support."""

import torch
from torch import _higher_order_ops as operators

import popsim_torch as poptorch


def strict(_, x):
    return operators.strict_mode(lambda y: y * 2, (x,))


def test_in_forward(refused):
    error = refused(
        strict, poptorch.Error, r"\[strict_mode\] at .*test_control_flow_operators.py:\d+"
    )
    assert "poptorch.for_loop" in str(error)


def growing(_, x):
    return operators.scan(lambda c, row: (torch.cat([c, row]), row * 1), x[0], x)


def test_a_scan_whose_carried_value_changes_its_shape(refused):
    refused(growing, poptorch.Error, r"scan\(\) at .*test_control_flow_operators.py:\d+: .*must be")
