"""``EarlyStopping``, ``Checkpoint`` and ``LearningRateScheduler``."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch

GENERATOR = torch.Generator().manual_seed(0)
DATA = [
    (torch.randn(8, 4, generator=GENERATOR), torch.randn(8, 2, generator=GENERATOR))
    for _ in range(3)
]


def new(optimizer=torch.optim.Adam, **settings):
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    return model, optimizer(model.parameters(), **{"lr": 0.1, **settings})


def fit(model, optimizer, callbacks, epochs=4, **arguments):
    return poptorch.fit(
        *(model, DATA, epochs),
        loss=nn.MSELoss(),
        optimizer=optimizer,
        callbacks=callbacks,
        **{"verbose": 0, **arguments},
    )


def told(callback, losses, name="val_loss"):
    """Return the number of epochs before a callback ended the training."""
    callback.on_fit_begin(None, None)
    for epoch, loss in enumerate(losses):
        try:
            callback.on_epoch_end(epoch, {name: torch.tensor(loss)})
        except StopIteration:
            return epoch + 1
    return None


# EarlyStopping


@pytest.mark.parametrize(
    ("arguments", "losses", "epochs"),
    [
        ({}, [3.0, 2.0, 1.0], None),
        ({}, [3.0, 2.0, 2.0, 1.0], 3),
        ({"patience": 1}, [3.0, 2.0, 2.5, 1.0, 1.5, 1.5], 6),
        ({"min_delta": 0.5}, [3.0, 2.0, 1.75], 3),
        ({"mode": "max"}, [1.0, 2.0, 1.5], 3),
        ({}, [1.0, float("nan"), 0.5], 2),
    ],
)
def test_training_ends_when_nothing_becomes_better(arguments, losses, epochs):
    assert told(poptorch.EarlyStopping(**arguments), losses) == epochs


def test_early_stopping_begins_anew_in_each_fit():
    stop = poptorch.EarlyStopping()
    assert [told(stop, [2.0, 3.0]), told(stop, [5.0, 4.0])] == [2, None]


def test_early_stopping_ends_a_fit():
    model, optimizer = new(torch.optim.SGD, lr=0.0)
    history = fit(model, optimizer, poptorch.EarlyStopping("loss", patience=1), epochs=9)
    assert len(history) == 3


@pytest.mark.parametrize("wrong", [{"patience": -1}, {"mode": "auto"}, {"min_delta": -0.1}])
def test_early_stopping_checks_its_arguments(wrong):
    with pytest.raises(ValueError, match=f"EarlyStopping: {next(iter(wrong))} must be"):
        poptorch.EarlyStopping(**wrong)


@pytest.mark.parametrize(
    ("monitor", "text"),
    [
        ("val_loss", r"an epoch has 'loss', 'size'\. Values that begin with 'val_' need"),
        ("accuracy", r"EarlyStopping monitors 'accuracy', and an epoch has 'loss', 'size'\.$"),
    ],
)
def test_a_value_that_there_is_not_is_refused_before_anything_runs(monitor, text):
    model, optimizer = new()
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=text):
        fit(
            *(model, optimizer, poptorch.EarlyStopping(monitor)),
            metrics={"size": lambda output, target: output.mean()},
        )
    assert torch.equal(model.weight, before)


# Checkpoint


def test_a_checkpoint_has_each_epoch_and_no_code(tmp_path):
    model, optimizer = new()
    history = fit(model, optimizer, poptorch.Checkpoint(tmp_path / "new" / "{epoch:02}.pt"))
    files = sorted((tmp_path / "new").iterdir())
    assert [file.name for file in files] == ["00.pt", "01.pt", "02.pt", "03.pt"]
    found = [torch.load(file, weights_only=True) for file in files]
    assert [one["epoch"] for one in found] == [0, 1, 2, 3]
    assert [one["means"]["loss"] for one in found] == history["loss"]
    assert torch.equal(found[-1]["model"]["weight"], model.weight)
    assert not torch.equal(found[0]["model"]["weight"], model.weight)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (torch.optim.Adam, {}),
        (poptorch.optim.SGD, {"momentum": 0.9}),
        (poptorch.optim.Adam, {}),
    ],
)
def test_training_goes_on_from_a_checkpoint(tmp_path, optimizer, settings):
    whole = new(optimizer, **settings)
    fit(*whole, [], epochs=4)
    half = new(optimizer, **settings)
    fit(*half, poptorch.Checkpoint(tmp_path / "last.pt"), epochs=2)
    found = torch.load(tmp_path / "last.pt", weights_only=True)
    model, again = new(optimizer, **settings)
    model.load_state_dict(found["model"])
    again.load_state_dict(found["optimizer"])
    fit(model, again, [], epochs=2)
    assert torch.equal(model.weight, whole[0].weight)


def test_the_best_epoch_alone_is_kept(tmp_path):
    checkpoint = poptorch.Checkpoint(tmp_path / "best.pt", monitor="loss")
    checkpoint.on_fit_begin(*new())
    for epoch, loss in enumerate([3.0, 1.0, 2.0]):
        checkpoint.on_epoch_end(epoch, {"loss": torch.tensor([loss])})
    found = torch.load(tmp_path / "best.pt", weights_only=True)
    assert (found["epoch"], found["means"]) == (1, {"loss": 1.0})


@pytest.mark.parametrize("failure", [OSError("no space left"), KeyboardInterrupt()])
def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path, monkeypatch, failure):
    checkpoint = poptorch.Checkpoint(tmp_path / "last.pt")
    checkpoint.on_fit_begin(*new())
    checkpoint.on_epoch_end(0, {"loss": torch.tensor([1.0])})
    before = (tmp_path / "last.pt").read_bytes()

    def fails(content, file):
        file.write(b"half of it")
        raise failure

    monkeypatch.setattr(torch, "save", fails)
    expected = poptorch.Error if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        checkpoint.on_epoch_end(1, {"loss": torch.tensor([1.0])})
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]
    assert (tmp_path / "last.pt").read_bytes() == before


def test_who_may_read_a_checkpoint_is_as_for_any_file(tmp_path):
    checkpoint = poptorch.Checkpoint(tmp_path / "last.pt")
    checkpoint.on_fit_begin(*new())
    (tmp_path / "other").touch()
    for usual in ((tmp_path / "other").stat().st_mode & 0o777, 0o640):
        checkpoint.on_epoch_end(0, {"loss": torch.tensor([1.0])})
        assert (tmp_path / "last.pt").stat().st_mode & 0o777 == usual
        (tmp_path / "last.pt").chmod(0o640)  # the permissions stay when the file is written again


def test_other_names_in_a_path_are_refused():
    with pytest.raises(ValueError, match=r"something else than \{epoch\} in braces"):
        poptorch.Checkpoint("{loss}.pt")


# LearningRateScheduler


def test_the_device_follows_a_scheduler():
    model, optimizer = new(torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    fit(model, optimizer, poptorch.LearningRateScheduler(scheduler))
    eager, on_host = new(torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(on_host, 1, 0.5)
    for _ in range(4):
        for x, y in DATA:
            on_host.zero_grad()
            nn.MSELoss()(eager(x), y).backward()
            on_host.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 / 16
    torch.testing.assert_close(model.weight, eager.weight, rtol=1e-6, atol=1e-7)


def test_a_plateau_is_told_the_value_of_the_validation():
    model, optimizer = new(torch.optim.SGD, lr=0.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    told = poptorch.LearningRateScheduler(plateau)
    history = fit(model, optimizer, told, validation_data=DATA)
    assert plateau.last_epoch == 4
    assert plateau.best == pytest.approx(history["val_loss"][0])
    with pytest.raises(ValueError, match="LearningRateScheduler monitors 'val_loss'"):
        fit(model, optimizer, poptorch.LearningRateScheduler(plateau))


def test_a_function_is_no_scheduler():
    with pytest.raises(TypeError, match=r"pass torch\.optim\.lr_scheduler\.LambdaLR"):
        poptorch.LearningRateScheduler(lambda epoch: 0.1)


def test_a_scheduler_of_another_optimizer_is_refused():
    scheduler = torch.optim.lr_scheduler.StepLR(new()[1], 1)
    with pytest.raises(ValueError, match="made for another optimizer"):
        fit(*new(), poptorch.LearningRateScheduler(scheduler))


def test_a_monitor_of_a_scheduler_that_looks_at_no_value_is_refused():
    scheduler = torch.optim.lr_scheduler.StepLR(new()[1], 1)
    with pytest.raises(TypeError, match="a StepLR monitors no value"):
        poptorch.LearningRateScheduler(scheduler, monitor="loss")


def test_the_optimizer_may_be_wrapped():
    model, optimizer = new(torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    wrapped = poptorch.OutfeedOptimizer(optimizer, poptorch.MaybeOutfeedQueue(filters=[]))
    fit(model, wrapped, poptorch.LearningRateScheduler(scheduler), epochs=1)
    assert optimizer.param_groups[0]["lr"] == 0.05
