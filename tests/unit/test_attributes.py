"""Attributes: nested marks are combined, and change no value."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import UsageTypeError
from tests.options import make_options


def test_marks_hold_inside_of_the_statement_only():
    with poptorch.Attribute(__outline={"layer": "x"}, other={"a": 1}):
        assert poptorch.accessAttributes("__outline") == {"layer": "x"}
        assert poptorch.accessAttributes("other") == {"a": 1}
    assert poptorch.accessAttributes("__outline") == {}


def test_inner_marks_add_to_the_outer_ones_which_come_back():
    with poptorch.Attribute(a={"k": "outer", "l": 1}):
        with poptorch.Attribute(a={"k": "inner"}, b={}):
            assert poptorch.accessAttributes("a") == {"k": "inner", "l": 1}
        assert poptorch.accessAttributes("a") == {"k": "outer", "l": 1}


def test_marks_come_back_after_an_error():
    with pytest.raises(ZeroDivisionError), poptorch.Attribute(a={"k": 1}):
        _ = 1 // 0
    assert poptorch.accessAttributes("a") == {}


def test_one_object_may_be_entered_again_inside_of_itself():
    marks = poptorch.Attribute(a={"k": 1})
    with marks:
        with marks:
            pass
        assert poptorch.accessAttributes("a") == {"k": 1}
    assert poptorch.accessAttributes("a") == {}


@pytest.mark.parametrize("bad", [3, "x", ["a"], {1: "a"}])
def test_marks_are_dictionaries_of_strings(bad):
    with pytest.raises(UsageTypeError, match=r"Attribute\(__outline="):
        poptorch.Attribute(__outline=bad)


def test_marks_change_no_value():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)
            self.seen = []

        def forward(self, x):
            with poptorch.Attribute(__outline={"layer": "fc"}):
                self.seen.append(poptorch.accessAttributes("__outline"))
                return self.fc(x)

    net = Net()
    x = torch.randn(4, 3)
    model = poptorch.inferenceModel(net, make_options())
    torch.testing.assert_close(model(x), net.fc(x).detach())
    assert net.seen == [{"layer": "fc"}]
