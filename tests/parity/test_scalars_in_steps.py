"""Tensors in the step of an optimizer where PyTorch's functions take numbers of Python's."""

import pytest
import torch

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
