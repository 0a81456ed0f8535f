"""Losses and functions of each row of what a mask that only a run knows selects."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import popsim_torch as poptorch
from tests.sweeps import one_by_one

ROWS = {}


def of_rows(function):
    ROWS[function.__name__] = function
    return function


@of_rows
def linear(net, h, mask):
    return net.linear(h[mask]).pow(2)


@of_rows
def layers(net, h, mask):
    return net.layers(h[mask]) * 2


@of_rows
def softmax(net, h, mask):
    return h[mask].softmax(-1) * F.log_softmax(h[mask], 1)


@of_rows
def along_rows(net, h, mask):
    x = h[mask]
    total = x.sum(1) + x.mean(dim=-1) + torch.logsumexp(x, 1) + x.std(dim=1) + x.amax(-1)
    return total + x.max(dim=1).values * x.norm(dim=1) + x.norm(2, -1)


@of_rows
def kept_dimensions(net, h, mask):
    x = h[mask]
    return (x - x.mean(-1, keepdim=True)) / x.var(1, keepdim=True).add(1).sqrt()


@of_rows
def positions(net, h, mask):
    x = h[mask]
    best = x.argmax(dim=-1)
    return x.gather(1, best.unsqueeze(1)).squeeze(1) + x.gather(-1, best[:, None])[:, 0]


@of_rows
def parts(net, h, mask):
    a, b = h[mask].chunk(2, dim=1)
    c, d = h[mask].split(2, dim=-1)
    return torch.cat([a * d, b + c, h[mask][:, 1:3]], dim=1) + h[mask][..., :1]


@of_rows
def stacked(net, h, mask):
    x = h[mask]
    return torch.stack([x, x**2], dim=1).flatten(1) + torch.stack([x, -x], -1).view(-1, 8)


@of_rows
def sizes(net, h, mask):
    x = h[mask]
    pairs = x.reshape(-1, 2, x.shape[-1] // 2)
    return pairs.sum(2) / x.size(1) ** 0.5 + pairs.mean((1, 2))[:, None] + len(x.shape)


@of_rows
def products(net, h, mask):
    x = h[mask]
    y = x @ net.linear.weight.t() + torch.matmul(x, net.linear.weight[0])[:, None]
    return y + torch.bmm(x.reshape(-1, 2, 2), x.reshape(-1, 2, 2)).flatten(1).sum(1, keepdim=True)


@of_rows
def normed(net, h, mask):
    x = h[mask]
    return F.normalize(x, dim=-1) * F.cosine_similarity(x, x * x, dim=-1).unsqueeze(-1)


@of_rows
def ordered(net, h, mask):
    x = h[mask]
    return x.sort(dim=-1)[0] + x.topk(2, dim=1)[0].sum(1, keepdim=True) + x.cumsum(1)


@of_rows
def embedded(net, h, mask):
    return net.embedding(h[mask].argmax(-1)) + F.one_hot(h[mask].argmin(-1), 4)


@of_rows
def images(net, h, mask):
    x = h[..., None, None].expand(-1, -1, -1, 3, 3)[mask]
    return F.max_pool2d(net.convolution(x), 2).flatten(1)


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 4))
        self.linear = nn.Linear(4, 3)
        self.layers = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
        self.embedding = nn.Embedding(4, 4)
        self.convolution = nn.Conv2d(4, 2, 2, padding=1)
        self.function = function

    def forward(self, x, choice):
        result = self.function(self, self.weight * x, choice > 0)
        return poptorch.identity_loss(result.sum(), reduction="none")


def check(net, *inputs):
    eager = copy.deepcopy(net)
    expected = eager(*inputs)
    expected.backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    loss = poptorch.trainingModel(net, optimizer=optimizer)(*inputs)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
    for own, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        gradient = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(own.detach(), (theirs - gradient).detach(), rtol=1e-4, atol=1e-5)


CHOICES = {
    "some": torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 0, 1], [0, 0, 0, 1, 0]]),
    "none": torch.zeros(3, 5, dtype=torch.int64),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")  # (of eager PyTorch, without rows)
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("function", ROWS.values(), ids=ROWS)
def test_a_function_of_each_row(function, choice):
    torch.manual_seed(3)
    check(Net(function), torch.randn(3, 5, 4), choice)


def classes(**settings):
    def loss(net, h, mask, labels):
        return F.cross_entropy(net.linear(h)[mask], labels[mask], **settings)

    return loss


def elements(function, **settings):
    def loss(net, h, mask, labels):
        target = torch.sigmoid(labels.unsqueeze(-1) - h.detach())
        return function(torch.sigmoid(h[mask]), target[mask], **settings)

    return loss


def with_weights(function, reduction="mean"):
    def loss(net, h, mask, labels):
        weight = (labels + 1.0).unsqueeze(-1).expand(-1, -1, 4)
        return function(h[mask], (h**2)[mask], weight=weight[mask], reduction=reduction)

    return loss


def negative_log_likelihood(net, h, mask, labels):
    return nn.NLLLoss()(net.linear(h).log_softmax(-1)[mask], labels[mask])


def of_axes(net, h, mask, labels):
    # (3 classes and 5 positions in each of 3 rows)
    return F.cross_entropy(net.linear(h).transpose(1, 2)[mask[:, 0]], labels[mask[:, 0]])


def probabilities(net, h, mask, labels):
    target = F.one_hot(labels, 3).float() * 0.7 + 0.1
    return F.cross_entropy(net.linear(h)[mask], target[mask])


def divergence(reduction):
    def loss(net, h, mask, labels):
        target = h.detach().softmax(-1)
        return F.kl_div(F.log_softmax(h * 2, -1)[mask], target[mask], reduction=reduction)

    return loss


def similar_rows(net, h, mask, labels):
    same = labels * 2.0 - 1
    return F.cosine_embedding_loss(h[mask], (h**2)[mask], same.clamp(-1, 1)[mask], margin=0.1)


def ranked(net, h, mask, labels):
    return F.margin_ranking_loss(h[mask], (h**2)[mask], torch.ones_like(h)[mask], margin=0.3)


def triplets(net, h, mask, labels):
    return nn.TripletMarginLoss()(h[mask], (h**2)[mask], h.flip(0)[mask])


def margins(net, h, mask, labels):
    return F.multi_margin_loss(
        net.linear(h)[mask], labels[mask], weight=torch.tensor([1.0, 2.0, 3.0])
    )


def labels_of_rows(net, h, mask, labels):
    target = F.one_hot(labels, 3)
    return F.multilabel_soft_margin_loss(net.linear(h)[mask], target[mask])


def gaussian(net, h, mask, labels):
    return F.gaussian_nll_loss(h[mask], h.detach()[mask] * 2, (h**2 + 0.1)[mask])


def without_reduction(net, h, mask, labels):
    each = F.cross_entropy(net.linear(h)[mask], labels[mask], reduction="none")
    return poptorch.identity_loss((each * labels[mask]).mean(), reduction="none")


def several(net, h, mask, labels):
    logits = net.linear(h)
    hit = (logits.argmax(-1)[mask] == labels[mask]).float().mean()
    loss = F.cross_entropy(logits[mask], labels[mask]) + 0.1 * F.mse_loss(h[~mask], h[~mask] ** 2)
    return poptorch.identity_loss(loss + hit.detach() * 0, reduction="none")


LOSSES = {
    "cross_entropy": classes(),
    "cross_entropy, sum": classes(reduction="sum"),
    "cross_entropy, weights": classes(weight=torch.tensor([1.0, 2.0, 3.0])),
    "cross_entropy, ignored": classes(ignore_index=1),
    "cross_entropy, smooth": classes(label_smoothing=0.1),
    "mse": elements(F.mse_loss),
    "mse, sum": elements(F.mse_loss, reduction="sum"),
    "l1": elements(F.l1_loss),
    "smooth_l1": elements(F.smooth_l1_loss, beta=0.2),
    "huber": elements(F.huber_loss),
    "binary": elements(F.binary_cross_entropy, weight=torch.arange(1.0, 5.0)),
    "logits": elements(F.binary_cross_entropy_with_logits, pos_weight=torch.arange(1.0, 5.0)),
    "poisson": elements(F.poisson_nll_loss),
    "soft_margin": elements(F.soft_margin_loss),
    "hinge": elements(F.hinge_embedding_loss),
    "mse, weights": with_weights(F.mse_loss),
    "mse, weights, sum": with_weights(F.mse_loss, "sum"),
    "l1, weights": with_weights(F.l1_loss),
    "huber, weights": with_weights(F.huber_loss),
    "kl_div, batchmean": divergence("batchmean"),
    "kl_div, sum": divergence("sum"),
    **{
        one.__name__: one
        for one in (
            negative_log_likelihood,
            of_axes,
            probabilities,
            similar_rows,
            ranked,
            triplets,
            margins,
            labels_of_rows,
            gaussian,
            without_reduction,
            several,
        )
    },
}


class WithLoss(Net):
    def forward(self, x, choice, labels):
        return self.function(self, self.weight * x, choice > 0, labels)


@pytest.mark.parametrize(("name", "chosen"), one_by_one(LOSSES, CHOICES))
def test_a_loss(name, chosen):
    function, choice = LOSSES[name], CHOICES[chosen]
    if function is margins and not choice.any():
        pytest.skip("eager PyTorch returns memory that it has not written")
    torch.manual_seed(4)
    check(WithLoss(function), torch.randn(3, 5, 4), choice, torch.randint(3, (3, 5)))


def computed_again(net, h, mask, labels):
    return F.cross_entropy(net.linear(h)[labels != 2], labels[labels != 2])


def flat(net, h, mask, labels):
    active = mask.view(-1) == 1
    return F.cross_entropy(net.linear(h).view(-1, 3)[active], labels.view(-1)[mask.view(-1) == 1])


def combined(net, h, mask, labels):
    y = h * 1
    y[mask & (labels > 0)] = h[mask & (labels > 0)].exp()
    return F.mse_loss(y, h**2)


@pytest.mark.parametrize("function", [computed_again, flat, combined])
def test_masks_that_are_computed_twice(function):
    torch.manual_seed(5)
    check(WithLoss(function), torch.randn(3, 5, 4), CHOICES["some"], torch.randint(3, (3, 5)))


def changed_in_between(net, h, mask, labels):
    labels = labels.clone()
    seen = labels.view(-1)
    target = labels[seen.view(3, 5) > 0]
    labels.sub_(1)
    return F.cross_entropy(net.linear(h)[seen.view(3, 5) > 0], target)


def with_other_numbers(net, h, mask, labels):
    return F.cross_entropy(net.linear(h)[labels > 0], labels[labels > 1])


def random_masks(net, h, mask, labels):
    return F.mse_loss(h[torch.rand(3, 5) > 0.5], h[torch.rand(3, 5) > 0.5])


def labels_of_their_own(net, h, mask, labels):
    return F.cross_entropy(net.linear(h)[mask], labels[:, 0])


@pytest.mark.parametrize(
    "function", [changed_in_between, with_other_numbers, random_masks, labels_of_their_own]
)
def test_rows_that_do_not_belong_together(function):
    model = poptorch.trainingModel(WithLoss(function))
    with pytest.raises(poptorch.Error, match=r"(cross_entropy|mse_loss), with"):
        model(torch.randn(3, 5, 4), CHOICES["some"], torch.randint(3, (3, 5)))
