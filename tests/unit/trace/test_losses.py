"""The tensor that training starts from."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from popsim_torch.errors import Error
from popsim_torch.trace.losses import LOSS_FUNCTIONS, find_final_loss


@pytest.fixture
def w():
    return torch.ones(3, requires_grad=True)


def test_a_single_loss(w):
    loss = w.sum()
    assert find_final_loss([loss]) is loss


def test_the_order_of_the_calls_does_not_matter(w):
    first = w.sum()
    last = first * 2
    assert find_final_loss([first, last]) is last
    assert find_final_loss([last, first]) is last


def test_a_loss_may_feed_another_one_over_many_steps(w):
    first = w.sum()
    value = first
    for _ in range(50):
        value = value.exp().log()
    assert find_final_loss([first, value]) is value


def test_two_losses_may_feed_a_third(w):
    one, two = w.sum(), w.prod()
    total = one + two
    assert find_final_loss([one, two, total]) is total


def test_no_loss():
    with pytest.raises(Error, match="Couldn't find a loss in graph"):
        find_final_loss([])


def test_independent_losses(w):
    with pytest.raises(Error, match=r"Multiple independent losses found in graph \(2 of them\)"):
        find_final_loss([w.sum(), w.prod()])


def test_losses_with_a_common_source_are_independent(w):
    hidden = w * 2
    with pytest.raises(Error, match="Multiple independent losses"):
        find_final_loss([hidden.sum(), hidden.prod()])


def test_a_third_loss_that_joins_only_one(w):
    one, two = w.sum(), w.prod()
    with pytest.raises(Error, match="Multiple independent losses"):
        find_final_loss([one, two, one * 2])


def test_the_same_loss_twice(w):
    loss = w.sum()
    assert find_final_loss([loss, loss]) is loss


def test_a_loss_without_gradient_is_ignored(w):
    loss = w.sum()
    assert find_final_loss([torch.ones(()), loss, loss.detach()]) is loss


def test_losses_without_gradient_count_where_there_are_no_others():
    loss = torch.ones(())
    assert find_final_loss([loss]) is loss


@pytest.mark.parametrize("shape", [(2,), (1, 2), (3, 3)])
def test_a_loss_of_several_elements(shape):
    loss = torch.ones(shape, requires_grad=True) * 1
    with pytest.raises(Error, match="must be a scalar tensor, got shape") as caught:
        find_final_loss([loss])
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_one_element_of_any_rank(shape):
    loss = torch.ones(shape, requires_grad=True) * 1
    assert find_final_loss([loss]) is loss


def test_inner_losses_need_not_be_scalar(w):
    each = w * 2
    loss = each.mean()
    assert find_final_loss([each, loss]) is loss


# Which functions are losses, end to end

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
CLASSES = torch.tensor([0, 2, 1, 0])
TRUTH = torch.tensor([[1.0, 0.0, 1.0]] * 4)
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])

LOSSES = {
    "l1": lambda out: F.l1_loss(out, TRUTH),
    "l1 with weights": lambda out: F.l1_loss(out, TRUTH, weight=TRUTH + 0.5),
    "mse with weights": lambda out: F.mse_loss(out, TRUTH, weight=TRUTH + 0.5),
    "huber with weights": lambda out: F.huber_loss(out, TRUTH, weight=TRUTH + 0.5),
    "mse": lambda out: F.mse_loss(out, TRUTH, reduction="sum"),
    "cross entropy": lambda out: F.cross_entropy(out, CLASSES),
    "cross entropy sum": lambda out: F.cross_entropy(out, CLASSES, reduction="sum"),
    "ignored class": lambda out: F.cross_entropy(out, CLASSES, ignore_index=0),
    "smoothed": lambda out: F.cross_entropy(out, CLASSES, label_smoothing=0.1),
    "nll": lambda out: F.nll_loss(out.log_softmax(1), CLASSES),
    "bce": lambda out: F.binary_cross_entropy(out.sigmoid(), TRUTH),
    "bce with logits": lambda out: F.binary_cross_entropy_with_logits(out, TRUTH),
    "kl": lambda out: F.kl_div(out.log_softmax(1), TRUTH.softmax(1), reduction="batchmean"),
    "poisson": lambda out: F.poisson_nll_loss(out, TRUTH),
    "hinge": lambda out: F.hinge_embedding_loss(out[:, 0], SIGNS),
    "smooth l1": lambda out: F.smooth_l1_loss(out, TRUTH),
    "huber": lambda out: F.huber_loss(out, TRUTH),
    "soft margin": lambda out: F.soft_margin_loss(out[:, 0], SIGNS),
    "cosine": lambda out: F.cosine_embedding_loss(out, TRUTH, SIGNS),
    "ranking": lambda out: F.margin_ranking_loss(out[:, 0], out[:, 1], SIGNS),
    "triplet": lambda out: F.triplet_margin_loss(out, out * 2, TRUTH),
    "module": lambda out: nn.CrossEntropyLoss()(out, CLASSES),
    "identity sum": lambda out: poptorch.identity_loss(out * out, "sum"),
    "identity mean": lambda out: poptorch.identity_loss(out * out, "mean"),
    "identity none": lambda out: poptorch.identity_loss((out * out).sum(), "none"),
    "identity of a loss": lambda out: poptorch.identity_loss(F.mse_loss(out, TRUTH) * 3, "sum"),
    "regularised": lambda out: poptorch.identity_loss(
        F.mse_loss(out, TRUTH) + F.l1_loss(out, TRUTH), "sum"
    ),
}


class Trains(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self._loss = loss

    def forward(self, x):
        out = self.fc(x)
        return out, self._loss(out)


def train_once(net):
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    options.anchorTensor("g", "Gradient___fc.weight")
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.5))
    out, loss = model(X)
    return model.getAnchoredTensor("g"), out, loss


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_torch_losses_train_as_in_eager(loss):
    net = Trains(loss)
    twin = copy.deepcopy(net)
    gradient, _, value = train_once(net)
    _, expected = twin(X)
    expected.backward()
    torch.testing.assert_close(value, expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, twin.fc.weight.grad, rtol=1e-4, atol=1e-6)


def test_what_comes_behind_the_loss_does_not_change_the_gradient():
    def scaled(out):
        return F.mse_loss(out, TRUTH) * 5 + 7

    net = Trains(scaled)
    twin = copy.deepcopy(net)
    gradient, _, value = train_once(net)
    expected = F.mse_loss(twin.fc(X), TRUTH)
    expected.backward()
    torch.testing.assert_close(value, expected.detach() * 5 + 7, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, twin.fc.weight.grad, rtol=1e-4, atol=1e-6)


class Penalised(nn.Module):
    """A loss and more: ``rest`` is called with the loss and the layer."""

    def __init__(self, rest):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.rest = rest

    def forward(self, x, y):
        return self.rest(nn.functional.cross_entropy(self.layer(x), y), self.layer)


RESTS = {
    "penalty": (lambda loss, layer: loss + layer.weight.pow(2).sum(), 1),
    "marked": (lambda loss, layer: poptorch.identity_loss(loss + layer.weight.sum(), "sum"), 0),
    "perplexity": (lambda loss, _: (loss, loss.exp()), 0),
    "detached": (lambda loss, layer: (loss, loss + layer.weight.detach().sum()), 0),
    "beside": (lambda loss, layer: (loss, layer.weight.sum()), 0),
}


@pytest.mark.parametrize(("rest", "warnings"), RESTS.values(), ids=RESTS)
def test_a_term_behind_the_loss_is_warned_of(rest, warnings, caplog):
    training = poptorch.trainingModel(Penalised(rest))
    for _ in range(2):
        training(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    assert caplog.text.count("other terms have no gradient") == warnings


def test_a_half_loss_gets_a_half_seed():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3).half()

        def forward(self, x):
            out = self.fc(x.half())
            return out, poptorch.identity_loss(out, "mean")

    gradient, _, loss = train_once(Half())
    assert loss.dtype == torch.float16
    assert gradient.dtype == torch.float16
    expected = X.half().sum(0) / 12
    torch.testing.assert_close(gradient[0], expected, rtol=5e-3, atol=5e-3)


def test_every_loss_of_torch_is_known():
    public = {name for name in dir(F) if name.endswith("_loss") and not name.startswith("_")}
    known = {function.__name__ for function in LOSS_FUNCTIONS}
    assert public <= known


# Numbers behind the loss


class Behind(nn.Module):
    def __init__(self, finish):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("factor", torch.tensor(0.5))
        self._finish = finish

    def forward(self, x):
        out = self.fc(x)
        return self._finish(self, F.mse_loss(out, TRUTH))


def warnings_of(finish, caplog):
    net = Behind(finish)
    model = poptorch.trainingModel(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    model(X)
    return [one.getMessage() for one in caplog.records if "Training starts at" in one.getMessage()]


@pytest.mark.parametrize(
    "finish",
    [
        lambda net, loss: loss * 3,
        lambda net, loss: {"loss": loss / 4},
        lambda net, loss: loss * net.factor,
        lambda net, loss: loss * torch.tensor(0.5),
        lambda net, loss: (net.factor * 2, loss.exp()),
    ],
)
def test_a_number_with_other_gradients_than_the_loss_is_warned_of(finish, caplog):
    (message,) = warnings_of(finish, caplog)
    assert "is computed from the loss, and not the loss itself" in message
    assert "poptorch.identity_loss(number" in message


@pytest.mark.parametrize(
    "finish",
    [
        lambda net, loss: loss,
        lambda net, loss: (loss, loss * 3, loss.exp()),
        lambda net, loss: loss.view(1),
        lambda net, loss: loss.mean().clone(),
        lambda net, loss: loss + 1,
        lambda net, loss: (net.factor * 2, loss.detach() * 3),
        lambda net, loss: poptorch.identity_loss(loss * 3, "sum"),
        lambda net, loss: loss.div_(4),
    ],
)
def test_numbers_with_the_gradients_of_the_loss_are_not_warned_of(finish, caplog):
    assert not warnings_of(finish, caplog)


@pytest.mark.parametrize(
    ("finish", "cut"),
    [
        (lambda net, loss: (loss.detach() * net.fc.weight).mean(), True),
        (lambda net, loss: loss.detach() + net.fc.bias.mean() - net.fc.bias.mean().detach(), True),
        (lambda net, loss: (loss.detach(), net.fc.weight.pow(2).sum()), False),
        (lambda net, loss: net.fc.weight.pow(2).sum(), False),
    ],
)
def test_a_number_that_is_not_computed_from_the_loss_is_warned_of(finish, cut, caplog):
    (message,) = warnings_of(finish, caplog)
    assert "returns a number with a gradient, which is not computed from the loss" in message
    assert ("detach() cuts it off" in message) is cut


# Code of the user for gradients, behind the loss


class Scaled(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * -5


def hooked(loss):
    result = loss.clone()
    result.register_hook(lambda gradient: gradient * 5)
    return result


def looked_at(loss):
    result = loss.clone()
    result.register_hook(lambda gradient: None)
    return result


def in_a_module(loss):
    module = nn.Identity()
    module.register_full_backward_hook(lambda module, inside, outside: (inside[0] * 5,))
    return module(loss * 1)


BEHIND_THE_LOSS = {
    "a hook of a module": lambda net, loss: in_a_module(loss),
    "a function": lambda net, loss: Scaled.apply(loss),
    "a hook": lambda net, loss: hooked(loss),
    "a hook of a sum": lambda net, loss: hooked(loss + 3),
    "a hook that changes nothing": lambda net, loss: looked_at(loss),
    "in the middle": lambda net, loss: (net.factor, (hooked(Scaled.apply(loss)) * 1.0).view(1)),
    "beside a metric": lambda net, loss: (loss.detach() * 3, Scaled.apply(loss)),
    "a hook of the loss": lambda net, loss: (loss.register_hook(lambda g: g * 5), loss)[1],
}


def weights_after_a_step(finish, train):
    torch.manual_seed(3)
    net = Behind(finish)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return net.fc.weight.detach().clone()


def eager_step(net, optimizer):
    result = net(X)
    (result if isinstance(result, torch.Tensor) else result[1]).backward()
    optimizer.step()


def compiled_step(net, optimizer):
    poptorch.trainingModel(net, optimizer=optimizer)(X)


@pytest.mark.parametrize("name", BEHIND_THE_LOSS)
def test_gradients_that_are_changed_behind_the_loss(name, caplog):
    finish = BEHIND_THE_LOSS[name]
    mine = weights_after_a_step(finish, compiled_step)
    torch.testing.assert_close(mine, weights_after_a_step(finish, eager_step))
    assert not [one for one in caplog.records if "Training starts at" in one.getMessage()]


@pytest.mark.parametrize(
    "finish",
    [
        lambda net, loss: Scaled.apply(loss * 3),
        lambda net, loss: (Scaled.apply(loss), hooked(loss)),
        lambda net, loss: Scaled.apply(loss) + net.fc.weight.sum() * 0,
    ],
)
def test_other_numbers_behind_such_code_are_warned_of(finish, caplog):
    assert len(warnings_of(finish, caplog)) == 1


def test_such_code_beside_a_returned_loss_does_not_count():
    beside = weights_after_a_step(lambda net, loss: (loss, Scaled.apply(loss)), compiled_step)
    torch.testing.assert_close(beside, weights_after_a_step(lambda net, loss: loss, eager_step))


# Losses that forward differentiates itself


class Inner(nn.Module):
    """One inner step on a loss, and another loss behind it."""

    def __init__(self, outer):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self._outer = outer

    def forward(self, x):
        weights = list(self.fc.parameters())
        inner = F.mse_loss(F.linear(x, *weights), TRUTH)
        gradients = torch.autograd.grad(inner, weights, create_graph=True)
        moved = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
        return self._outer(inner, (F.linear(x, *moved) - TRUTH).abs().mean())


class Fused(torch.autograd.Function):
    """Computes a loss together with its gradient."""

    @staticmethod
    def forward(ctx, logits):
        with torch.enable_grad():
            x = logits.detach().requires_grad_()
            loss = F.mse_loss(x, TRUTH)
            (gradient,) = torch.autograd.grad(loss, x)
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx, seed):
        return seed * ctx.saved_tensors[0]


@pytest.mark.parametrize(
    "net", [Inner(lambda inner, outer: outer), Trains(Fused.apply)], ids=["maml", "fused"]
)
def test_a_loss_that_forward_differentiates_is_not_trained_on(net):
    with pytest.raises(poptorch.Error, match="one whose gradient it computes itself"):
        poptorch.trainingModel(net)(X)


def marked(loss):
    return poptorch.identity_loss(loss, "sum")


@pytest.mark.parametrize(
    "net",
    [
        Inner(lambda inner, outer: marked(outer)),
        Inner(lambda inner, outer: inner),
        Inner(lambda inner, outer: (inner, outer.detach())),
        Trains(lambda out: marked(Fused.apply(out))),
    ],
    ids=["outer", "inner", "both", "fused"],
)
def test_the_loss_of_a_model_that_differentiates(net):
    twin = copy.deepcopy(net)
    model = poptorch.trainingModel(net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0))
    model(X)
    outputs = twin(X)
    every = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    next(one for one in every if one.requires_grad and not one.dim()).backward()
    for own, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), (theirs - theirs.grad).detach())
