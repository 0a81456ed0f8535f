"""Operators that take functions: those that the device does not know."""

from torch import _higher_order_ops as operators

import popsim_torch as poptorch


def scan(_, x):
    return operators.scan(lambda c, row: (c + row, c * 1), x[0], x)


def test_in_forward(refused):
    error = refused(scan, poptorch.Error, r"\[scan\] at .*test_control_flow_operators.py:\d+")
    assert "poptorch.for_loop" in str(error)
