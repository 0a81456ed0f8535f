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
    assert "so gradients of 'model.weight' would add up" in str(told.value)
    assert "every g-th iteration, pass gradient_accumulation=g to repeat." in str(told.value)


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

    with pytest.raises(Error, match=rf"{LINE}: the tensor of shape \(\) does not depend on"):
        repeated(body)


def test_a_loss_that_is_no_number(training):
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar"):
        repeated(lambda: training.model(X).backward())


def test_two_optimizers_of_one_parameter(training):
    other = torch.optim.SGD(training.model.parameters(), lr=0.1)

    def body():
        training.optimizer.zero_grad()
        training.loss().backward()
        training.optimizer.step()
        other.step()

    with pytest.raises(Error, match=rf"{LINE}: another optimizer updates the parameter '.*weight'"):
        repeated(body)


class Gan:
    """A generator, a discriminator and their optimizers."""

    def __init__(self):
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(2, 3), nn.Linear(3, 1)
        self.of_g = torch.optim.SGD(self.generator.parameters(), lr=0.1)
        self.of_d = torch.optim.SGD(self.discriminator.parameters(), lr=0.1)

    def loss_d(self):
        made = self.generator(X[:, :2]).detach()
        loss = functional.softplus(self.discriminator(made)).mean()
        return loss + functional.softplus(-self.discriminator(X)).mean()

    def loss_g(self):
        return functional.softplus(-self.discriminator(self.generator(X[:, :2]))).mean()


@pytest.fixture
def gan():
    return Gan()


def test_a_loss_from_before_a_step(gan):
    """PyTorch refuses this too: the gradient would be for weights that never existed together."""

    def body():
        of_d, of_g = gan.loss_d(), gan.loss_g()
        gan.of_d.zero_grad()
        of_d.backward()
        gan.of_d.step()
        gan.of_g.zero_grad()
        of_g.backward()
        gan.of_g.step()

    with pytest.raises(
        RuntimeError,
        match=rf"backward\(\) {LINE} needs the weights that the loss was computed with, but "
        rf"optimizer\.step\(\) {LINE} has changed them since\. Call step\(\) after this",
    ) as told:
        repeated(body)
    assert isinstance(told.value, poptorch.Error)
    assert "modified by an inplace operation" in str(told.value)


@pytest.mark.parametrize("change", ["steps after", "loss after"])
def test_what_that_message_says(gan, change):
    losses = poptorch.OutfeedQueue()
    before = gan.generator.weight.detach().clone()

    def body():
        gan.of_d.zero_grad()
        gan.of_g.zero_grad()
        of_d = gan.loss_d()
        if change == "steps after":
            of_g = gan.loss_g()
            of_d.backward()
            of_g.backward()
            gan.of_d.step()
        else:
            of_d.backward()
            gan.of_d.step()
            of_g = gan.loss_g()
            of_g.backward()
        gan.of_g.step()
        losses.enqueue((of_d, of_g))

    repeated(body)
    assert all(values.shape == (2,) for values in losses.dequeue())
    assert not torch.equal(gan.generator.weight, before)


def test_gradients_that_an_iteration_leaves_to_the_next(gan):
    """The gradients of the generator's loss also stay in the discriminator."""

    def body():
        gan.loss_d().backward()
        gan.of_d.step()
        gan.of_d.zero_grad()
        gan.loss_g().backward()
        gan.of_g.step()
        gan.of_g.zero_grad()

    with pytest.raises(
        Error,
        match=rf"step\(\) {LINE}: the gradient of '.*discriminator.weight' would contain "
        rf"the gradient that backward\(\) {LINE} has left in the iteration before\. Call",
    ):
        repeated(body)


def test_gradients_that_are_looked_at_and_add_up(training):
    queue = poptorch.OutfeedQueue()

    def body():
        training.loss().backward()
        queue.enqueue(training.model.weight.grad)

    with pytest.raises(Error, match=rf"parameter\.grad {LINE}: the body never calls zero_grad"):
        repeated(body)


def test_gradients_that_are_cleared_by_hand(training):
    """In the first iteration there is no gradient to clear, so it differs from the others."""

    def body():
        for parameter in training.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        training.loss().backward()
        training.optimizer.step()

    with pytest.raises(Error, match=rf"parameter\.grad {LINE}: the body never calls zero_grad"):
        repeated(body)


def test_a_gradient_that_is_none_in_the_first_iteration(gan):
    optimizer = torch.optim.SGD(gan.discriminator.parameters(), lr=0.1, weight_decay=0.1)

    def body():
        optimizer.zero_grad(set_to_none=False)
        gan.discriminator.weight.square().mean().backward()
        optimizer.step()
        gan.discriminator.bias.square().mean().backward()

    with pytest.raises(
        Error,
        match=rf"step\(\) {LINE}: the gradient of '.*discriminator.bias' is None in the first "
        rf"iteration, and zeros in all others: backward\(\) {LINE} leaves a gradient",
    ):
        repeated(body)


def test_accumulation_of_what_is_read_behind_its_update(gan):
    def body():
        gan.of_d.zero_grad()
        gan.of_g.zero_grad()
        gan.loss_d().backward()
        gan.of_d.step()
        gan.loss_g().backward()
        gan.of_g.step()

    @poptorch.function
    def run():
        poptorch.repeat(4, body, gradient_accumulation=2)

    with pytest.raises(
        Error,
        match=rf"step\(\) {LINE} has to change '.*discriminator\.weight' at once: the body at "
        rf".*:\d+ uses its weights, or changes its gradients, after step\(\)\. With "
        r"gradient_accumulation=2 weights change once per 2 iterations, at their end\. Do",
    ):
        run()


def test_accumulation_of_two_steps(training):
    def body():
        training.optimizer.zero_grad()
        training.loss().backward()
        training.optimizer.step()
        training.optimizer.step()

    @poptorch.function
    def run():
        poptorch.repeat(4, body, gradient_accumulation=2)

    with pytest.raises(Error, match=r"at once: the body calls step\(\) again for the same weights"):
        run()


def test_stages_of_what_is_read_behind_its_update(gan):
    def body():
        gan.of_d.zero_grad()
        with poptorch.Block(ipu_id=0):
            hidden = gan.discriminator(X)
        with poptorch.Block(ipu_id=1):
            hidden.square().mean().backward()
            gan.of_d.step()
            gan.discriminator(X)

    options = poptorch.Options()
    options.setExecutionStrategy(poptorch.ShardedExecution())

    @poptorch.function(options=options)
    def run():
        poptorch.repeat(4, body)

    with pytest.raises(
        Error,
        match=rf"step\(\) {LINE} has to change '.*discriminator\.weight' at once: the body "
        rf"{LINE} uses its weights.*2 pipeline stages weights change only at the end",
    ):
        run()


def test_automatic_loss_scaling_of_what_is_read_behind_its_update(training):
    def body():
        training.optimizer.zero_grad()
        training.loss().backward()
        training.optimizer.step()
        training.loss()

    options = poptorch.Options()
    options.Training.setAutomaticLossScaling(True)

    @poptorch.function(options=options)
    def run():
        poptorch.repeat(4, body)

    with pytest.raises(Error, match=r"at once: .* Automatic loss scaling reads all gradients at"):
        run()


def test_queues_of_gradients_of_several_steps(training):
    optimizer = poptorch.OutfeedOptimizer(
        training.optimizer, poptorch.MaybeOutfeedQueue(filters=None)
    )

    def body():
        for _ in range(2):
            optimizer.zero_grad()
            training.loss().backward()
            optimizer.step()

    with pytest.raises(
        Error, match=r"OutfeedOptimizer: the iteration has 2 gradients of '.*weight', one"
    ):
        repeated(body)


def test_a_step_in_a_loop_of_the_body(training):
    def body():
        training.optimizer.zero_grad()
        loss = training.loss()
        loss.backward()

        def inner(x):
            training.optimizer.step()
            return x + 1

        poptorch.for_loop(3, inner, [loss.detach()])

    with pytest.raises(
        Error, match=rf"step\(\) {LINE} is called in a function that poptorch.for_l"
    ):
        repeated(body)


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
        Error, match=r"uses a SGD that was made during the trace of the body\. Make it outside"
    ):
        repeated(body)


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    ],
    ids=["each step", "each third step", "a step of its own"],
)
@pytest.mark.parametrize("in_body", [True, False], ids=["in the body", "after the loop"])
def test_a_scheduler_in_the_function(training, make, in_body):
    scheduler = make(training.optimizer)

    def body():
        training.optimizer.zero_grad()
        training.loss().backward()
        training.optimizer.step()
        if in_body:
            scheduler.step()

    @poptorch.function
    def run():
        poptorch.repeat(2, body)
        scheduler.step()

    with pytest.raises(Error, match=rf"\w+\.step\(\) is called {LINE} in a poptorch.function"):
        run()
    assert training.optimizer.param_groups[0]["lr"] == 0.1
    assert scheduler.last_epoch == 0


def test_a_learning_rate_that_the_body_changes(training):
    def body():
        training.optimizer.zero_grad()
        training.loss().backward()
        training.optimizer.step()
        training.optimizer.param_groups[0]["lr"] *= 0.5

    with pytest.raises(
        Error, match=r"changes the values of the optimizer SGD, for example by sched"
    ):
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
