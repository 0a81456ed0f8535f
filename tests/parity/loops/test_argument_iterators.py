"""Iterators as arguments of a function: one recording serves all, and nothing of them stays."""

import gc
import itertools
import multiprocessing
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import popsim_torch as poptorch
from popsim_torch.errors import Error

pytestmark = pytest.mark.timeout(60, method="thread")


def summing(iterations):
    @poptorch.function
    def run(iterator):
        return poptorch.repeat(iterations, lambda total: total + next(iterator), 0.0)

    return run


def generated(first):
    for number in itertools.count(first):
        yield float(number)


def num_threads():
    return sum(one.name == "popsim_torch infeed" for one in threading.enumerate())


def test_epochs_with_workers_train_as_in_eager_pytorch_and_leave_nothing():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 2))
    model, eager = nn.Linear(4, 2), nn.Linear(4, 2)
    eager.load_state_dict(model.state_dict())

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    @poptorch.function
    def epoch(iterator, optimizer):
        poptorch.repeat(6, lambda: step(model, optimizer, next(iterator)))

    before = set(multiprocessing.active_children())  # those of other tests
    threads, optimizer = num_threads(), torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        iterator = iter(DataLoader(data, 4, num_workers=2))
        alive = weakref.ref(iterator)
        epoch(iterator, optimizer)
        del iterator
        gc.collect()
        assert alive() is None
        assert set(multiprocessing.active_children()) <= before
    assert len(epoch._recordings) == len(epoch.programs) == 1
    assert num_threads() <= threads  # those of other tests may end
    reference = torch.optim.SGD(eager.parameters(), 0.1)
    for batch in itertools.chain.from_iterable(DataLoader(data, 4) for _ in range(5)):
        step(eager, reference, batch)
    torch.testing.assert_close(dict(model.state_dict()), dict(eager.state_dict()))


@pytest.mark.parametrize(
    "make", [generated, itertools.count, lambda first: iter([first + i for i in range(9)])]
)
def test_iterators_that_take_turns_lose_no_element(make):
    run, one, other = summing(2), make(0), make(100)
    found = [run(it).item() for it in (one, other, one, one, other)]
    assert found == [1, 201, 5, 9, 205]
    assert next(one) == 6 and next(other) == 104
    assert len(run._recordings) == 1


def test_several_loops_and_iterators():
    @poptorch.function
    def run(one, other):
        total = poptorch.repeat(2, lambda t: t + next(one), 0.0)
        total = poptorch.repeat(3, lambda t: t + next(one) + next(other), total)
        return poptorch.repeat(1, lambda t: t + next(other), total)

    def expected(first, second):
        return sum(range(first, first + 5)) + sum(range(second, second + 4))

    one, other = generated(0), generated(50)
    assert run(one, other).item() == expected(0, 50)
    assert run(other, one).item() == expected(54, 5)
    assert run(generated(7), generated(9)).item() == expected(7, 9)
    assert len(run._recordings) == 1


def test_the_same_iterator_twice_is_another_kind_of_call():
    @poptorch.function
    def run(one, other):
        total = poptorch.repeat(1, lambda t: t + next(one), 0.0)
        return poptorch.repeat(1, lambda t: t + 10 * next(other), total)

    both = generated(1)
    assert [run(both, both).item(), run(both, generated(5)).item()] == [21, 53]
    assert run(both, both).item() == 4 + 50


def test_an_iterator_of_other_elements_is_refused_by_name():
    run = summing(2)
    run(iter(torch.ones(4)))
    with pytest.raises(
        Error, match=r"an iterator that is an argument: .*element 0 is \(float32\[3\]\), and"
    ):
        run(iter(torch.ones(4, 3)))
    assert run(iter(torch.ones(4))).item() == 2


def test_iterators_that_end_and_fail_do_not_harm_the_next():
    def failing():
        yield 1.0
        raise OSError("gone")

    run = summing(3)
    run(iter([2.0, 3.0, 4.0]))
    for iterator, message in (
        (iter([1.0]), "end of the dataset"),
        (iter([]), "no element"),
        (failing(), "gone"),
    ):
        with pytest.raises(Error, match=message):
            run(iterator)
    assert run(iter([1.0, 1.0, 1.0])).item() == 3
    assert len(run._recordings) == 1


def test_while_loops_go_on_in_an_iterator_and_let_go_when_another_comes():
    @poptorch.function
    def run(iterator):
        return poptorch.while_loop(
            lambda total: total < 10, lambda total: total + next(iterator), 0.0
        )

    threads, one = num_threads(), generated(1)
    assert [run(one).item(), run(one).item()] == [1 + 2 + 3 + 4, 5 + 6]
    alive = weakref.ref(one)
    del one
    assert run(generated(20)).item() == 20
    gc.collect()
    assert alive() is None
    assert num_threads() == threads + 1
    assert len(run._recordings) == 1


def test_what_the_host_takes_of_an_iterator_is_taken_in_each_call(caplog):
    @poptorch.function
    def run(iterator):
        first = next(iterator)
        return poptorch.repeat(2, lambda total: total + next(iterator), first)

    one = generated(0)
    assert [run(one).item(), run(one).item(), run(generated(5)).item()] == [3, 12, 18]
    assert run._recordings == []
    assert len([one for one in caplog.messages if "each call compiles again" in one]) == 1
