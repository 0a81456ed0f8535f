"""Mistakes of a user's first hour, and the messages for them, in one table.

A line has the mistake, the class of the exception, key words of its message, and words that its
message must not contain. Warnings have a separate table.
"""

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options


class Net(nn.Module):
    """A classifier of four numbers, as in a tutorial of PyTorch."""

    def __init__(self, loss=None):
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.fc2 = nn.Linear(8, 3)
        self.loss = loss or nn.CrossEntropyLoss()

    def forward(self, x, y=None):
        out = self.fc2(torch.relu(self.fc1(x)))
        return out if y is None else (out, self.loss(out, y))


def net_with(forward):
    """Return a model with another forward, ``forward(self, out, loss)``, applied to its results."""

    class Other(Net):
        def forward(self, x, y):
            return forward(self, *super().forward(x, y))

    return Other()


def batch(size=6):
    return torch.randn(size, 4), torch.randint(0, 3, (size,))


def train(net=None, options=None, make=poptorch.optim.SGD):
    net = net or Net()
    return poptorch.trainingModel(net, options or make_options(), make(net.parameters(), lr=0.1))


def call(forward):
    """Return a function that makes the mistake: a call of a model with this forward."""
    return lambda: train(net_with(forward))(*batch())


def options_with(change):
    options = make_options()
    change(options)
    return options


# Labels and losses


def float_labels():
    x, y = batch()
    train()(x, y.float())


def float_labels_of_nll_loss():
    call(lambda self, out, loss: F.nll_loss(out, torch.zeros(6)))()


def labels_with_a_dimension_too_many():
    x, y = batch()
    train()(x, y[:, None])


def one_hot_labels_of_integers():
    x, y = batch()
    train()(x, F.one_hot(y, 3))


def integer_labels_of_two_classes():
    x, _ = batch()
    train(Net(nn.BCEWithLogitsLoss()))(x, torch.ones(6, 3, dtype=torch.long))


def labels_of_another_shape():
    x, _ = batch()
    train(Net(nn.MSELoss()))(x, torch.zeros(6, 2))


def a_label_out_of_range():
    x, y = batch()
    y[0] = 7
    train()(x, y)


def labels_left_out():
    train()(batch()[0])


def labels_left_out_that_are_mandatory():
    train(net_with(lambda self, out, loss: loss))(batch()[0])


def two_losses():
    call(lambda self, out, loss: (loss, F.mse_loss(out, out * 2)))()


def a_loss_of_ones_own():
    class Own(nn.Module):
        def forward(self, out, y):
            return (out - y[:, None]).abs().mean()

    train(Net(Own()))(*batch())


def a_loss_for_each_sample():
    train(Net(nn.CrossEntropyLoss(reduction="none")))(*batch())


# Batches and inputs


def a_smaller_last_batch():
    model = train()
    for size in (6, 5):
        model(*batch(size))


def a_batch_that_accumulation_does_not_divide():
    train(options=make_options(1, 4))(*batch(6))


def a_batch_that_iterations_do_not_divide():
    train(options=make_options(4))(*batch(6))


def arrays_of_numpy():
    x, y = batch()
    train()(x.numpy(), y.numpy())


def a_list_for_a_tensor():
    x, y = batch()
    train()(x.tolist(), y)


def a_dict_for_arguments():
    x, y = batch()
    train()({"x": x, "y": y})


def a_tensor_of_another_device():
    train()(*[tensor.to("meta") for tensor in batch()])


def too_many_arguments():
    train()(*batch(), 3)


def an_unknown_keyword():
    x, y = batch()
    train()(x, labels=y)


def features_that_do_not_fit():
    train()(torch.randn(6, 5), batch()[1])


def a_linear_layer_behind_flatten():
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(100, 3))
    poptorch.inferenceModel(nn.Sequential(body))(torch.randn(6, 1, 28, 28))


def channels_that_do_not_fit():
    poptorch.inferenceModel(nn.Sequential(nn.Conv2d(3, 4, 3)))(torch.randn(6, 1, 28, 28))


def a_loader_without_options():
    data = torch.utils.data.TensorDataset(*batch(20))
    poptorch.DataLoader(data, make_options(), batch_size=2)


# What forward does


def a_branch(self, out, loss):
    return loss * 2 if loss > 1 else loss


def an_attribute_misspelt(self, out, loss):
    return self.fc3(out)


# Anchors and options


def anchored():
    options = make_options()
    options.anchorTensor("weights", "fc1.weight")
    options.anchorTensor("slopes", "Gradient___fc1.weight")
    return options


def an_unknown_short_name():
    model = train(options=anchored())
    model(*batch())
    model.getAnchoredTensor("bias")


def an_anchor_read_before_a_run():
    train(options=anchored()).getAnchoredTensor("weights")


def an_unknown_long_name():
    train(options=options_with(lambda options: options.anchorTensor("it", "fc1.wieght")))(*batch())


def an_anchor_after_wrapping():
    options = make_options()
    model = train(options=options)
    options.anchorTensor("it", "fc1.weight")
    return model


def an_option_after_wrapping():
    options = make_options()
    model = train(options=options)
    options.deviceIterations(4)
    return model


# Executors and optimizers


def wrapped_twice():
    model = train()
    train(model.model)


def backward_is_called():
    train()(*batch())[1].backward()


def parameters_of_another_model():
    net = Net()
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    poptorch.trainingModel(net, make_options(), optimizer)(*batch())


def an_optimizer_in_the_place_of_options():
    net = Net()
    poptorch.trainingModel(net, torch.optim.SGD(net.parameters(), lr=0.1))


# Pipelines and functions


def pipelined(*stages, accumulation=4):
    """Return a training model whose layers are the blocks a and b."""
    net = Net()
    poptorch.BeginBlock(net.fc1, "a", ipu_id=0)
    poptorch.BeginBlock(net.fc2, "b", ipu_id=1)
    options = make_options(1, accumulation)
    if stages:
        options.setExecutionStrategy(poptorch.PipelinedExecution(*map(poptorch.Stage, stages)))
    return train(net, options)


def too_few_micro_batches():
    pipelined(accumulation=1)(*batch())


def a_block_that_no_stage_lists():
    pipelined("a")(*batch(8))


def a_function_without_a_loop():
    poptorch.function(lambda x: x + 1)(torch.ones(3))


Kind = type[BaseException]
Row = tuple[Callable[[], object], Kind, list[str], list[str]]

MISTAKES: list[Row] = [
    (float_labels, RuntimeError, ["test_first_hour.py", "labels.long()"], ["gather"]),
    (float_labels_of_nll_loss, RuntimeError, ["nll_loss at", "labels.long()"], ["Byte"]),
    (labels_with_a_dimension_too_many, RuntimeError, ["(6, 1)", "squeeze(1)"], ["0D"]),
    (one_hot_labels_of_integers, RuntimeError, ["argmax(1)", "labels.float()"], ["0D"]),
    (integer_labels_of_two_classes, RuntimeError, ["torch.int64", "labels.float()"], ["cast"]),
    (labels_of_another_shape, RuntimeError, ["'loss', MSELoss()", "(6, 3)", "(6, 2)"], []),
    (a_label_out_of_range, poptorch.Error, ["Target 7 is out of bounds"], []),
    (labels_left_out, poptorch.Error, ["y=None", "labels left out"], []),
    (labels_left_out_that_are_mandatory, poptorch.Error, ["y missing", "(x, y)"], []),
    (two_losses, poptorch.Error, ["2 of them", "loss1 + loss2"], ["None"]),
    (a_loss_of_ones_own, poptorch.Error, ["Couldn't find a loss", "identity_loss"], ["None"]),
    (a_loss_for_each_sample, poptorch.Error, ["scalar", "(6,)", 'reduction="mean"'], []),
    (a_smaller_last_batch, poptorch.Error, ["drop_last=True", "destroy()", "as long as"], []),
    (a_batch_that_accumulation_does_not_divide, AssertionError, ["6", "GA=4", "DataLoader"], []),
    (a_batch_that_iterations_do_not_divide, AssertionError, ["6", "D=4", "DataLoader"], []),
    (arrays_of_numpy, TypeError, ["x is a numpy.ndarray", "torch.from_numpy(x)"], []),
    (a_list_for_a_tensor, TypeError, ["x is a list", "torch.tensor(x)"], ["y is"]),
    (a_dict_for_arguments, TypeError, ["x is a dict", "one by one"], []),
    (a_tensor_of_another_device, poptorch.Error, ["x is on device meta", "input.cpu()"], []),
    (too_many_arguments, AssertionError, ["got 3", "(x, y=None)"], []),
    (an_unknown_keyword, AssertionError, ["labels", "(x, y=None)"], []),
    (features_that_do_not_fit, RuntimeError, ["6x5 and 4x8", "'fc1'", "(6, 5)"], ["Fake"]),
    (a_linear_layer_behind_flatten, RuntimeError, ["'0.3'", "(6, 2704)", "100x3"], ["Fake"]),
    (channels_that_do_not_fit, RuntimeError, ["'0', Conv2d(3, 4", "3 channels"], ["Fake"]),
    (a_loader_without_options, AssertionError, ["TensorDataset", "poptorch.Options first"], []),
    (
        call(lambda self, out, loss: loss.item()),
        poptorch.Error,
        ["tensor.item()", "ipu_print_tensor", "test_first_hour.py"],
        ["torch.where", "cond"],
    ),
    (call(lambda self, out, loss: float(loss)), poptorch.Error, ["float(tensor)"], ["where"]),
    (call(lambda self, out, loss: loss.tolist()), poptorch.Error, ["tolist()"], ["where"]),
    (call(a_branch), poptorch.Error, ["`if tensor:`", "torch.where"], ["tensor.item()"]),
    (
        call(lambda self, out, loss: out.detach().numpy()),
        poptorch.Error,
        ["move to CPU (Tensor.numpy)", "anchor"],
        [],
    ),
    (call(lambda self, out, loss: out.cuda()), poptorch.Error, ["GPU", "Remove"], ["compiled"]),
    (call(lambda self, out, loss: out.to("cuda:0")), poptorch.Error, ["GPU", "Remove"], []),
    (call(lambda self, out, loss: out[out > 0]), poptorch.Error, ["depends on values"], []),
    (call(an_attribute_misspelt), AttributeError, ["'Other'", "'fc3'"], ["Poptorch"]),
    (an_unknown_short_name, AssertionError, ["'bias'", "'weights' and 'slopes'"], []),
    (an_anchor_read_before_a_run, AssertionError, ["'weights'", "has not run"], []),
    (an_unknown_long_name, poptorch.Error, ["'fc1.wieght'", "'fc1.weight'"], []),
    (an_anchor_after_wrapping, AttributeError, ["wrapped", "options.clone()"], []),
    (an_option_after_wrapping, AttributeError, ["frozen", "options.clone()"], []),
    (
        lambda: make_options().deviceIteration(4),
        AttributeError,
        ["'deviceIteration'", "'deviceIterations'"],
        [],
    ),
    (lambda: make_options().deviceIterations(2.5), AssertionError, ["2.5", "int"], []),
    (
        lambda: make_options().anchorTensor("it", "fc1.weight", "All"),
        AssertionError,
        ["'All'", "OutputMode.All"],
        ["literal"],
    ),
    (lambda: train().getTensorName(), AttributeError, ["'Net'", "'getTensorNames'"], []),
    (lambda: train().fc11, AttributeError, ["'fc11'", "'fc1'"], []),
    (lambda: train().getTensorNames(), AssertionError, ["not compiled", "compile("], []),
    (wrapped_twice, RuntimeError, ["already been wrapped", "destroy()"], []),
    (backward_is_called, RuntimeError, ["backward()", "Remove the call"], []),
    (parameters_of_another_model, poptorch.Error, ["[8, 4]", "not in the model"], []),
    (an_optimizer_in_the_place_of_options, poptorch.Error, ["options", "got SGD"], []),
    (
        lambda: train(make=torch.optim.LBFGS),
        AssertionError,
        ["LBFGS", "closure", "Use an optimizer"],
        [],
    ),
    (lambda: poptorch.inferenceModel(Net), poptorch.Error, ["torch.nn.Module", "type"], []),
    (too_few_micro_batches, poptorch.Error, ["gradientAccumulation(3)"], []),
    (a_block_that_no_stage_lists, AssertionError, ["Block 'b'", "Stage('a')"], []),
    (a_function_without_a_loop, poptorch.Error, ["no loop", "poptorch.repeat"], []),
]


def name_of(row: Row) -> str:
    return f"{row[0].__name__}: {row[2][0]}"


@pytest.mark.parametrize("row", MISTAKES, ids=name_of)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_the_message_says_what_is_wrong_and_what_to_do(row: Row) -> None:
    mistake, kind, words, others = row
    with pytest.raises(kind) as caught:
        mistake()
    text = str(caught.value)
    assert [word for word in words if word not in text] == []
    assert [word for word in others if word in text] == []


def test_the_table_has_forty_mistakes_and_more() -> None:
    assert len(MISTAKES) + len(WARNINGS) >= 40


# Mistakes that are no errors


@dataclass
class Changed:
    """A training in the middle of which the test changes a value of the optimizer."""

    make: Callable[..., torch.optim.Optimizer]
    change: Callable[[torch.optim.Optimizer], None]

    def __call__(self):
        net = Net()
        optimizer = self.make(net.parameters(), lr=0.1)
        model = poptorch.trainingModel(net, make_options(), optimizer)
        model(*batch())
        self.change(optimizer)
        for _ in range(3):
            model(*batch())


def set_value(**values):
    return lambda optimizer: optimizer.param_groups[0].update(values)


def a_scheduler_steps(optimizer):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.step()


def twenty_batch_norms():
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(20)]
    poptorch.trainingModel(
        nn.Sequential(nn.Sequential(*layers), Head()), make_options(), None
    ).compile(batch()[0])


class Head(nn.Module):
    def forward(self, x):
        return poptorch.identity_loss(x, "mean")


def too_little_data():
    data = torch.utils.data.TensorDataset(*batch(20))
    assert not list(poptorch.DataLoader(make_options(100), data, batch_size=2))


SGD = torch.optim.SGD
WARNINGS: list[tuple[Callable[[], object], list[str]]] = [
    (Changed(SGD, set_value(lr=0.01)), ["lr is now 0.01", "uses 0.1", "setOptimizer"]),
    (Changed(poptorch.optim.SGD, set_value(lr=0.01)), ["lr is now 0.01", "uses 0.1"]),
    (Changed(SGD, a_scheduler_steps), ["lr is now 0.01", "scheduler.step()"]),
    (Changed(torch.optim.Adam, set_value(betas=(0.5, 0.9))), ["betas is now (0.5, 0.9)", "(0.9, "]),
    (twenty_batch_norms, ["0.0.1.num_batches_tracked and 19 like it"]),
    (too_little_data, ["200 samples", "there are 20", "no batch at all"]),
]


@pytest.mark.parametrize(("mistake", "words"), WARNINGS, ids=[words[0] for _, words in WARNINGS])
def test_one_warning_says_what_is_wrong(mistake, words, caplog) -> None:
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        mistake()
    texts = [text for text in caplog.messages if words[0] in text]
    assert len(texts) == 1
    assert [word for word in words if word not in texts[0]] == []
    assert "\n" not in texts[0]


def test_a_misspelt_method_shows_one_line_of_ours_and_no_name_twice() -> None:
    with pytest.raises(AttributeError) as caught:
        train().fc11  # noqa: B018
    assert len(caught.traceback) == 2
    assert "".join(traceback.format_exception(caught.value)).count("'fc1'") == 1


def no_warning_of_values(caplog) -> bool:
    return not any("setOptimizer" in text for text in caplog.messages)


@pytest.mark.parametrize("make", [SGD, poptorch.optim.SGD, torch.optim.Adam])
def test_values_that_set_optimizer_is_told_are_no_mistake(make, caplog) -> None:
    net = Net()
    optimizer = make(net.parameters(), lr=0.1)
    model = poptorch.trainingModel(net, make_options(), optimizer)
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        for _ in range(3):
            optimizer.param_groups[0]["lr"] *= 0.5
            model.setOptimizer(optimizer)
            model(*batch())
        assert no_warning_of_values(caplog)
        optimizer.param_groups[0]["lr"] *= 0.5
        model(*batch())
    assert not no_warning_of_values(caplog)


def test_a_state_that_the_device_takes_over_is_no_mistake(caplog) -> None:
    net = Net()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    model = poptorch.trainingModel(net, make_options(), optimizer)
    model(*batch())
    state = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.05
    model.setOptimizer(optimizer)
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        optimizer.load_state_dict(state)
        model(*batch())
    assert no_warning_of_values(caplog)


def test_numpy_arrays_may_still_be_constants_of_a_call() -> None:
    class Scaled(nn.Module):
        def forward(self, x, factors):
            return x * torch.tensor(factors)

    factors = numpy.array([1.0, 2.0], dtype=numpy.float32)
    result = poptorch.inferenceModel(Scaled())(torch.ones(3, 2), factors)
    assert torch.equal(result, torch.ones(3, 2) * torch.tensor(factors))
