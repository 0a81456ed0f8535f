"""Lists, dicts and sets of a model are the same objects after compilation, with the same items."""

import time
import weakref
from collections import OrderedDict, defaultdict, deque
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.parity.compare import quiet_options

IN_A_CYCLE = [1.0]
IN_A_CYCLE.append(IN_A_CYCLE)


class Target:
    pass


class OfNoModule:
    __module__ = None


class Model(nn.Module):
    def __init__(self, change=None, **attributes):
        super().__init__()
        self.change = change
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        h = x * len(IN_A_CYCLE)
        if self.change is not None:
            self.change(self, h)
        return h


def compiled(model):
    x = torch.ones(2)
    assert torch.equal(poptorch.inferenceModel(model, quiet_options())(x), 2 * x)
    return model


CHANGES = {
    "a list in a dict": ({"a": []}, lambda kept, h: kept["a"].append(h)),
    "a deque in a dict": ({"a": deque(maxlen=2)}, lambda kept, h: kept["a"].append(h)),
    "a default dict": ([defaultdict(list)], lambda kept, h: kept[0]["x"].append(h)),
    "a list in a tuple": (([],), lambda kept, h: kept[0].append(h)),
    "a set": ({1}, lambda kept, h: kept.add(h)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_containers_are_as_before(name):
    kept, change = CHANGES[name]
    inner = [*kept.values()] if isinstance(kept, dict) else [*kept]
    before = repr(kept)
    model = compiled(Model(lambda model, h: change(model.kept, h), kept=kept))
    assert model.kept is kept
    assert repr(kept) == before
    assert all(a is b for a, b in zip(inner, getattr(kept, "values", lambda: kept)(), strict=True))


def test_containers_in_a_cycle():
    rows = []
    rows.append(rows)
    model = compiled(Model(lambda model, h: model.rows.append(h), rows=rows))
    assert len(rows) == 1
    assert model.rows[0] is rows


def test_numbers_that_are_none_do_not_change(caplog):
    compiled(Model(padding=float("nan"), limits=[float("nan"), 1.0]))
    assert not caplog.records


def test_objects_that_pose_as_others():
    items = OrderedDict(a=1)
    mock = MagicMock(spec=dict)
    model = Model(items=items, proxy=weakref.proxy(items), mock=mock, at=OfNoModule())
    target = Target()
    model.gone = weakref.proxy(target)
    del target
    compiled(model)


def test_the_time_grows_with_the_number_of_replaced_tensors():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = torch.zeros(2)

        def forward(self, x):
            self.last = x + 0
            return self.last

    def seconds(number):
        layers = nn.Sequential(*(Layer() for _ in range(number)))
        start = time.process_time()
        poptorch.inferenceModel(layers, quiet_options())(torch.ones(2))
        return time.process_time() - start

    seconds(10)
    # (with each layer looked for in all others it grows with the cube)
    assert seconds(450) < 5 * min(seconds(150), seconds(150))
