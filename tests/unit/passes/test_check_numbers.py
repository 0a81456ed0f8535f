"""The checks of ``Options.watch``: which ops a program gets, and where."""

import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.ir import Phase
from popsim_torch.passes.check_numbers import CHECK, add_checks, watched_tensors
from tests.options import make_options


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        y = self.fc(x)
        return y, poptorch.identity_loss(y, "mean")


def program(optimizer=None, *, ga=1):
    model = Model()
    options = make_options(ga=ga)
    if optimizer is None:
        executor = poptorch.inferenceModel(model, make_options())
    else:
        executor = poptorch.trainingModel(model, options, optimizer(model))
    executor.compile(torch.ones(2 * ga, 4))
    return executor.compiled.program.copy()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)


def names(program, ids):
    return sorted(program.graph.root_of(i).name for i in ids)


def test_training_watches_the_loss_and_what_the_update_reads():
    trained = program(adam)
    watched = watched_tensors(trained, training=True)
    assert len(watched.outputs) == 1
    changed = names(trained, watched.changed)
    assert {"fc.weight", "fc.bias"} <= set(changed)
    assert len(watched.gradients) == 2


def test_with_accumulation_it_watches_the_sums():
    trained = program(sgd, ga=3)
    watched = watched_tensors(trained, training=True)
    assert all("Accum" in name for name in names(trained, watched.gradients))


def test_inference_watches_every_output():
    assert len(watched_tensors(program(), training=False).outputs) == 2


def test_checks_enclose_the_update():
    trained = program(adam)
    assert add_checks(trained, training=True) == 3
    kinds = [op.kind for op in trained.graph.ops if op.phase == Phase.UPDATE]
    assert (kinds[0], kinds[-1]) == (CHECK, CHECK)
    before, after = (
        op for op in trained.graph.ops if op.kind == CHECK and op.phase == Phase.UPDATE
    )
    assert before.attributes["kept"] == len(after.inputs)
    assert before.attributes["divisors"] > 0
    assert (before.attributes["after"], after.attributes["after"]) == (False, True)


def test_inference_gets_no_check_of_an_update():
    inference = program()
    assert add_checks(inference, training=False) == 2
