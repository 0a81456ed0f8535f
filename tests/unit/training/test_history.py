"""The history of a fit can be copied, and leaves fit with an exception, too."""

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


class Raising:
    """A callback that raises an exception after an epoch, or after a step of the next one."""

    def __init__(self, error, epoch):
        self.error, self.epoch, self.now = error, epoch, 0

    def on_epoch_end(self, epoch):
        self.now = epoch + 1
        if epoch == self.epoch:
            raise self.error


class RaisingInAStep(Raising):
    def on_epoch_end(self, epoch):
        self.now = epoch + 1

    def on_batch_end(self, step, logs):
        if self.now == self.epoch and step == 2:
            raise self.error


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), ZeroDivisionError("x")], ids=["ctrl", "own"]
)
@pytest.mark.parametrize("callback", [Raising, RaisingInAStep])
def test_an_exception_has_the_history(error, callback):
    with pytest.raises(type(error)) as caught:
        fit(observing(), epochs=3, callbacks=callback(error, 1))
    history = caught.value.history
    assert len(history["loss"]) == (2 if callback is Raising else 1)
    steps = [one.step for one in history.observations()]
    assert steps == list(range(len(steps))) and len(steps) > STEPS


def test_a_record_error_has_the_history_and_is_pickled_with_it():
    options = observing(when=lambda record: record.step == 3)
    with pytest.raises(poptorch.RecordError) as caught:
        fit(options, steps_per_execution=1)
    twin = pickle.loads(pickle.dumps(caught.value))
    records = caught.value.history.observations()
    assert records[3] == caught.value.record == twin.record
    assert len(records) >= 4 and twin.history.observations() == records
    assert caught.value.history["loss"] == []


def test_a_bad_number_error_has_the_history():
    data = [(torch.full((5, 4), x), torch.zeros(5, dtype=torch.long)) for x in (1.0, torch.nan)]
    model = nn.Linear(4, 3)
    with pytest.raises(poptorch.BadNumberError) as caught:
        poptorch.fit(
            model,
            data,
            loss=nn.functional.cross_entropy,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            options=observing().watch(),
            verbose=0,
        )
    assert caught.value.history.observations()[0].step == 0


def test_an_exception_keeps_an_attribute_of_its_own():
    class Own(Exception):
        history = "mine"

    with pytest.raises(Own) as caught:
        fit(callbacks=Raising(Own(), 0))
    assert caught.value.history == "mine"
    with pytest.raises(poptorch.Error) as refused:
        fit(epochs=0)
    assert not hasattr(refused.value, "history")
