"""New values for a compiled update."""

import pytest
import torch

from popsim_torch import optim
from popsim_torch.errors import Error
from tests.unit.optim.plans import combined_sgd, plan


def test_changed_variable_is_uploaded(fc):
    optimizer = optim.SGD(fc.parameters(), lr=0.1, momentum=0.9)
    old = plan(optimizer, fc)
    assert list(old.changed_scalars(plan(optimizer, fc))) == []
    optimizer.param_groups[0]["momentum"] = 0.8
    new = plan(optimizer, fc)
    old.check_replaceable(new)
    assert {s.name: s.value for s in old.changed_scalars(new)} == {
        "scaledMomentum2___specific___weight": 0.8,
        "scaledMomentum2___specific___bias": 0.8,
    }


def _with(optimizer, **values):
    optimizer.param_groups[0].update(values)
    return optimizer


REPLACEMENTS = [
    (
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.Adam(p, lr=0.1),
        "Optimizer types do not match",
    ),
    (
        lambda p: optim.Adam(p, lr=0.1, weight_decay=0.1),
        lambda p: optim.LAMB(p, lr=0.1, weight_decay=0.1),
        "Adam modes do not match",
    ),
    (
        lambda p: optim.Adam(p, lr=0.1),
        lambda p: optim.AdamW(p, lr=0.1),
        "Weight decay modes do not match",
    ),
    (
        lambda p: optim.LAMB(p, lr=0.1),
        lambda p: optim.LAMB(p, lr=0.1, bias_correction=False),
        "Adam modes do not match",
    ),
    (
        lambda p: optim.RMSprop(p, lr=0.1),
        lambda p: optim.RMSprop(p, lr=0.1, centered=True),
        "Adaptive modes do not match",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True),
        "SGD accumulator and velocity modes do not match",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.SGD(p, lr=0.1, accum_type=torch.float16),
        "SGD accumulation types do not match",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.SGD(p, lr=0.1, max_grad_norm=1.0),
        "Maximum gradient norms do not match",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        "Can not replace a constant value with a non constant value: 'momentum'",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1),
        lambda p: optim.SGD(p, lr=0.1),
        "Can not replace a non constant value with a constant value: 'weight_decay'",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.SGD(p, lr=0.1, loss_scaling=2.0),
        "Can not replace a constant value with a non constant value: 'loss_scaling'",
    ),
    (
        lambda p: optim.Adam(p, lr=0.1),
        lambda p: _with(optim.Adam(p, lr=0.1), betas=(0.8, 0.9)),
        "Values are constant but do not match: 'beta1'",
    ),
    (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "Values are constant but do not match: 'nesterov'",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.SGD([{"params": [x]} for x in p], lr=0.1),
        "Number of optimizer groups do not match: 1 and 2",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.SGD([next(iter(p))], lr=0.1),
        "Optimizer groups do not match: group 0",
    ),
]


@pytest.mark.parametrize(("before", "after", "message"), REPLACEMENTS)
def test_replacements_that_need_another_program(fc, before, after, message):
    old, new = (plan(make(fc.parameters()), fc) for make in (before, after))
    with pytest.raises(Error, match=message):
        old.check_replaceable(new)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            lambda p: optim.Adam(p, lr=0.1),
            lambda p: optim.Adam(p, lr=0.1, first_order_momentum_accum_type=torch.float16),
        ),
        (
            lambda p: optim.RMSprop(p, lr=0.1),
            lambda p: optim.RMSprop(p, lr=0.1, use_tf_variant=True),
        ),
        (
            lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.0),
            lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        ),
        (
            lambda p: torch.optim.Adam(p, lr=0.1),
            lambda p: torch.optim.Adam(p, lr=0.2, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1),
        ),
    ],
    ids=["Adam accumulation types", "TF variant", "dampening", "all of torch's Adam"],
)
def test_replacements_that_are_let_through(fc, before, after):
    old, new = (plan(make(fc.parameters()), fc) for make in (before, after))
    old.check_replaceable(new)


def test_new_loss_scaling_rescales_the_velocity(fc):
    optimizer = optim.SGD(fc.parameters(), lr=0.1, momentum=0.9, loss_scaling=2.0)
    old = plan(optimizer, fc)
    optimizer.loss_scaling = 8.0
    assert old.state_ratios(plan(optimizer, fc)) == {"Accl___weight": 4.0, "Accl___bias": 4.0}
    assert old.state_ratios(old) == {}


def test_new_velocity_scaling_rescales_the_combined_velocity(fc):
    optimizer = combined_sgd(fc)
    old = plan(optimizer, fc)
    optimizer.param_groups[0]["velocity_scaling"] = 1.0
    optimizer.loss_scaling = 1.0
    assert old.state_ratios(plan(optimizer, fc)) == {"Accl___weight": 0.5, "Accl___bias": 0.5}
