"""Hooks that parameters have when their model is compiled: they change gradients, and show them."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

MASK = (torch.arange(32).reshape(8, 4) % 2).float()
HOOKS = {
    "scales": [lambda g: g * 0.5],
    "masks with a tensor of the host": [lambda g: g * MASK],
    "two in their order": [lambda g: g + 1, lambda g: g * 2],
    "changes nothing": [lambda g: None],
}


class Model(nn.Module):
    def __init__(self, hooks):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        for hook in hooks:
            self.first.weight.register_hook(hook)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.last(self.first(x).tanh()), y)


def batches():
    torch.manual_seed(1)
    return [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(3)]


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def calls(model):
    executor = poptorch.trainingModel(model, make_options(), momentum(model))
    for batch in batches():
        executor(*batch)


def fits(model):
    poptorch.fit(model, batches(), optimizer=momentum(model), verbose=0)


@pytest.mark.parametrize("train", [calls, fits])
@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
def test_hooks_change_gradients_as_in_eager_pytorch(train, hooks):
    model, expected = Model(hooks), Model(hooks)
    train(model)
    optimizer = momentum(expected)
    for batch in batches():
        optimizer.zero_grad()
        expected(*batch).backward()
        optimizer.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()))


@pytest.mark.parametrize("train", [calls, fits])
def test_a_hook_enqueues(train):
    queue = poptorch.OutfeedQueue()
    train(Model([lambda g: queue.enqueue(g)]))
    assert queue.dequeue().shape == (3, 8, 4)


@pytest.mark.parametrize("train", [calls, fits])
def test_a_hook_that_reads_values_is_refused(train):
    with pytest.raises(poptorch.Error, match="does not exist while the model is traced"):
        train(Model([lambda g: print(g.norm().item())]))


def test_inference_asks_no_hook():
    model = Model([lambda g: g * float("nan")])
    (batch, *_) = batches()
    expected = model(*batch).detach()
    torch.testing.assert_close(poptorch.inferenceModel(model, make_options())(*batch), expected)
