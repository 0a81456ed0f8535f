"""Mistakes in calls of fit, evaluate and predict say what came and what is needed."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import popsim_torch as poptorch

BATCHES = [(torch.ones(2, 3), torch.ones(2, 1))] * 12


def fit(model=None, data=BATCHES, accumulation=1, device_iterations=1, **arguments):
    model = nn.Linear(3, 1) if model is None else model
    if "optimizer" not in arguments:
        arguments["optimizer"] = torch.optim.SGD(nn.Module.parameters(model), lr=0.1)
    options = poptorch.Options().deviceIterations(device_iterations)
    options.Training.gradientAccumulation(accumulation)
    return poptorch.fit(
        model, data, **{"loss": nn.MSELoss(), "options": options, "verbose": 0, **arguments}
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"steps_per_execution": 10, "accumulation": 4},
            "steps_per_execution = 10 is not a multiple of the gradient accumulation of 4 "
            r"\(options.Training.gradientAccumulation\). The nearest multiples are 8 and 12",
        ),
        (
            {"steps_per_execution": 5},
            r"steps_per_epoch = 12 \(the batches of the data\) is not a multiple of "
            "steps_per_execution = 5. The nearest multiples are 10 and 15. For 12, the nearest "
            "steps_per_execution is 4 or 6",
        ),
        (
            {"steps_per_epoch": 10, "steps_per_execution": 4, "accumulation": 4},
            "steps_per_epoch = 10 is not a multiple of steps_per_execution = 4. The nearest "
            "multiples are 8 and 12. No steps_per_execution fits 10 steps",
        ),
        ({"accumulation": 5}, r"12 \(the batches of the data\) is not a multiple of the gradient"),
        ({"steps_per_epoch": 3, "accumulation": 5}, "The smallest multiple is 5"),
        (
            {"steps_per_execution": 4, "device_iterations": 3},
            "steps_per_execution = 4, and the options ask for 3 device iterations of 1",
        ),
        ({"device_iterations": 5}, "12 .* is not a multiple of steps_per_execution = 5"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be an integer of 1 or more, got 0"),
        ({"steps_per_execution": 2.0}, "steps_per_execution must be an integer .* got 2.0"),
        ({"epochs": 0}, "epochs must be an integer of 1 or more, got 0"),
        ({"epochs": True}, "epochs must be an integer of 1 or more, got True"),
        ({"data": iter(BATCHES)}, "does not say how many batches it has. Pass steps_per_epoch"),
        ({"data": []}, "the data has no batch"),
        ({"verbose": 3}, "verbose must be 0, 1, 2 or 'auto', got 3"),
        ({"metrics": "recall"}, "the metric 'recall' is not known; 'accuracy' is"),
        ({"metrics": {"loss": nn.MSELoss()}}, "more than one value called 'loss'"),
    ],
)
def test_values(arguments, text):
    with pytest.raises(poptorch.Error, match=text) as raised:
        fit(**arguments)
    assert isinstance(raised.value, ValueError)
    assert str(raised.value).startswith("fit: ")


class Returns(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.result = result

    def forward(self, x, y):
        return self.result(x * self.weight)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model": lambda x: x, "optimizer": None}, "the model is a function. Pass a torch.nn"),
        ({"optimizer": None}, "there is no optimizer. Pass optimizer=torch.optim.SGD"),
        ({"optimizer": 0.1}, "the optimizer is a float"),
        ({"options": {}}, "options must be a poptorch.Options, got dict"),
        ({"data": 5}, "the data is a int. Pass a DataLoader"),
        ({"data": (torch.ones(8, 3), torch.ones(8, 1))}, "is a tuple of tensors, not of batches"),
        ({"metrics": [5]}, "the metric 'int' is a int. Pass a function"),
        ({"data": [torch.ones(2, 3)]}, r"a tuple of the model's inputs and, last, the target; got"),
        ({"data": [{"x": torch.ones(2, 3)}]}, "target; got a dictionary"),
        ({"loss": nn.MSELoss(reduction="none")}, r"the loss is a tensor of shape \(2, 1\)"),
        ({"metrics": {"m": lambda output, target: output}}, r"the metric 'm' is a tensor of shape"),
        (
            {"model": Returns(lambda x: (x.sum(), x.sum())), "loss": None},
            "returns a tuple with 2 scalars, and one of them has to be the loss",
        ),
        (
            {"model": Returns(lambda x: {"a": x.sum()}), "loss": None},
            "returns a dictionary without the key 'loss', but with 'a'",
        ),
    ],
)
def test_types(arguments, text):
    with pytest.raises(poptorch.Error, match=text) as raised:
        fit(**arguments)
    assert isinstance(raised.value, TypeError)


def test_a_smaller_last_batch():
    loader = DataLoader(TensorDataset(torch.ones(11, 3), torch.ones(11, 1)), batch_size=4)
    text = "the last batch of the data has 3 samples, and all others have 4.* drop_last=True"
    with pytest.raises(poptorch.Error, match=text):
        fit(data=loader)
    assert len(fit(data=loader, steps_per_epoch=2)) == 1


def test_data_that_ends_too_early():
    with pytest.raises(poptorch.Error) as raised:
        fit(data=iter(BATCHES), epochs=2, steps_per_epoch=8)
    told = f"{raised.value} {raised.value.__cause__}"
    assert "the data ended after 12 of 16 steps" in told


def test_too_few_steps_for_a_pipeline():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    poptorch.BeginBlock(model[1], ipu_id=1)
    with pytest.raises(poptorch.Error, match=r"fit: the 2 micro-batches .* at least 3"):
        fit(model, accumulation=2)
    with pytest.raises(poptorch.Error, match=r"predict: steps_per_execution = 1 .* at least 2"):
        poptorch.predict(model, BATCHES, steps_per_execution=1)


def test_the_dataset_of_a_fit_fails():
    def batches():
        yield from BATCHES[:3]
        raise LookupError("no more disk")

    with pytest.raises(poptorch.Error) as raised:
        fit(data=batches(), steps_per_epoch=8)
    assert "no more disk" in f"{raised.value} {raised.value.__cause__}"
    assert len(fit()) == 1


def test_evaluate_and_predict_name_themselves():
    for function in (poptorch.evaluate, poptorch.predict):
        with pytest.raises(ValueError, match=rf"{function.__name__}: .* Pass steps"):
            function(nn.Linear(3, 1), iter(BATCHES))


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        ("on_train_begin", r"on_train_begin \(on_fit_begin\(model, optimizer\)\)"),
        ("on_train_batch_end", r"on_train_batch_end \(on_batch_end\(step, logs\)\)"),
        ("on_train_end", r"on_train_end \(the lines after the call of fit\)"),
        ("on_epoch_ends", r"on_epoch_ends\. Closest name: on_epoch_end\."),
    ],
)
def test_hooks_that_nobody_calls_are_refused(hook, text):
    methods = {hook: lambda self, *_: None, "on_epoch_end": lambda self, epoch: None}
    with pytest.raises(TypeError, match=f"a Keras has methods that fit does not call: {text}"):
        fit(callbacks=[type("Keras", (), methods)()])


def test_a_scheduler_as_a_callback_says_what_wraps_it():
    optimizer = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(TypeError, match=r"Pass poptorch\.LearningRateScheduler\(scheduler\)"):
        fit(callbacks=[scheduler])


def test_the_class_of_a_callback_is_not_the_callback():
    with pytest.raises(TypeError, match=r"Pass an object, EarlyStopping\(\.\.\.\), not the class"):
        fit(callbacks=[poptorch.EarlyStopping])


def test_samples_and_targets_are_no_batches():
    with pytest.raises(TypeError, match=r"the data is a Tensor of samples, .*TensorDataset\(x, y"):
        fit(data=torch.ones(6, 3), epochs=torch.ones(6, 1))
