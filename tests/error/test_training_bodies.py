"""Mistakes with gradients and optimizers in the body of a loop."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import popsim_torch as poptorch
from popsim_torch.errors import Error

LINE = r"at .*test_training_bodies\.py:\d+"
X = torch.ones(2, 3)


class Training:
    """A model and its optimizer."""

    def __init__(self):
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self):
        return self.model(X).square().mean()


def repeated(body):
    @poptorch.function
    def run():
        poptorch.repeat(2, body)

    run()


@pytest.fixture
def training():
    return Training()


def test_gradients_that_would_add_up(training):
    def body():
        training.loss().backward()
        training.optimizer.step()

    with pytest.raises(
        Error, match=rf"step\(\) {LINE}: the body never calls zero_grad\(\)"
    ) as told:
        repeated(body)
    assert "so that gradients of 'model.weight' would add up" in str(told.value)
    assert "To update every g-th trip, pass gradient_accumulation=g to repeat." in str(told.value)


def test_no_gradient(training):
    def body():
        training.optimizer.zero_grad()
        training.loss()
        training.optimizer.step()

    with pytest.raises(Error, match=rf"{LINE}: none of its parameters has a gradient\. Call loss"):
        repeated(body)


def test_a_loss_without_parameters(training):
    def body():
        X.square().mean().to("ipu").backward()

    with pytest.raises(Error, match=rf"{LINE}: the tensor of shape \(\) depends on no parameter"):
        repeated(body)


def test_a_loss_that_is_no_number(training):
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar"):
        repeated(lambda: training.model(X).backward())


def test_two_steps_in_a_trip(training):
    def body():
        training.optimizer.zero_grad()
        training.loss().backward()
        training.optimizer.step()
        training.optimizer.step()

    with pytest.raises(Error, match=rf"step\(\) {LINE} is called a second time in one trip"):
        repeated(body)


def test_two_optimizers_of_one_parameter(training):
    other = torch.optim.SGD(training.model.parameters(), lr=0.1)

    def body():
        training.optimizer.zero_grad()
        training.loss().backward()
        training.optimizer.step()
        other.step()

    with pytest.raises(Error, match=rf"{LINE}: another optimizer updates the parameter '.*weight'"):
        repeated(body)


def test_a_weight_behind_its_update(training):
    def body():
        training.optimizer.zero_grad()
        training.loss().backward()
        training.optimizer.step()
        training.loss()

    with pytest.raises(
        Error, match=rf"reads the parameter '.*weight' {LINE} behind optimizer\.step\(\) {LINE}"
    ) as caught:
        repeated(body)
    assert "compute the losses of both in front of the first step()" in str(caught.value)


def test_losses_of_both_in_front_of_the_first_step():
    """What the message above says: a generator and a discriminator that take turns."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(2, 3), nn.Linear(3, 1)
    first = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    second = torch.optim.SGD(generator.parameters(), lr=0.1)
    before = discriminator.weight.detach().clone(), generator.weight.detach().clone()
    losses = poptorch.OutfeedQueue()

    def body():
        made = generator(X[:, :2])
        of_first = functional.softplus(discriminator(made.detach())).mean()
        of_first = of_first + functional.softplus(-discriminator(X)).mean()
        of_second = functional.softplus(-discriminator(made)).mean()
        first.zero_grad()
        of_first.backward()
        first.step()
        second.zero_grad()
        of_second.backward()
        second.step()
        losses.enqueue((of_first, of_second))

    repeated(body)
    assert all(values.shape == (2,) for values in losses.dequeue())
    assert not torch.equal(discriminator.weight, before[0])
    assert not torch.equal(generator.weight, before[1])


def test_a_closure(training):
    with pytest.raises(Error, match=rf"step\(closure\) {LINE}: closures are not supported"):
        repeated(lambda: training.optimizer.step(training.loss))


def test_an_optimizer_that_is_made_in_the_body(training):
    def body():
        optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
        optimizer.zero_grad()
        training.loss().backward()
        optimizer.step()

    with pytest.raises(
        Error, match=r"uses a SGD that was made while it was traced\. Make it outside"
    ):
        repeated(body)


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning")
def test_a_scheduler_in_the_body(training):
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5)

    def body():
        training.optimizer.zero_grad()
        training.loss().backward()
        training.optimizer.step()
        scheduler.step()

    with pytest.raises(Error, match=r"changes the values of the optimizer SGD, such as by sched"):
        repeated(body)
    assert training.optimizer.param_groups[0]["lr"] == 0.1


def test_a_forgotten_step_is_told(training, caplog):
    def body():
        training.optimizer.zero_grad()
        training.loss().backward()

    repeated(body)
    (told,) = [record.message for record in caplog.records if "has no effect" in record.message]
    assert re.search(rf"backward\(\) {LINE} has no effect: the body steps no optimizer", told)


def test_gradients_that_are_read_are_no_mistake(training, caplog):
    queue = poptorch.OutfeedQueue()

    def body():
        training.optimizer.zero_grad()
        training.loss().backward()
        queue.enqueue(training.model.weight.grad)

    repeated(body)
    assert queue.dequeue().shape == (2, 1, 3)
    assert not any("has no effect" in record.message for record in caplog.records)
