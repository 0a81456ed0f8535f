"""What the step of an optimizer keeps in Python's objects: numbers of the device, or an error."""

import collections

import pytest
import torch
from torch import optim

import popsim_torch as poptorch
from tests.parity.test_traced_optimizers import Pair, assert_states_equal

_MODULE = {"calls": 0}
_EMPTY: dict[str, int] = {}
number_of_calls = 0


class Keeping(optim.Optimizer):
    """Calls a function for each parameter, and others before and after them."""

    calls = 0

    def __init__(self, parameters, one, begin=None, end=None, **attributes):
        super().__init__(parameters, {"lr": 0.5})
        self._functions = begin, one, end
        vars(self).update(attributes)

    @torch.no_grad()
    def step(self):
        begin, one, end = self._functions
        if begin:
            begin(self)
        for group in self.param_groups:
            for p in group["params"]:
                one(self, p, group, self.state[p])
        if end:
            end(self)


def _rate(self, p, rate):
    p.sub_(p.grad, alpha=rate)


def _first(self, p, group, state):
    _rate(self, p, group["lr"] * (0.1 if self.first else 1.0))


def _seen(self):
    self.first = False


def _alternating(self, p, group, state):
    even = state.get("even", True)
    _rate(self, p, 0.5 if even else 0.05)
    state["even"] = not even


def _alternating_group(self, p, group, state):
    _rate(self, p, group["lr"] * (1.0 if group.get("even", True) else 0.1))


def _next_group(self):
    for group in self.param_groups:
        group["even"] = not group.get("even", True)


def _late(self, p, group, state):
    state["step"] = state.get("step", 0) + 1
    _rate(self, p, 0.1 if state.get("late", False) else 0.5)
    state["late"] = state["step"] > 2


def _cycle(self):
    self.count += 1
    if self.count == 3:
        self.count = 0


def _cycling(self, p, group, state):
    _rate(self, p, 0.1 * (1 + self.count))


def _multiplied(self, p, group, state):
    even = state.setdefault("even", True)
    p.sub_(p.grad * even)
    state["even"] = not even
    state["n"] = state.get("n", 0) + even
    p.sub_(p.grad, alpha=0.1 * state["n"])


def _later_only(self, p, group, state):
    even = state.get("even", True)
    state["even"] = not even
    self.on = not even or self.on
    self.count += int(not even)
    group["extra"] = group["extra"] + 0.1 * (not even)
    _rate(self, p, (0.1 if self.on else 0.3) / (1 + self.count) + group["extra"])


def _with_extra(parameters):
    optimizer = Keeping(parameters, _later_only, on=False, count=0)
    optimizer.param_groups[0]["extra"] = 0.0
    return optimizer


WORKING = {
    "what only later steps change": _with_extra,
    "an attribute": lambda p: Keeping(p, _first, None, _seen, first=True),
    "a state": lambda p: Keeping(p, _alternating),
    "an entry of a group": lambda p: Keeping(p, _alternating_group, None, _next_group),
    "a factor": lambda p: Keeping(p, _multiplied),
    "a comparison": lambda p: Keeping(p, _late),
    "a number that is set to its first value": lambda p: Keeping(p, _cycling, _cycle, count=0),
}


@pytest.mark.parametrize("name", WORKING)
def test_truth_values_and_numbers_are_those_of_eager(name):
    pair = Pair(WORKING[name])
    pair.step(0, 3)
    pair.check()
    own, other = pair.optimizer.state_dict(), pair.reference.state_dict()
    assert_states_equal(own, other)
    assert repr(own["param_groups"]) == repr(other["param_groups"])
    pair.model.setOptimizer(pair.optimizer)
    pair.step(3, 8)
    pair.check()


def test_truth_values_continue_from_the_host():
    pair = Pair(WORKING["a state"])
    pair.step(0, 3)
    states = pair.optimizer.state_dict()
    assert all(state["even"] is False for state in states["state"].values())
    for state in states["state"].values():
        state["even"] = True
    for one in (pair.optimizer, pair.reference):
        one.load_state_dict(states)
    pair.model.setOptimizer(pair.optimizer)
    pair.step(3, 7)
    pair.check()


class Schedule:
    """Counts its calls."""

    def __init__(self):
        self.count = 0

    def rate(self):
        self.count += 1
        return 1 / self.count


def _count_in_dict(self):
    self.held["n"] += 1


def _count_new(self):
    self.held["n"] = self.held.get("n", 0) + 1


def _count_in_list(self):
    self.held[0] += 1


def _tick(self):
    self.rate = self.held.rate()


class Average:
    """Keeps tensors."""

    def __init__(self):
        self.number, self.tensor = torch.ones(()), torch.ones(3)


def _average(self):
    self.held.number.mul_(0.9)


def _average_of_rows(self):
    self.held.tensor.mul_(0.9)


def _text(self):
    self.held = "b"


def _once(self):
    if self.held is None:
        self.held = "done"


def _of_class(self):
    type(self).calls += 1


def _global(self):
    global number_of_calls
    number_of_calls += 1


def _global_dict(self):
    _MODULE["calls"] += 1


def _draw(self):
    import random

    self.rate = random.random()


def _mean(self):
    norm = self.param_groups[0]["params"][0].grad.norm()
    self.mean = 0.9 * self.mean + norm if hasattr(self, "mean") else norm


def _plain(self, p, group, state):
    _rate(self, p, 0.1)


def _numpy(self, p, group, state):
    import numpy

    state["n"] = state.get("n", numpy.int64(0)) + 1
    _rate(self, p, 0.1 / int(state["n"]))


def _of_parameter(self, p, group, state):
    if not hasattr(p, "buffer"):
        p.buffer = torch.zeros_like(p)
    p.sub_(p.buffer.mul_(0.9).add_(p.grad), alpha=0.1)


def _new_global(self):
    _EMPTY["calls"] = _EMPTY.get("calls", 0) + 1


def _new_in_default_dict(self):
    self.held["n"] += 1


def _other_list(self):
    self.held = [self.held[0] + 1]


def _other_dict(self):
    self.held = {"n": self.held["n"] + 1}


def _mode(self, p, group, state):
    state["mode"] = "b" if state.get("mode") == "a" else "a"


def _forgotten(self, p, group, state):
    if state.pop("mode", None) is None:
        state["mode"] = "a"


REFUSED = {
    "a new entry of a global dict": (_plain, _new_global, None, r"name _EMPTY\['calls'\]"),
    "an entry of a defaultdict": (
        _plain,
        _new_in_default_dict,
        collections.defaultdict(int),
        r"self.held\['n'\]",
    ),
    "another list": (_plain, _other_list, [0], "self.held"),
    "another dict": (_plain, _other_dict, {"n": 0}, "self.held"),
    "a dict": (_plain, _count_in_dict, {"n": 0}, r"self.held\['n'\]"),
    "a new entry of a dict": (_plain, _count_new, {}, r"self.held\['n'\]"),
    "a list": (_plain, _count_in_list, [0], r"self.held\[0\]"),
    "an object": (_plain, _tick, Schedule(), r"self.held.count"),
    "a tensor of an object": (_plain, _average, Average(), "self.held.number"),
    "a text": (_plain, _text, "a", "self.held"),
    "nothing, then a text": (_plain, _once, None, "self.held"),
    "a number of the class": (_plain, _of_class, None, "Keeping.calls"),
    "a global number": (_plain, _global, None, "the global name number_of_calls"),
    "a global dict": (_plain, _global_dict, None, r"the global name _MODULE\['calls'\]"),
    "Python's random": (_plain, _draw, None, "torch.rand"),
    "a tensor in a new attribute": (_plain, _mean, None, "self.mean"),
    "a number of NumPy's": (_numpy, None, None, "'n' in a state"),
    "an attribute of a parameter": (_of_parameter, None, None, "the attribute 'buffer'"),
    "a text that leaves a state": (_forgotten, None, None, "'mode' in a state"),
    "a text in a state": (_mode, None, None, "'mode' in a state"),
}


def _shown(held):
    return str(vars(held)) if isinstance(held, (Schedule, Average)) else str(held)


def test_a_tensor_of_an_object_stays_as_it_is():
    held = Average()
    pair = Pair(lambda p: Keeping(p, _plain, _average_of_rows, held=held, rate=0.1))
    text = r"cannot be traced at .*steps.py:\d+: .*that the device does not know"
    with pytest.raises(poptorch.Error, match=text):
        pair.model(pair.x[0], pair.y[0])
    assert held.tensor.tolist() == [1.0] * 3


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_device_does_not_keep_is_refused_and_put_back(name):
    one, begin, held, text = REFUSED[name]
    before = _shown(held)
    pair = Pair(lambda p: Keeping(p, one, begin, held=held, rate=0.1))
    with pytest.raises(poptorch.Error, match=f"step of Keeping changes .*{text}.*keeps numbers"):
        pair.model(pair.x[0], pair.y[0])
    assert _shown(held) == before
    assert (Keeping.calls, number_of_calls, _MODULE, _EMPTY) == (0, 0, {"calls": 0}, {})


def _scratch(self, p, group, state):
    self.lines.append(p.grad.norm())
    self.numbers["rate"] = 0.1 * group["lr"]
    if "half" not in self.numbers:
        self.numbers["half"] = 0.5
    p.sub_(p.grad / (1 + self.lines[-1]), alpha=self.numbers["rate"] * self.numbers["half"])
    self.lines.clear()
    self.others = {"rate": group["lr"]}
    p.sub_(p.grad, alpha=0.1 * self.others["rate"])
    self.last = p.grad.norm()


def test_containers_that_a_step_empties_or_fills_anew_are_allowed():
    pair = Pair(lambda p: Keeping(p, _scratch, lines=[], numbers={}, others={}))
    pair.step(0, 4)
    pair.check()
    assert not pair.optimizer.lines
    assert not pair.optimizer.numbers


class Projector:
    """Keeps a tensor."""

    matrix = None

    def __call__(self, x):
        if self.matrix is None:
            self.matrix = torch.eye(x.shape[0])
        return self.matrix @ x


def _projected(self, p, group, state):
    if not state:
        state["projector"] = Projector()
    p.sub_(state["projector"](p.grad), alpha=0.1)


def _queued(self, p, group, state):
    if not state:
        state["queue"] = collections.deque(maxlen=3)
    state["queue"].append(p.grad.clone())
    p.sub_(sum(state["queue"]), alpha=0.1)


@pytest.mark.parametrize(
    ("one", "text"),
    [(_projected, "class Projector as 'projector'"), (_queued, "class deque as 'queue'")],
    ids=["an object", "a deque"],
)
def test_objects_with_tensors_in_a_state_are_refused(one, text):
    pair = Pair(lambda p: Keeping(p, one))
    with pytest.raises(poptorch.Error, match=f"{text}.*keep the tensors themselves in self.state"):
        pair.model(pair.x[0], pair.y[0])


def _rotated(self, p, group, state):  # as SOAP does
    if "matrices" not in state:
        state["matrices"] = [torch.eye(p.shape[0])] if p.ndim > 1 else []
        state["others"] = {"none": {}, "two": (1, ())}
        return
    update = p.grad
    for matrix in state["matrices"]:
        update = matrix @ update
    p.sub_(update, alpha=0.1)


def test_empty_containers_stay_in_states():
    pair = Pair(lambda p: Keeping(p, _rotated))
    pair.step(0, 3)
    pair.check()
    own, other = pair.optimizer.state_dict()["state"], pair.reference.state_dict()["state"]
    for index, state in other.items():
        assert own[index]["others"] == state["others"]
        torch.testing.assert_close(own[index]["matrices"], state["matrices"])
    assert own[1]["matrices"] is not own[3]["matrices"]


def _growing(self, p, group, state):
    if "gradients" not in state:
        state["gradients"] = []
    else:
        state["gradients"].append(p.grad.clone())
    p.sub_(p.grad, alpha=0.1)


def test_an_empty_list_that_a_later_step_fills_is_refused():
    pair = Pair(lambda p: Keeping(p, _growing))
    with pytest.raises(poptorch.Error, match=r"adds or removes states .*'gradients\.0'"):
        pair.model(pair.x[0], pair.y[0])


def _scaled(self, p, group, state):
    _rate(self, p, group["lr"] * getattr(p, "scale", 1.0) * (0.5 if hasattr(p, "is_bias") else 1))


def test_numbers_on_parameters_are_read():
    def make(parameters):
        parameters[0].scale = 0.1
        parameters[2].scale = 0.3
        parameters[3].is_bias = True
        return Keeping(parameters, _scaled)

    pair = Pair(make)
    pair.step(0, 3)
    pair.check()


def _raised(self, p, group, state):
    p.scale = getattr(p, "scale", 1.0) / 2
    _rate(self, p, p.scale)


def test_a_number_on_a_parameter_that_a_step_changes_is_refused():
    def make(parameters):
        for p in parameters:
            p.scale = 1.0
        return Keeping(parameters, _raised)

    pair = Pair(make)
    with pytest.raises(poptorch.Error, match="changes the attribute 'scale' of a parameter"):
        pair.model(pair.x[0], pair.y[0])
