"""Tensors in the step of an optimizer where PyTorch's functions take numbers of Python's."""

import pytest
import torch

import popsim_torch as poptorch
from tests.parity.test_python_state_of_steps import Keeping
from tests.parity.test_traced_optimizers import Pair


def _trust(p):
    return p.norm() / (1 + p.grad.norm())


def _lamb(self, p, group, state):
    if not state:
        state["m"] = torch.zeros_like(p)
    state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
    norms = p.norm(), state["m"].norm()
    p.add_(state["m"], alpha=-0.1 * (norms[0] / norms[1]))


def _sums(self, p, group, state):
    p.sub_(p.grad, alpha=_trust(p))
    p.copy_(torch.add(p, p.grad, alpha=-0.1 * _trust(p)))
    torch._foreach_add_([p], [p.grad], alpha=-0.1 * _trust(p))
    p.sub_(torch.rsub(p.grad, p, alpha=_trust(p)), alpha=0.01)


def _products(self, p, group, state):
    p.addcdiv_(p.grad, p.abs() + 1, value=-0.1 * _trust(p))
    p.copy_(torch.addcmul(p, p.grad, p, value=-_trust(p)))
    p.lerp_(p.grad, weight=-0.1 * _trust(p))
    if p.ndim > 1:
        p.sub_(torch.addmm(p.grad, p @ p.T, p.grad, beta=_trust(p), alpha=_trust(p)), alpha=0.1)


def _limits(self, p, group, state):
    p.sub_(p.grad.clamp(-0.5, _trust(p)), alpha=0.3)
    p.sub_(p.grad.clamp(min=-_trust(p), max=group["lr"]), alpha=0.3)
    p.sub_(p.grad.masked_fill(p.grad > 0, value=0.1 * _trust(p)))
    p.index_add_(0, torch.tensor([0, 1]), p.grad[:2], alpha=-_trust(p))


def _factors_first(self, p, group, state):
    p.add_(-group["lr"], p.grad)
    p.addcdiv_(-group["lr"], p.grad, p.abs() + 1)
    p.addcmul_(-group["lr"], p.grad, p)


STEPS = {
    "lamb": _lamb,
    "sums": _sums,
    "products": _products,
    "limits": _limits,
}


@pytest.mark.parametrize("name", STEPS)
def test_a_tensor_of_no_dimensions_is_a_number(name):
    pair = Pair(lambda p: Keeping(p, STEPS[name]))
    pair.step(0, 4)
    pair.check()


@pytest.mark.filterwarnings("ignore:This overload of")
def test_factors_may_come_first_as_in_old_code():
    pair = Pair(lambda p: Keeping(p, _factors_first))
    pair.step(0, 4)
    pair.check()


class Largest(Keeping):
    """Limits gradients with Python's functions."""

    def __init__(self, parameters):
        super().__init__(parameters, Largest.one)

    def one(self, p, group, state):
        norm = p.grad.norm()
        p.sub_(p.grad * (group["lr"] / max(norm, group["lr"])), alpha=0.1)
        p.sub_(p.grad * min(2 * group["lr"], norm / 3), alpha=0.1)
        p.sub_(p.grad * max([norm, norm / 2, state.get("norm", 0.2), 1]), alpha=0.1)
        state["norm"] = norm


def test_pythons_max_and_min_of_tensors_and_numbers():
    pair = Pair(Largest)
    pair.step(0, 5)
    pair.check()


def _last_three(self, p, group, state):
    if not state:
        state["last"], state["step"] = torch.zeros((3, *p.shape)), 0
    state["last"][state["step"] % 3] = p.grad
    state["step"] += 1
    p.sub_(state["last"].mean(0) + state["last"][(state["step"] - 2) % 3], alpha=0.1)


def _parts(self, p, group, state):
    if not state:
        state["last"], state["step"] = torch.zeros((3, *p.shape)), torch.tensor(0)
    state["last"][-1 - state["step"] % 3, 0] = p.grad[0]
    state["last"][state["step"] % 3, 1] = 0.5
    state["step"] += 1
    p[0] -= 0.1 * state["last"].sum(0)[0]
    p[1] -= 0.1 * state["last"][state["step"] % 3, 1]


def _written(self, p, group, state):
    if not state:
        state["v"] = torch.zeros_like(p)
    torch.lerp(state["v"], p.grad, weight=1 - group["lr"], out=state["v"])
    torch.mul(p.grad, group["lr"], out=p.grad)
    p.sub_(state["v"] + p.grad)


def _keyed(self, p, group, state):  # as AggMo does
    if not state:
        state["buffers"] = {group["lr"]: torch.zeros_like(p), 0.1: torch.zeros_like(p)}
    for key in (group["lr"], 0.1):
        state["buffers"][key].mul_(key).add_(p.grad)
        p.sub_(state["buffers"][key], alpha=0.1)


PYTHON = {
    "a row": _last_three,
    "parts of rows": _parts,
    "out": _written,
    "a key": _keyed,
}


@pytest.mark.parametrize("name", PYTHON)
def test_what_python_does_with_numbers(name):
    pair = Pair(lambda p: Keeping(p, PYTHON[name]))
    pair.step(0, 5)
    pair.check()


def _similar(self, p, group, state):  # as AdamP does
    flat = p.grad.reshape(1, -1), p.reshape(1, -1)
    similarity = torch.nn.functional.cosine_similarity(*flat, dim=1, eps=group["lr"]).abs().max()
    p.sub_(p.grad * (1 - similarity))


def test_a_hyper_parameter_that_a_function_takes_as_a_plain_number_is_part_of_the_program():
    pair = Pair(lambda p: Keeping(p, _similar))
    for step, value in enumerate((0.5, 0.5, 1.5)):
        for one in (pair.optimizer, pair.reference):
            one.param_groups[0]["lr"] = value
        pair.model.setOptimizer(pair.optimizer)
        pair.step(step, step + 1)
    pair.check()


def _counting(self, p, group, state):
    state["step"] = state.get("step", 0) + 1
    p.sub_(p.grad * torch.nn.functional.cosine_similarity(p, p, 0, eps=state["step"]))


def _later_key(self, p, group, state):
    if state:
        self.rates["b"]
    state["m"] = torch.zeros_like(p)


def _later_type(self, p, group, state):
    if "m" in state:
        p.sub_(p.grad * (state["m"] + len(3)))
    state["m"] = p.grad.norm()


def _plain(self, p, group, state):
    p.sub_(p.grad, alpha=self.rate)


def _next(self):
    self.rate = next(self.rates)


MISTAKES = {
    "a number of the state": (_counting, None, None, "cosine_similarity' at .*scalars.*: it takes"),
    "a key": (
        _later_key,
        None,
        {"a": 1},
        r"traced at .*test_scalars_in_steps.py:\d+: KeyError: 'b'",
    ),
    "a type": (_later_type, None, None, r"cannot be traced at .*steps.py:\d+: TypeError"),
    "an iterator": (
        _plain,
        _next,
        iter([0.1] * 99),
        r"next value of an iterator at .*steps.py:\d+",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_errors_of_later_steps_name_optimizer_and_line(name):
    one, begin, rates, text = MISTAKES[name]
    pair = Pair(lambda p: Keeping(p, one, begin, rates=rates))
    with pytest.raises(poptorch.Error, match=f"The step of Keeping.*{text}"):
        pair.model(pair.x[0], pair.y[0])
    if name == "an iterator":
        assert len(list(rates)) == 99
