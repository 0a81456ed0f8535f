"""``next(iterator)`` in a body, of an iterator of the host's: each iteration takes an element."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import popsim_torch as poptorch
from popsim_torch.errors import Error, UsageTypeError

pytestmark = pytest.mark.timeout(60, method="thread")
LINE = r"at .*test_host_iterators\.py:\d+"


def generated():
    yield from torch.arange(12.0)


SOURCES = {
    "list": lambda: iter(list(torch.arange(12.0))),
    "generator": generated,
    "count": lambda: itertools.count(0),
    "map": lambda: map(float, range(12)),
    "loader": lambda: iter(DataLoader(torch.arange(12.0), batch_size=None)),
    "workers": lambda: iter(DataLoader(torch.arange(12.0), batch_size=None, num_workers=1)),
    "poptorch": lambda: iter(
        poptorch.DataLoader(poptorch.Options(), torch.arange(12.0), batch_size=1)
    ),
}


def looped(body, iterations=3, inputs=()):
    @poptorch.function
    def run():
        return poptorch.repeat(iterations, body, inputs)

    return run()


@pytest.mark.parametrize("kind", SOURCES)
def test_each_iteration_takes_an_element_in_every_call(kind):
    iterator, elements = SOURCES[kind](), poptorch.OutfeedQueue()

    @poptorch.function
    def run():
        poptorch.repeat(3, lambda: elements.enqueue(next(iterator)))

    run()
    run()
    assert elements.dequeue().flatten().tolist() == list(range(6))


def test_the_loop_of_the_reference_trains_as_in_eager_pytorch():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
    model, eager = nn.Linear(6, 3), nn.Linear(6, 3)
    eager.load_state_dict(model.state_dict())
    losses = poptorch.OutfeedQueue()

    def step(model, optimizer, features, labels):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        return loss

    @poptorch.function
    def training_loop(iterator, outfeed_queue, model, optimizer, num_iterations):
        def body():
            features, labels = next(iterator)
            outfeed_queue.enqueue(step(model, optimizer, features, labels))

        poptorch.repeat(num_iterations, body)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iterator = iter(DataLoader(data, batch_size=4))
    training_loop(iterator, losses, model, optimizer, 6)
    training_loop(iterator, losses, model, optimizer, 6)
    reference = torch.optim.SGD(eager.parameters(), lr=0.1)
    expected = [step(eager, reference, *batch).detach() for batch in DataLoader(data, 4)]
    torch.testing.assert_close(losses.dequeue(), torch.stack(expected))
    torch.testing.assert_close(model.weight.detach(), eager.weight.detach())


def test_loops_and_functions_that_share_an_iterator_continue_each_other():
    iterator = iter(torch.arange(20.0))

    def add(total):
        return total + next(iterator)

    @poptorch.function
    def twice():
        return poptorch.repeat(2, add, 0.0), poptorch.repeat(1, add, 0.0)

    assert [one.item() for one in twice()] == [0 + 1, 2]
    for first in (3, 6):  # each time another function
        assert looped(add, 3, 0.0).item() == 3 * first + 3
    assert [one.item() for one in twice()] == [9 + 10, 11]


def test_an_iterator_that_a_queue_goes_through_is_taken_from_the_queue():
    iterator = iter(torch.arange(20.0))
    with poptorch.InfeedQueue(iterator) as queue:

        @poptorch.function
        def run():
            poptorch.repeat(2, lambda x, y: x + y, 0.0, queue)
            return poptorch.repeat(2, lambda x: x + next(iterator), 0.0)

        assert run().item() == 2 + 3


def test_an_attribute_and_an_iterator_that_the_body_makes():
    class Trainer:
        def __init__(self):
            self.batches = iter(torch.arange(20.0))
            self.layer = nn.Linear(1, 1)

        def body(self, total):
            assert next(self.layer.parameters()) is self.layer.weight
            return total + next(self.batches) * next(iter([2.0]))

        @poptorch.function
        def run(self):
            return poptorch.repeat(3, self.body, 0.0)

    trainer = Trainer()
    assert [trainer.run().item(), trainer.run().item()] == [2 * 3, 2 * 12]


def test_another_thread_goes_on_with_iterators_of_its_own():
    iterator = iter(torch.arange(20.0))

    def unaffected(x):
        # (what another thread does meanwhile)
        return x + next(iterator)

    assert looped(unaffected, 2, 0.0).item() == 1
    with pytest.raises(StopIteration):
        next(iter([]))
    assert next(iter([]), 5) == 5


@pytest.mark.parametrize(
    ("make", "body", "message"),
    [
        (generated, lambda it, x: x + next(it) + next(it), rf"{LINE}: an iteration takes one"),
        (generated, lambda it, x: x + next(it, 0), rf"{LINE}: in a loop it takes no default"),
        (generated, lambda it, x: x + sum(it), "takes elements of a generator other than by"),
        (
            SOURCES["loader"],
            lambda it, x: x + it.__next__(),
            rf"takes elements of a _SingleProcessDataLoaderIter {LINE} other than by next",
        ),
        (SOURCES["list"], lambda it, x: x + sum(it), "elements of a list_iterator other than"),
        (lambda: iter([]), lambda it, x: x + next(it), rf"{LINE}: InfeedQueue: .* has no element"),
        (
            lambda: DataLoader(torch.arange(4.0)),
            lambda loader, x: x + next(iter(loader)),
            rf"iterates over a DataLoader {LINE}.*iterator = iter\(loader\)",
        ),
        (
            generated,
            lambda it, x: poptorch.for_loop(2, lambda y: y + next(it), [x])[0],
            rf"{LINE}: an iteration of the device loop takes one element, before its inner",
        ),
    ],
)
def test_mistakes(make, body, message):
    iterator = make()
    with pytest.raises(Error, match=message):
        looped(lambda x: body(iterator, x), inputs=0.0)


def test_an_element_that_is_no_tensor():
    names = iter("abc")
    with pytest.raises(UsageTypeError, match=rf"{LINE}: InfeedQueue: the element is a str"):
        looped(lambda x: x + len(next(names)), inputs=0.0)


def test_an_iterator_that_the_function_makes():
    @poptorch.function
    def run():
        iterator = iter(torch.arange(4.0))
        return poptorch.repeat(2, lambda x: x + next(iterator), 0.0)

    with pytest.raises(Error, match=rf"{LINE}: this .*iterator was made in the function"):
        run()


def test_the_data_ends():
    iterator = iter(torch.arange(4.0))
    with pytest.raises(Error, match="the end of the dataset was reached"):
        looped(lambda x: x + next(iterator), 5, 0.0)


class Endless:
    def __init__(self):
        self.number = -1.0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return self.number


def endless():
    number = 0.0
    while True:
        yield number
        number += 1


@pytest.mark.parametrize(
    "make",
    [
        Endless,
        endless,
        itertools.count,
        lambda: enumerate(endless()),
        lambda: zip(range(9), itertools.count(), strict=False),
        lambda: map(float, range(9)),
        lambda: itertools.chain([1.0], [2.0]),
    ],
    ids=["class", "generator", "count", "enumerate", "zip", "map", "chain"],
)
def test_a_for_loop_over_any_iterator_is_refused(make):
    iterator = make()
    next(iterator)

    def body(x):
        for _ in iterator:
            return x + 1

    with pytest.raises(Error, match=r"takes elements of a \w+.* other than by next\(iterator\)"):
        looped(body, inputs=0.0)


class Holder:
    shared = None

    def __init__(self, held=None):
        self.held = held


def test_iterators_far_away():
    deep = Holder(Holder([{"train": Holder(Holder(iter(torch.arange(9.0))))}]))
    Holder.shared = iter(torch.arange(9.0))

    def body(x):
        return x + next(deep.held.held[0]["train"].held.held) + 10 * next(Holder.shared)

    try:
        assert looped(body, 3, 0.0).item() == 3 + 30
    finally:
        Holder.shared = None
