"""What users' optimizers keep: it is in ``state_dict()``, apart from names of the program."""

from collections import deque
from functools import partial

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 3)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.fc(x), y)


def batches():
    torch.manual_seed(1)
    return [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]


class OfItsOwn(torch.optim.Optimizer):
    """Steps with a function of parameter, state and the optimizer itself."""

    def __init__(self, parameters, update, **attributes):
        super().__init__(parameters, {"lr": 0.1})
        self._update = update
        vars(self).update(attributes)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, self.state[parameter], self)


def constants(p, state, _):
    if not state:
        state.update(nothing=None, kind="odd", on=True)
        state["nested"] = {"nothing": None, "sum": torch.zeros_like(p)}
    state["nested"]["sum"].add_(p.grad)
    p.sub_(0.1 * state["nested"]["sum"])


def names_of_the_program(p, state, _):
    if not state:
        for key in ("Accum", "Accl1", "UpdatedVar"):
            state[key] = torch.zeros_like(p)
        state["Step"], state["hasStepped"] = 0, torch.zeros(())
    state["Step"] += 1
    state["hasStepped"].add_(2)
    state["Accum"].mul_(0.9).add_(p.grad)
    state["Accl1"].add_(p.grad**2)
    state["UpdatedVar"].sub_(p.grad)
    p.sub_(0.1 * state["Accum"] / (state["Accl1"].sqrt() + 1e-2) + 0.01 * state["UpdatedVar"])


def another_shape(p, state, _):
    if not state:
        state["table"] = torch.zeros(2, 3)
    state["table"].add_(1)
    p.sub_(p.grad * 0.1)


def beside_the_parameters(p, state, optimizer):
    state["last"] = p.grad.clone()
    shared = optimizer.state.setdefault("shared", {})
    shared["steps"] = shared.get("steps", 0) + 1
    average = shared.setdefault("averages", {"norm": torch.zeros(())})["norm"]
    average.mul_(0.5).add_(p.grad.norm())
    p.sub_(p.grad * 0.1 / (shared["steps"] + average))


OPTIMIZERS = {
    **{
        update.__name__: partial(OfItsOwn, update=update)
        for update in (constants, names_of_the_program, another_shape, beside_the_parameters)
    },
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),
    "centered RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
}


def assert_equal(found, expected, path=""):
    assert type(found) is type(expected), path
    if isinstance(found, dict):
        assert found.keys() == expected.keys(), path
        for key in found:
            assert_equal(found[key], expected[key], f"{path}.{key}")
    elif isinstance(found, torch.Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert found == expected, path


def eager_step(model, optimizer, batch, micro_batches):
    optimizer.zero_grad()
    for x, y in zip(*(part.chunk(micro_batches) for part in batch), strict=True):
        (model(x, y) / micro_batches).backward()
    optimizer.step()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_states_are_those_of_eager_pytorch_and_go_on(make, micro_batches):
    model, expected = Model(), Model()
    optimizer, of_eager = make(model.parameters()), make(expected.parameters())
    options = make_options(ga=micro_batches)
    executor = poptorch.trainingModel(model, options, optimizer)
    for batch in batches():
        executor(*batch)
        eager_step(expected, of_eager, batch, micro_batches)
    state = optimizer.state_dict()
    assert_equal(state["state"], of_eager.state_dict()["state"])
    executor.destroy()
    later = make(model.parameters())
    later.load_state_dict(state)
    poptorch.trainingModel(model, options, later)(*batches()[0])
    eager_step(expected, of_eager, batches()[0], micro_batches)
    assert_equal(later.state_dict()["state"], of_eager.state_dict()["state"])
    torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()))


def test_rmsprop_counts_in_a_loop():
    model = Model()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    queue = poptorch.InfeedQueue(batches())

    def body(x, y):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()

    poptorch.function(lambda: poptorch.repeat(3, body, infeed=queue))()
    assert [one["step"].item() for one in optimizer.state_dict()["state"].values()] == [3, 3]


def test_states_with_names_of_the_program_can_be_anchored():
    model, options = Model(), make_options(ga=2)
    options.anchorTensor("own", "state.Accum___fc.weight")
    options.anchorTensor("gradients", "Accum___fc.weight")
    optimizer = OPTIMIZERS["names_of_the_program"](model.parameters())
    executor = poptorch.trainingModel(model, options, optimizer)
    executor(*batches()[0])
    assert not torch.equal(*map(executor.getAnchoredTensor, ("own", "gradients")))


def same_names(p, state, _):
    if not state:
        state["a.b"], state["a"] = torch.zeros_like(p), {"b": torch.zeros_like(p)}
    p.sub_(state["a.b"] + state["a"]["b"] + p.grad)


def list_of_states(p, state, _):
    state.setdefault("history", []).append(p.grad.clone())
    p.sub_(state["history"][0])


def list_of_tensors(p, _, optimizer):
    optimizer.history.append(p.grad.clone())
    p.sub_(0.1 * optimizer.history[0].mean())


def growing_list(p, _, optimizer):
    optimizer.history.append(1)
    p.sub_(p.grad / len(optimizer.history))


@pytest.mark.parametrize(
    ("update", "history", "text"),
    [
        (same_names, [], r"keeps two states that the device calls 'a\.b'"),
        (list_of_states, [], r"adds or removes states .*'history\.1'.* one tensor with n rows"),
        (list_of_tensors, [], "its attribute 'history', a list: it keeps tensors there"),
        (list_of_tensors, deque(maxlen=3), "its attribute 'history', a deque: it keeps tensors"),
        (growing_list, [], "its attribute 'history', a list: it grows there.*self.state"),
    ],
)
def test_what_steps_cannot_keep(update, history, text):
    model = Model()
    optimizer = OfItsOwn(model.parameters(), update, history=history)
    with pytest.raises(poptorch.Error, match=text):
        poptorch.trainingModel(model, make_options(), optimizer)(*batches()[0])
    assert not history


def test_a_step_may_keep_numbers_in_a_dict():
    def cached(p, _, optimizer):
        p.sub_(p.grad * optimizer.factors.setdefault(p.dtype, 0.5))

    model, expected = Model(), Model()
    poptorch.trainingModel(model, make_options(), OfItsOwn(model.parameters(), cached, factors={}))(
        *batches()[0]
    )
    eager_step(expected, OfItsOwn(expected.parameters(), cached, factors={}), batches()[0], 1)
    torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()))
