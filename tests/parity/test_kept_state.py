"""State that forward keeps in objects, layers, arrays and strings is told of; constants are not."""

import sys
import types
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.parity.compare import quiet_options


class Cache:
    def __init__(self):
        self.h = None
        self.rows = []
        self.calls = 0

    def update(self, x):
        self.h = x if self.h is None else self.h + x
        return self.h

    def append(self, x):
        self.rows.append(x)
        return sum(self.rows)

    def reset(self):
        self.rows.clear()
        self.h = None


class Keys(dict):
    pass


class Object(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = Cache()

    def forward(self, x):
        return self.cache.update(x) * 1


class InAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.caches = {"layers": [Cache(), Cache()]}

    def forward(self, x):
        for cache in self.caches["layers"]:
            x = cache.update(x) * 1
        return x


class InAnObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.state = types.SimpleNamespace(caches=[Cache()])

    def forward(self, x):
        return self.state.caches[0].append(x) * 1


class MadeLate(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = None

    def forward(self, x):
        if self.cache is None:
            self.cache = Cache()
        return self.cache.update(x) * 1


class CountedThere(Object):
    def forward(self, x):
        self.cache.calls += 1
        return x * self.cache.calls


class OfADict(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys = Keys()

    def forward(self, x):
        self.keys["h"] = self.keys["h"] + x if "h" in self.keys else x
        return self.keys["h"] * 1


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = deque(maxlen=2)

    def forward(self, x):
        self.last.append(x)
        return sum(self.last)


class OfALayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Identity()
        self.layer.h = None

    def forward(self, x):
        result = self.layer(x) if self.layer.h is None else self.layer(x) + self.layer.h
        self.layer.h = result
        return result * 1


class Array(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = np.zeros(2, np.float32)

    def forward(self, x):
        self.n += 1
        return x + torch.from_numpy(self.n.copy())


class NewArray(Array):
    def forward(self, x):
        self.n = self.n + 1
        return x + torch.from_numpy(self.n)


class InADict(nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = {"steps": [0, 0]}

    def forward(self, x):
        self.counts["steps"][1] += 1
        return x * self.counts["steps"][1]


class Mode(nn.Module):
    def __init__(self):
        super().__init__()
        self.mode = "first"

    def forward(self, x):
        factor = 1 if self.mode == "first" else 2
        self.mode = "later"
        return x * factor


ENTRIES = {}
ROWS = []
STEPS = 0
LAST = torch.zeros(2)
FIRST = None


class Globals(nn.Module):
    def forward(self, x):
        ENTRIES["h"] = ENTRIES.get("h", 0) + x
        return ENTRIES["h"] * 1


def append(x):
    ROWS.append(x)
    return sum(ROWS)


class GlobalsOfAFunction(nn.Module):
    def forward(self, x):
        return append(x) * 1


class GlobalNumber(nn.Module):
    def forward(self, x):
        global STEPS
        STEPS += 1
        return x * STEPS


class GlobalTensor(nn.Module):
    def forward(self, x):
        global LAST
        result = x + LAST
        LAST = result
        return result * 1


class GlobalNone(nn.Module):
    def forward(self, x):
        global FIRST
        FIRST = x if FIRST is None else FIRST + x
        return FIRST * 1


def new_globals(patch):
    for name in ("ENTRIES", "ROWS", "SEEN", "BY_SIZE"):
        patch.setattr(sys.modules[__name__], name, type(globals()[name])())
    for name in ("STEPS", "LAST", "FIRST"):
        patch.setattr(sys.modules[__name__], name, globals()[name])


@pytest.fixture(autouse=True)
def own_globals(monkeypatch):
    new_globals(monkeypatch)


STATES = {
    Object: "forward of Object assigns a tensor to the attribute 'h' of its Cache",
    InAList: "forward of InAList assigns a tensor to the attribute 'h' of its Cache",
    InAnObject: "forward of InAnObject puts tensors into the attribute 'rows' of its Cache",
    MadeLate: "forward of MadeLate assigns a tensor to the attribute 'cache'",
    CountedThere: "forward of CountedThere changes the attribute 'calls' of its Cache from 0 to 1",
    OfADict: "forward of OfADict puts tensors into the attribute 'keys'",
    Last: "forward of Last puts tensors into the attribute 'last'",
    OfALayer: "forward of OfALayer assigns a tensor to the attribute 'h' of its Identity",
    Array: "forward of Array changes the array in the attribute 'n'",
    NewArray: "forward of NewArray changes the array in the attribute 'n'",
    InADict: "forward of InADict changes numbers in the attribute 'counts'",
    Globals: "forward of Globals puts tensors into the global name 'ENTRIES'",
    GlobalsOfAFunction: "forward of GlobalsOfAFunction puts tensors into the global name 'ROWS'",
    GlobalNumber: "forward of GlobalNumber changes the global name 'STEPS' from 0 to 1",
    GlobalTensor: "forward of GlobalTensor assigns a tensor to the global name 'LAST'",
    GlobalNone: "forward of GlobalNone assigns a tensor to the global name 'FIRST'",
    Mode: "forward of Mode changes the attribute 'mode' from 'first' to 'later'",
}


def told(caplog):
    return [text for text in caplog.messages if text.startswith("forward of")]


@pytest.mark.parametrize("kind", STATES)
def test_state_is_told_of_once_and_ends_with_the_trace(kind, caplog):
    eager, model = kind(), kind()
    x = torch.ones(2)
    with pytest.MonkeyPatch.context() as patch:
        new_globals(patch)
        first, second = eager(x), eager(x)
    assert not torch.equal(first, second)
    compiled = poptorch.inferenceModel(model, quiet_options())
    assert torch.equal(compiled(x), first)
    assert torch.equal(compiled(x), first)
    (text,) = told(caplog)
    assert STATES[kind] in text
    on_host = (CountedThere, InADict, Array, NewArray, Mode)
    if kind not in on_host and "Global" not in kind.__name__:  # (those have the new values)
        assert torch.equal(poptorch.inferenceModel(model, quiet_options())(x), first)


class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(size=4, names=["a"], scale=torch.full((2,), 3.0))
        self.table = np.array([1, np.nan], np.float32)
        self.sizes = {"last": 0, "words": ["a"] * 2000}
        self.mode = "double"

    def forward(self, x):
        self.mode = str(self.mode)
        self.sizes["last"] = len(x)
        y = x * 2 if self.mode == "double" else x
        return y * self.config.scale + self.config.size + torch.from_numpy(self.table)


class Unusual:
    """Has attributes that code computes."""

    @property
    def __dict__(self):
        raise RuntimeError

    def __getattr__(self, name):
        raise RuntimeError(name)


class WithUnusual(nn.Module):
    def __init__(self):
        super().__init__()
        self.unusual, self.own = Unusual(), types.SimpleNamespace()
        self.own.own = self.own

    def forward(self, x):
        return x + isinstance(self.unusual, Unusual)


class Masks:
    def __init__(self):
        self.by_size = {}

    def find(self, x):
        if len(x) not in self.by_size:
            self.by_size[len(x)] = torch.arange(float(len(x)), device=x.device)
        return self.by_size[len(x)]


class WithMasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.masks = Masks()

    def forward(self, x):
        return x * self.masks.find(x)


class Context(nn.Module):
    """Hands values of this call to its parts."""

    def __init__(self):
        super().__init__()
        self.context = Cache()

    def forward(self, x):
        self.context.reset()
        self.context.h = x * 2
        self.context.rows.append(x)
        return self.context.h + self.context.rows[0]


class Shows(nn.Module):
    def __init__(self):
        super().__init__()
        self.shown = types.SimpleNamespace(h=None, rows=[])
        self.name = "none"
        self.layer = nn.Identity()

    def forward(self, x):
        self.shown.h = self.layer.seen = x * 2
        self.shown.rows.append(x)
        self.name = f"of {len(x)}"
        return x + 1


SEEN = []
BY_SIZE = {}
SCALES = {"double": 2.0}


def table(x):
    if len(x) not in BY_SIZE:
        BY_SIZE[len(x)] = torch.arange(float(len(x)), device="cpu")
    return BY_SIZE[len(x)]


class WithGlobals(nn.Module):
    def forward(self, x):
        SEEN.append(x)
        return x * SCALES["double"] + table(x)


@pytest.mark.parametrize("kind", [WithGlobals, WithUnusual, Configured, WithMasks, Context, Shows])
def test_what_is_the_same_in_all_calls_is_not_told_of(kind, caplog):
    eager, model = kind(), kind()
    for _ in range(2):  # the second program is compiled anew
        compiled = poptorch.inferenceModel(model, quiet_options())
        for x in torch.tensor([[1.0, 2.0], [3.0, 4.0]]):
            torch.testing.assert_close(compiled(x), eager(x), equal_nan=True)
    assert told(caplog) == []
