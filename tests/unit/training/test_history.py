"""The history of a fit can be copied and pickled."""

import copy
import pickle

import pytest
import torch
from torch import nn

import popsim_torch as poptorch

NAME = "Gradient___model.weight"
STEPS = 6


def fit(options=None, **more):
    model = nn.Linear(4, 3)
    data = [(torch.randn(5, 4), torch.randint(0, 3, (5,))) for _ in range(STEPS)]
    arguments = {
        "loss": nn.functional.cross_entropy,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "options": options,
        "verbose": 0,
        **more,
    }
    return poptorch.fit(model, data, **arguments)


def observing(**more):
    return poptorch.Options().observe(NAME, every=1, **more)


COPIES = [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]


@pytest.mark.parametrize("copied", COPIES, ids=["copy", "deepcopy", "pickle"])
def test_a_copy_has_the_records_that_nobody_has_read(copied):
    history = fit(observing())
    twin = copied(history)
    assert twin == history and "bserving" not in repr(twin)
    again = copied(twin)
    records = history.observations()
    assert [one.step for one in records] == list(range(STEPS))
    assert records == twin.observations() == again.observations()
    assert history.observations() == twin.observations() == copied(twin).observations() == []


@pytest.mark.parametrize("copied", COPIES, ids=["copy", "deepcopy", "pickle"])
def test_a_copy_of_a_history_without_observations(copied):
    options = poptorch.Options().anchorTensor("w", "model.weight", poptorch.OutputMode.Final)
    history = fit(options)
    twin = copied(history)
    assert twin["loss"] == history["loss"]
    assert torch.equal(twin.anchors["w"], history.anchors["w"])
    with pytest.raises(poptorch.Error, match="observe nothing"):
        twin.observations()


def test_an_executor_keeps_its_records_if_a_history_is_copied():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x, y):
            return nn.functional.cross_entropy(self.layer(x), y)

    model = Loss()
    options = poptorch.Options().observe("Gradient___*.weight", every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options, optimizer)
    data = [(torch.randn(5, 4), torch.randint(0, 3, (5,))) for _ in range(STEPS)]
    twin = copy.deepcopy(poptorch.fit(training, data, verbose=0))
    assert training.observations() == twin.observations() != []
