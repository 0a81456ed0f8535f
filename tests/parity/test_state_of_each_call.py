"""Attributes that each call of forward sets first are not told of; those of classes are."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.parity.compare import quiet_options


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = None

    def forward(self, x):
        return x if self.mask is None else x * self.mask


class Base(nn.Module):
    calls = 0
    last = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.part = nn.Linear(2, 2), Part()
        self.h, self.rows, self.seen = None, 0, {}
        self.outs = []
        self.loss, self.losses = math.nan, [math.nan]
        self.table = np.zeros(3)

    def from_state(self, x):
        return x if self.h is None else x + self.h


class SetFirst(Base):
    def forward(self, x):
        self.h = None
        for _ in range(2):
            self.h = self.from_state(x)
        return self.h * 1


class SetBeforeACall(Base):
    def forward(self, x):
        self.rows = x.shape[0]
        self.h = x > 0
        return self.from_state(x) * self.rows


class SetOnAPart(Base):
    def forward(self, x):
        self.part.mask = x > 0
        return self.part(x)


class Recorded(Base):
    def __init__(self):
        super().__init__()
        self.fc.register_forward_hook(self.keep)

    def keep(self, layer, inputs, out):
        self.seen["fc"] = out

    def forward(self, x):
        return self.fc(x) + self.seen["fc"]


class Emptied(Base):
    def forward(self, x):
        del self.outs[:]
        self.outs.append(x)
        return sum(self.outs)


class NoNumbers(Base):
    def forward(self, x):
        self.loss = self.losses[0] = math.nan
        return x * 2


class Written(Base):
    """Has numbers that only the user reads."""

    def forward(self, x):
        self.rows = x.shape[0]
        return x * 2


class OfTheShape(Base):
    def forward(self, x):
        if self.h is None:
            self.h = torch.ones_like(x)
        return x + self.h


class Replaced(Base):
    def forward(self, x):
        self.outs[:] = []
        self.outs.append(x)
        self.table = np.array(["a"] * 3)
        return sum(self.outs)


ANEW = [
    *(SetFirst, SetBeforeACall, SetOnAPart, Recorded, Emptied, NoNumbers, Written),
    *(OfTheShape, Replaced),
]


class SetOnAPartLater(Base):
    def forward(self, x):
        y = self.part(x)
        self.part.mask = x + 1
        return y


class SetOnACondition(Base):
    def forward(self, x):
        if self.rows == 0:
            self.rows = 1
            self.h = None
        self.h = self.from_state(x)
        return self.h * 1


class AskedFor(Base):
    def forward(self, x):
        self.seen["x"] = x + self.seen["x"] if "x" in self.seen else x
        return self.seen["x"] * 1


class FirstOfInputs(Base):
    def forward(self, x):
        if self.h is None:
            self.h = torch.zeros_like(x)
            self.h[0] = x[0]
        return x + self.h


class SetElsewhere(Base):
    def prepare(self, x):
        self.rows = 1
        self.fc.bias.data.copy_(x.mean(0))

    def forward(self, x):
        if self.rows == 0:
            self.prepare(x)
        return self.fc(x)


class Sums(nn.Module):
    """Has an attribute of the same name as one that a parent sets on another part."""

    def __init__(self):
        super().__init__()
        self.mask = None

    def forward(self, x):
        self.mask = x if self.mask is None else self.mask + x
        return self.mask * 1


class WithSums(Base):
    def __init__(self):
        super().__init__()
        self.sums = Sums()

    def forward(self, x):
        self.part.mask = x > 0
        return self.sums(self.part(x))


class FirstInFirstOut(Base):
    def __init__(self):
        super().__init__()
        self.outs = [0.0, 0.0]

    def forward(self, x):
        self.outs.append(x)
        del self.outs[0]
        return sum(self.outs)


class Shifted(Base):
    def __init__(self):
        super().__init__()
        self.outs = [0.0, 0.0]

    def forward(self, x):
        self.outs[1:] = self.outs[:-1]
        self.outs[0] = x
        return sum(self.outs)


class Returned(Base):
    def forward(self, x):
        self.outs.append(x)
        return self.outs


class CountedInTheClass(Base):
    def forward(self, x):
        CountedInTheClass.calls += 1
        return x * self.calls


class KeptInTheClass(Base):
    def forward(self, x):
        type(self).last = x if self.last is None else self.last + x
        return self.last * 1


class OfABaseClass(Base):
    def forward(self, x):
        Base.last = x if Base.last is None else Base.last + x
        return Base.last * 1


KEPT = {
    SetOnAPartLater: "assigns a tensor to the attribute 'mask'",
    SetOnACondition: "assigns a tensor to the attribute 'h'",
    WithSums: "forward of Sums assigns a tensor to the attribute 'mask'",
    FirstInFirstOut: "puts tensors into the attribute 'outs'",
    Shifted: "puts tensors into the attribute 'outs'",
    Returned: "puts tensors into the attribute 'outs'",
    FirstOfInputs: "assigns a tensor to the attribute 'h'",
    SetElsewhere: "the attribute 'rows' from 0 to 1",
    AskedFor: "puts tensors into the attribute 'seen'",
    CountedInTheClass: "the attribute 'calls' of the class CountedInTheClass from 0 to 1",
    KeptInTheClass: "assigns a tensor to the attribute 'last' of the class KeptInTheClass",
    OfABaseClass: "assigns a tensor to the attribute 'last' of the class Base",
}
X = torch.tensor([[1.0, -2.0], [3.0, 4.0]])


@pytest.fixture(autouse=True)
def classes_as_before(monkeypatch):
    for kind in (Base, *KEPT):
        for name in ("calls", "last"):
            monkeypatch.setattr(kind, name, getattr(Base, name))


def told(caplog):
    return [text for text in caplog.messages if text.startswith("forward of")]


@pytest.mark.parametrize("kind", ANEW)
def test_what_each_call_makes_anew_is_not_told_of(kind, caplog):
    eager, model = kind(), poptorch.inferenceModel(kind(), quiet_options())
    for x in (X, X + 1):
        torch.testing.assert_close(model(x), eager(x).detach())
    assert told(caplog) == []


@pytest.mark.parametrize("kind", KEPT)
def test_what_a_later_call_would_read_is_told_of(kind, caplog):
    net = kind()
    compiled = poptorch.inferenceModel(net, quiet_options())
    first = copy.deepcopy(compiled(X))
    torch.testing.assert_close(compiled(X), first, rtol=0, atol=0)
    assert any(KEPT[kind] in text for text in told(caplog))
    assert Base.last is None
    assert kind.last is None


class Scaled(Base):
    def forward(self, x):
        self.h = x
        return x * self.rows


@pytest.mark.parametrize(("name", "is_read"), [("best", False), ("h", False), ("rows", True)])
def test_attributes_set_after_the_copy(name, is_read, caplog):
    net = Scaled()
    model = poptorch.inferenceModel(net, quiet_options())
    net(X)
    setattr(net, name, 3)
    model(X)
    assert ["had copied its attributes" in text for text in caplog.messages] == [True] * is_read


def test_a_buffer_that_forward_registers_is_gone_after_the_trace():
    class Registers(Base):
        def forward(self, x):
            self.register_buffer("late", x + 1, persistent=False)
            return self.late * 1

    net = Registers()
    poptorch.inferenceModel(net, quiet_options())(X)
    assert not hasattr(net, "late")
    net.register_buffer("late", torch.ones(1))
    assert "late" in net.state_dict()


def test_models_that_have_other_parts_in_a_copy(caplog):
    for net in (nn.LSTM(2, 3), torch.fx.symbolic_trace(nn.Linear(2, 3))):
        poptorch.inferenceModel(net, quiet_options())(X)
    assert caplog.messages == []
