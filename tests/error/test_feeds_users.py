"""Faults in user code that uses queues and loops: several at a time, and untraceable code."""

import gc
import weakref

import pytest
import torch

import popsim_torch as poptorch
from tests.error.running_loops import (
    Follower,
    Gate,
    Job,
    counting,
    no_thread_stays,  # noqa: F401
    numbers,
    passing,
    until,
)

pytestmark = [
    pytest.mark.timeout(60, method="thread"),
    pytest.mark.usefixtures("no_thread_stays"),
]


def test_two_programs_on_one_full_outfeed():
    outfeed = poptorch.OutfeedQueue(max_bytes=64)
    programs = [
        counting(outfeed, 300, lambda count, own=own: torch.stack([count, count * 0 + own]))
        for own in range(3)
    ]
    with pytest.raises(poptorch.Error, match="nothing has been enqueued"):
        outfeed.dequeue()
    follower, runs = Follower(outfeed, until="close"), [Job(program) for program in programs]
    for run in runs:
        run.value()
    outfeed.close()
    assert follower.wait() is None
    for own in range(3):
        assert [count for count, whose in follower.elements if whose == own] == list(range(300))
    assert outfeed.statistics()["peak_bytes"] <= 64


def test_two_programs_on_one_infeed():
    gate = Gate()
    infeed = poptorch.InfeedQueue(gate)
    outfeeds = [poptorch.OutfeedQueue(), poptorch.OutfeedQueue()]
    programs = [passing(infeed, outfeed, 4) for outfeed in outfeeds]
    run = Job(programs[0])
    until(lambda: infeed.dequeued)
    follower = Follower(outfeeds[1])
    with pytest.raises(poptorch.Error, match=r"another program is taking elements.*for each") as e:
        programs[1]()
    assert follower.wait() is e.value
    gate.let(7)
    run.value()
    programs[1]()
    assert outfeeds[0].dequeue().tolist() == numbers(4)
    assert outfeeds[1].dequeue().tolist() == [4.0, 5.0, 6.0, 7.0]
    infeed.close()
    gate.end()


def test_two_threads_in_one_program():
    outfeed = poptorch.OutfeedQueue(max_bytes=40)
    program = counting(outfeed, 100)
    run = Job(program)
    until(lambda: outfeed.statistics()["enqueued"] == 10)
    with pytest.raises(poptorch.Error, match=r"is running in another thread. A program runs once"):
        program()
    with pytest.raises(poptorch.Error, match=r"destroy: the function is running.*call stop"):
        program.destroy()
    follower = Follower(outfeed)
    assert run.value() == 100
    assert follower.wait() is None and follower.elements == list(range(100))
    program.destroy()
    assert counting(outfeed, 5)() == 5


def test_a_model_that_another_thread_runs():
    outfeed = poptorch.OutfeedQueue(max_bytes=40)
    model = poptorch.inferenceModel(Tap(outfeed), poptorch.Options().deviceIterations(100))
    data = torch.arange(100.0)
    run = Job(lambda: model(data))
    until(lambda: outfeed.statistics()["enqueued"] == 10)
    with pytest.raises(poptorch.Error, match="is already running; call it from one thread"):
        model(data)
    model.destroy()
    follower = Follower(outfeed)
    # The current run is not affected by either.
    assert torch.equal(run.value(), data)
    assert follower.wait() is None and follower.elements == data.reshape(100, 1).tolist()
    follower = Follower(outfeed)
    assert torch.equal(model(data), data)
    assert follower.wait() is None and len(follower.elements) == 100
    model.destroy()


def test_a_function_that_nobody_destroys():
    outfeed = poptorch.OutfeedQueue()
    weight = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.5)
    infeed = poptorch.InfeedQueue([torch.ones(2)] * 50)

    def make():
        @poptorch.function
        def train():
            def body(x):
                loss = weight(x).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                outfeed.enqueue(loss)

            poptorch.repeat(3, body, infeed=infeed)

        return train

    before = weight.weight.detach().clone()
    for iteration in range(4):
        program = make()
        program()
        gone = weakref.ref(program.programs[0].compiled.executable)
        del program
        gc.collect()
        assert gone() is None
        torch.testing.assert_close(weight.weight.detach(), before - 0.5 * 3 * (iteration + 1))
    assert len(outfeed.dequeue()) == 12
    infeed.close()


# The user's Python code


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_traced_code_raises(when):
    outfeed, mistake = poptorch.OutfeedQueue(), {"on": True}

    @poptorch.function
    def program():
        def body(x):
            if mistake["on"] and when == "before":
                raise ValueError("in the body")
            outfeed.enqueue(x)
            if mistake["on"]:
                raise ValueError("in the body")
            return x + 1

        return poptorch.repeat(3, body, inputs=0)

    follower = Follower(outfeed)
    with pytest.raises(ValueError, match="in the body") as caught:
        program()
    assert follower.wait() is caught.value and not follower.elements
    mistake["on"] = False
    assert program() == 3
    assert list(map(int, outfeed.follow())) == [0, 1, 2]


class Deep(torch.nn.Module):
    """A model with a queue in an inner layer, and a forward that may fail."""

    def __init__(self, outfeed):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.mistake = {"on": True}
        self.tap = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Sequential(Tap(outfeed))))

    def forward(self, x):
        y = self.layer(x)
        if self.mistake["on"]:
            return torch.linalg.eig(y)
        return self.tap(y), poptorch.identity_loss(y.sum(), "none")


class Tap(torch.nn.Module):
    """A layer that enqueues its input."""

    def __init__(self, outfeed):
        super().__init__()
        self.outfeed = outfeed

    def forward(self, x):
        self.outfeed.enqueue(x)
        return x


def test_a_model_that_cannot_be_compiled():
    outfeed = poptorch.OutfeedQueue()
    model = Deep(outfeed)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    options = poptorch.Options().deviceIterations(3)
    trainer = poptorch.trainingModel(model, options, optimizer)
    follower = Follower(outfeed)
    with pytest.raises(poptorch.Error) as caught:
        trainer(torch.ones(3, 2))
    assert follower.wait() is caught.value
    model.mistake["on"] = False
    follower = Follower(outfeed)
    trainer(torch.ones(3, 2))
    assert follower.wait() is None and len(follower.elements) == 3
    trainer.destroy()
