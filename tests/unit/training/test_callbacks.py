"""Callbacks get the steps while the device runs, and may end the training."""

import re
import sys
import threading

import pytest
import torch
from torch import nn

import popsim_torch as poptorch

STEPS = 6
fit_module = sys.modules["popsim_torch.training.fit"]


def fit(callbacks, batches=None, model=None, **arguments):
    model = model or nn.Linear(3, 1)
    return poptorch.fit(
        model,
        batches or [(torch.ones(2, 3), torch.ones(2, 1))] * STEPS,
        callbacks=callbacks,
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        **{"verbose": 0, **arguments},
    )


class Steps:
    def __init__(self):
        self.steps, self.losses, self.logs = [], [], []

    def on_batch_end(self, step, logs):
        self.steps.append(step)
        self.losses.append(logs["loss"])

    def on_epoch_end(self, epoch, logs):
        self.logs.append(logs["loss"])


def test_every_step_is_told_in_order():
    told = Steps()
    fit([told], epochs=2, steps_per_execution=3)
    assert told.steps == [*range(STEPS), *range(STEPS)]
    assert torch.equal(torch.stack(told.losses), torch.cat(told.logs))


def test_steps_are_told_while_the_device_runs():
    # The last step's data only comes after the callback has seen the first step.
    seen_first = threading.Event()

    class First:
        def on_batch_end(self, step):
            if step == 0:
                seen_first.set()

    def batches():
        for step in range(STEPS):
            if step == STEPS - 1:
                assert seen_first.wait(60)
            yield torch.ones(2, 3), torch.ones(2, 1)

    history = fit([First()], batches(), steps_per_epoch=STEPS)
    assert len(history) == 1


@pytest.mark.parametrize("method", ["on_epoch_begin", "on_epoch_end", "on_batch_end"])
def test_an_exception_of_a_callback_comes_out_and_weights_stay_usable(method):
    class Fails:
        pass

    def fail(number, logs=None):
        raise ZeroDivisionError("of the callback")

    setattr(Fails, method, staticmethod(fail))
    model = nn.Linear(3, 1)
    with pytest.raises(ZeroDivisionError, match=r"of the callback"):
        fit([Fails()], model=model)
    assert torch.isfinite(model.weight).all()
    assert len(fit([], model=model)) == 1


@pytest.mark.parametrize(
    ("method", "epochs"), [("on_epoch_begin", 1), ("on_epoch_end", 2), ("on_batch_end", 1)]
)
def test_stop_iteration_ends_the_training(method, epochs):
    class Ends:
        count = 0

    def end(number, logs=None):
        Ends.count += 1
        if Ends.count == (9 if method == "on_batch_end" else 2):
            raise StopIteration

    setattr(Ends, method, staticmethod(end))
    assert len(fit([Ends()], epochs=50)) == epochs


def test_what_is_no_callback_is_refused():
    with pytest.raises(
        TypeError, match=r"a dict is not a callback. It needs one of the methods on_"
    ):
        fit([{}])


def test_evaluation_cannot_be_ended():
    class Ends:
        def on_batch_end(self, step):
            raise StopIteration

    with pytest.raises(poptorch.Error, match=r"part of an evaluation has no meaning"):
        poptorch.evaluate(
            nn.Linear(3, 1),
            [(torch.ones(2, 3), torch.ones(2, 1))] * 3,
            callbacks=[Ends()],
            loss=nn.MSELoss(),
            verbose=0,
        )


def test_lines_of_epochs(capsys):
    fit([], epochs=2, verbose=2, metrics={"twice": lambda output, target: 2 * target.mean()})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Epoch 1/2, Mean loss: ") and "s to compile), " in first
    assert second.startswith("Epoch 2/2, Mean loss: ") and second.endswith(" samples/s")
    assert "twice: 2.000, " in second and "compile" not in second


def test_a_progress_bar(capsys):
    fit([], epochs=2, verbose=1)
    err = capsys.readouterr().err
    assert "Epoch 1/2" in err and "Epoch 2/2" in err and f"{STEPS}/{STEPS}" in err


@pytest.mark.parametrize("tells_steps", [False, True])
def test_the_progress_bar_shows_the_loss_while_the_device_runs(capsys, monkeypatch, tells_steps):
    seen_a_loss, figures = threading.Event(), fit_module._newest_loss

    def seen(execution):
        found = figures(execution)
        if found:
            seen_a_loss.set()
        return found

    def batches():
        for step in range(STEPS):
            if step == STEPS - 1:
                assert seen_a_loss.wait(60)
            yield torch.ones(2, 3), torch.ones(2, 1)

    monkeypatch.setattr(fit_module, "_newest_loss", seen)
    last = Steps()
    fit([last] if tells_steps else [], batches(), steps_per_epoch=STEPS, verbose=1)
    shown = re.findall(r"loss=([-+.e0-9]+)", capsys.readouterr().err)
    assert shown
    if tells_steps:
        assert shown[-1] == f"{last.losses[-1].item():.4g}"


def test_the_bar_takes_no_step_away(capsys):
    model = nn.Linear(3, 1)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    silent, told = Steps(), Steps()
    silent.on_batch_end = told.on_batch_end = None
    fit([silent], model=model, epochs=2, steps_per_execution=3)
    model.load_state_dict(state)
    fit([told], model=model, epochs=2, steps_per_execution=3, verbose=1)
    assert torch.equal(torch.cat(silent.logs), torch.cat(told.logs))
    assert len(torch.cat(told.logs)) == 2 * STEPS


def test_silence(capsys):
    fit([], verbose=0)
    assert capsys.readouterr() == ("", "")


def test_numbers_of_an_epoch():
    (record,) = fit([]).epochs
    assert record.epoch == 0 and record.samples == 2 * STEPS
    assert 0 < record.compile_seconds < record.seconds
    rate = record.samples / (record.seconds - record.compile_seconds)
    assert record.samples_per_second == pytest.approx(rate)
