"""``fit`` evaluates the model after each epoch."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


def batches(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(8, 4, generator=generator),
            torch.randint(0, 3, (8,), generator=generator),
        )
        for _ in range(count)
    ]


DATA, VALIDATION = batches(4, seed=0), batches(2, seed=1)


def fit(model, **arguments):
    return poptorch.fit(
        model,
        DATA,
        **{
            "loss": nn.CrossEntropyLoss(),
            "optimizer": torch.optim.SGD(nn.Module.parameters(model), lr=0.1),
            "verbose": 0,
            "validation_data": VALIDATION,
            **arguments,
        },
    )


def evaluate(model):
    return poptorch.evaluate(
        model, VALIDATION, loss=nn.CrossEntropyLoss(), metrics="accuracy", verbose=0
    )


def test_values_are_those_of_evaluate_after_each_epoch():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3))

    class Look:
        def __init__(self):
            self.found, self.logs = [], []

        def on_epoch_end(self, epoch, logs):
            self.found.append(evaluate(model))
            self.logs.append((logs["val_loss"].item(), logs["loss"].shape))

    look = Look()
    history = fit(model, epochs=3, metrics="accuracy", callbacks=look)
    assert history["val_loss"] == [one["loss"] for one in look.found]
    assert history["val_accuracy"] == [one["accuracy"] for one in look.found]
    assert len(set(history["val_loss"])) == 3
    assert [loss for loss, _ in look.logs] == pytest.approx(history["val_loss"])
    assert {shape for _, shape in look.logs} == {torch.Size([4])}
    assert model.training


def test_training_is_the_same_with_validation_and_without():
    weights = []
    for data in (VALIDATION, None):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        fit(model, epochs=2, validation_data=data)
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)


def test_steps_of_an_evaluation_go_through_the_data():
    model = nn.Linear(4, 3)
    rate_zero = torch.optim.SGD(model.parameters(), lr=0.0)
    history = fit(model, epochs=2, validation_steps=1, optimizer=rate_zero)
    expected = [nn.CrossEntropyLoss()(model(x), y).item() for x, y in VALIDATION]
    assert history["val_loss"] == pytest.approx(expected, rel=1e-6)


def test_an_executor_with_anchors_and_accumulation():
    model = nn.Linear(4, 3)
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    options.anchorTensor("gradient", "Gradient___weight", poptorch.OutputMode.All)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options, optimizer)
    history = poptorch.fit(
        *(executor, DATA),
        loss=nn.CrossEntropyLoss(),
        verbose=0,
        validation_data=batches(3, seed=2),
    )
    assert history.anchors["gradient"].shape == (12, 4)
    assert len(history["val_loss"]) == 1


def test_the_line_of_an_epoch_shows_it(capsys):
    fit(nn.Linear(4, 3), verbose=2)
    assert ", val_loss: 1." in capsys.readouterr().out


def test_steps_without_data_are_refused():
    with pytest.raises(TypeError, match="validation_steps is given without validation_data"):
        fit(nn.Linear(4, 3), validation_data=None, validation_steps=2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"validation_data": []}, "fit: validation_data has no batch"),
        (
            {"validation_data": iter(VALIDATION)},
            r"fit: validation_data does not say how many batches it has\. Pass validation_steps\.",
        ),
        ({"validation_steps": 0}, "fit: validation_steps must be an integer of 1 or more, got 0"),
    ],
)
def test_counts_that_do_not_fit_are_refused_by_their_names(arguments, text):
    with pytest.raises(ValueError, match=text):
        fit(nn.Linear(4, 3), **arguments)


class Pipeline(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = poptorch.BeginBlock(nn.Linear(4, 8), ipu_id=0)
        self.second = poptorch.BeginBlock(nn.Linear(8, 3), ipu_id=1)

    def forward(self, x):
        return self.second(self.first(x))


def test_a_pipeline_with_several_device_iterations():
    options = poptorch.Options().deviceIterations(2)
    options.Training.gradientAccumulation(4)
    model = Pipeline()
    rate_zero = torch.optim.SGD(model.parameters(), lr=0.0)
    arguments = {"options": options, "optimizer": rate_zero, "steps_per_epoch": 8}
    history = fit(model, validation_data=batches(3, seed=2), **arguments)
    expected = [nn.CrossEntropyLoss()(model(x), y).item() for x, y in batches(3, seed=2)]
    assert history["val_loss"] == [pytest.approx(sum(expected) / 3, rel=1e-5)]
    with pytest.raises(ValueError, match=r"validation_steps = 1 does not fit the pipeline"):
        fit(model, validation_data=batches(1, seed=2), **arguments)


def test_data_that_is_none_is_refused_by_its_name():
    with pytest.raises(TypeError, match="fit: validation_data is a float"):
        fit(nn.Linear(4, 3), validation_data=0.2)
    x, y = VALIDATION[0]
    with pytest.raises(TypeError, match="validation_data is a tuple of tensors, not of batches"):
        fit(nn.Linear(4, 3), validation_data=(x, y))
