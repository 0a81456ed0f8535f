"""Elements of queues from inside of loops and branches are never dead code."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


def chosen(x, queue):
    def if_true(x):
        queue.enqueue(x)
        return x * 2

    return poptorch.cond(x > 2, if_true, [x], lambda x: x, [x])[0]


def chosen_by_torch(x, queue):
    def if_true(x):
        queue.enqueue(x)
        return x * 2

    return torch.cond(x > 2, if_true, lambda x: x.clone(), (x,))


def repeated(x, queue):
    def body(x):
        queue.enqueue(x)
        return x * 2

    return poptorch.for_loop(2, body, [x])[0]


def nested(x, queue):
    return poptorch.for_loop(2, lambda x: chosen(x, queue) + 1, [x])[0]


EXPECTED = {
    chosen: [3, 4],
    chosen_by_torch: [3, 4],
    repeated: [0, 0, 1, 2, 2, 4, 3, 6, 4, 8],
    # The second iteration of 2 enqueues 3; both of 3 enqueue 3 and 7.
    nested: [3, 3, 7, 4, 9],
}


@pytest.mark.parametrize("use", [True, False], ids=["used", "unused"])
@pytest.mark.parametrize("inner", EXPECTED, ids=lambda function: function.__name__)
def test_in_the_body_of_a_device_loop(inner, use):
    queue = poptorch.OutfeedQueue()

    @poptorch.function
    def run():
        def body(x):
            result = inner(x, queue)
            return x + 1 + (result * 0 if use else 0)

        return poptorch.repeat(5, body, 0.0)

    assert run().item() == 5
    assert queue.dequeue().tolist() == EXPECTED[inner]


class Model(nn.Module):
    def __init__(self, inner, queue, use):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))
        self.inner, self.queue, self.use = inner, queue, use

    def forward(self, x):
        result = self.inner(x.sum() * 0 + self.weight, self.queue)
        y = self.weight * x + (result if self.use else 0)
        return poptorch.identity_loss(y, "sum")


@pytest.mark.parametrize("use", [True, False], ids=["used", "unused"])
@pytest.mark.parametrize("inner", [chosen, repeated, nested], ids=lambda f: f.__name__)
def test_in_a_model_that_trains(inner, use):
    """Once for each micro-batch, also where the gradient computes the values once more."""
    queue = poptorch.OutfeedQueue()
    model = Model(inner, queue, use)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = poptorch.trainingModel(
        model, poptorch.Options().deviceIterations(3), optimizer=optimizer
    )
    training(torch.ones(3))
    one = {chosen: [3], repeated: [3, 6], nested: [3, 7]}[inner]
    assert queue.dequeue().tolist() == one * 3
