"""Groups of PyTorch's optimizers whose update rules differ, or change."""

import pytest
from torch import optim

import popsim_torch as poptorch
from tests.parity.test_traced_optimizers import Pair


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("of_groups", [(True, False), (False, False), (True, True)])
def test_decoupled_weight_decay_of_groups(kind, of_groups):
    def make(parameters):
        groups = [
            {"params": part, "decoupled_weight_decay": switch}
            for part, switch in zip((parameters[:2], parameters[2:]), of_groups, strict=True)
        ]
        return kind(groups, lr=0.01, weight_decay=0.5)

    pair = Pair(make)
    pair.step(0, 5)
    pair.check()


def test_decoupled_weight_decay_that_changes_later_is_refused():
    pair = Pair(lambda p: optim.Adam([{"params": p[:2]}, {"params": p[2:]}], weight_decay=0.5))
    pair.step(0, 1)
    groups = pair.optimizer.param_groups
    groups[0]["decoupled_weight_decay"] = True
    with pytest.raises(poptorch.Error, match=r"has to be traced, .*decoupled_weight_decay"):
        pair.model.setOptimizer(pair.optimizer)
    groups[1]["decoupled_weight_decay"] = True
    with pytest.raises(poptorch.Error, match="Weight decay modes do not match"):
        pair.model.setOptimizer(pair.optimizer)


MOMENTA = (0.5, 0.0, 0.0, 0.9, 0.9, 0.0, 0.3)


def _with_momentum(pair, value, step):
    for one in (pair.optimizer, pair.reference):
        one.param_groups[0]["momentum"] = value
    pair.model.setOptimizer(pair.optimizer)
    pair.step(step, step + 1)


@pytest.mark.parametrize("kind", [optim.SGD, optim.RMSprop])
def test_momentum_that_passes_through_zero(kind):
    def hooked(parameters):
        optimizer = kind(parameters, lr=0.01, momentum=0.9)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    pair = Pair(hooked)
    for step, value in enumerate(MOMENTA):
        _with_momentum(pair, value, step)
    pair.check()
    pair = Pair(lambda p: kind(p, lr=0.01, momentum=0.9))
    for step, value in enumerate(MOMENTA[:3]):
        _with_momentum(pair, value, step)
    pair.check()
    pair.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(poptorch.Error, match=r"group 0 was 0, and is 0.9 now.*register_step_post"):
        pair.model.setOptimizer(pair.optimizer)


def test_a_cyclic_momentum_that_begins_at_zero():
    cycles = []

    def make(parameters):
        optimizer = optim.SGD(parameters, lr=0.1, momentum=0.9)
        cycle = optim.lr_scheduler.CyclicLR
        cycles.append(cycle(optimizer, 0.05, 0.2, 2, base_momentum=0.0, max_momentum=0.9))
        return optimizer

    pair = Pair(make)
    for step in range(9):
        pair.step(step, step + 1)
        for cycle in cycles:
            cycle.step()
        pair.model.setOptimizer(pair.optimizer)
    pair.step(9, 10)
    pair.check()


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.RMSprop])
def test_an_eps_of_zero(kind):
    pair = Pair(lambda p: kind(p, lr=0.01, eps=0.0))
    pair.step(0, 4)
    pair.check()


def test_an_eps_of_zero_of_poptorch_is_refused():
    pair = Pair(lambda p: poptorch.optim.Adam(p, lr=0.01, eps=0.0))
    with pytest.raises(poptorch.Error, match=r"'eps' .* must be greater than 0"):
        pair.model(pair.x[0], pair.y[0])


def test_an_update_op_in_place_of_a_traced_step_is_refused_with_the_reason():
    pair = Pair(lambda p: optim.Adam(p, lr=0.01, amsgrad=True))
    pair.step(0, 1)
    with pytest.raises(poptorch.Error) as caught:
        pair.model.setOptimizer(optim.Adam(pair.net.parameters(), lr=0.01))
    text = str(caught.value)
    assert "compiled with the traced step of its optimizer, because of maximize, amsgrad" in text
    assert "updated by an op of the device. Compile a new model for it." in text


def test_a_traced_step_in_place_of_another_one_is_refused_with_the_reason():
    pair = Pair(lambda p: optim.Adagrad(p, lr=0.01))
    pair.step(0, 1)
    with pytest.raises(poptorch.Error, match="Optimizer types do not match"):
        pair.model.setOptimizer(optim.Adamax(pair.net.parameters(), lr=0.01))
