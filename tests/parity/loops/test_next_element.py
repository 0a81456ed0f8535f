"""``next(queue)`` in a body: the form of programs that take elements of an iterator."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import popsim_torch as poptorch
from popsim_torch.errors import Error

pytestmark = pytest.mark.timeout(60, method="thread")


def looped(body, iterations=3, inputs=(), infeed=None):
    @poptorch.function
    def run():
        return poptorch.repeat(iterations, body, inputs, infeed)

    return run()


def test_each_iteration_takes_an_element():
    with poptorch.InfeedQueue(torch.arange(8.0)) as infeed:
        elements = poptorch.OutfeedQueue()

        @poptorch.function
        def run():
            iterator = iter(infeed)
            poptorch.repeat(4, lambda: elements.enqueue(next(iterator)))

        run()
        run()
        assert elements.dequeue().tolist() == list(range(8))


def test_several_queues_feed_a_loop():
    pairs = poptorch.InfeedQueue([(torch.tensor(k), torch.tensor(k * k)) for k in range(6)])
    named = poptorch.InfeedQueue([{"x": torch.full((2,), 0.5 * k)} for k in range(6)])
    numbers, elements = poptorch.InfeedQueue(range(6)), poptorch.OutfeedQueue()

    def body(number):
        first, second = next(pairs)
        elements.enqueue((number, first, second, next(named)["x"]))

    with pairs, named, numbers:
        looped(body, 6, infeed=numbers)
    number, first, second, x = elements.dequeue()
    assert number.tolist() == first.tolist() == list(range(6))
    assert second.tolist() == [k * k for k in range(6)]
    assert x.tolist() == [[0.5 * k] * 2 for k in range(6)]


def test_training_on_two_datasets_is_that_of_eager_pytorch():
    generator = torch.Generator().manual_seed(0)
    labelled = [
        (torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(10)
    ]
    unlabelled = [torch.randn(8, 6, generator=generator) for _ in range(10)]
    model = nn.Linear(6, 3)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)

    def step(model, optimizer, x, y, others):
        optimizer.zero_grad()
        probabilities = model(others).softmax(1)
        entropy = -(probabilities * probabilities.log()).sum(1).mean()
        (functional.cross_entropy(model(x), y) + 0.1 * entropy).backward()
        optimizer.step()

    with poptorch.InfeedQueue(labelled) as first, poptorch.InfeedQueue(unlabelled) as second:
        looped(lambda x, y: step(model, optimizer, x, y, next(second)), 10, infeed=first)
    for (x, y), others in zip(labelled, unlabelled, strict=True):
        step(eager, reference, x, y, others)
    torch.testing.assert_close(model.weight.detach(), eager.weight.detach())


def test_in_a_conditional_loop_and_in_a_stage():
    with poptorch.InfeedQueue(torch.arange(20.0)) as infeed:

        @poptorch.function
        def run():
            return poptorch.while_loop(lambda total: total < 10, lambda x: x + next(infeed), 0.0)

        assert run().item() == 0 + 1 + 2 + 3 + 4
        sums = poptorch.OutfeedQueue()

        @poptorch.function
        def staged():
            poptorch.pipeline([lambda: next(infeed), lambda x: x * 2], 4, outfeed_queue=sums)

        staged()
        assert sums.dequeue().tolist() == [10, 12, 14, 16]


def test_mistakes():
    with poptorch.InfeedQueue(torch.arange(8.0)) as infeed:
        line = r"at .*test_next_element\.py:\d+"
        with pytest.raises(Error, match="elements are available only in the body of poptorch"):
            next(infeed)
        with pytest.raises(Error, match=rf"{line}: an iteration takes one element of an"):
            looped(lambda x: next(infeed) + next(infeed), inputs=0.0)
        with pytest.raises(Error, match=rf"{line}: the elements of this InfeedQueue are arguments"):
            looped(lambda c, x: c + next(infeed), inputs=0.0, infeed=infeed)

        @poptorch.function
        def run():
            poptorch.while_loop(lambda x: next(infeed) < 3, lambda x: x, 0.0)

        with pytest.raises(Error, match=rf"{line}: the condition of a loop takes no element"):
            run()
        assert looped(lambda x: x + next(infeed), inputs=0.0).item() == 0 + 1 + 2
