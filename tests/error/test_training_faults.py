"""Faults in loops that train: weights are as whole updates left them, as in eager PyTorch."""

import copy
import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.error.running_loops import (
    FOREVER,
    Follower,
    Gate,
    Job,
    no_thread_stays,  # noqa: F401
    until,
)
from tests.unit.runtime.test_stop import ctrl_c  # noqa: F401

pytestmark = [
    pytest.mark.timeout(60, method="thread"),
    pytest.mark.usefixtures("no_thread_stays"),
]


@pytest.fixture(autouse=True)
def one_thread():
    """Run the small eager steps on one thread: thread teams are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Words(nn.Module):
    """An embedding whose indices may be out of range, with running statistics after it."""

    def __init__(self, pipelined=False):
        super().__init__()
        torch.manual_seed(3)
        self.table, self.norm, self.fc = nn.Embedding(10, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.pipelined = pipelined

    def forward(self, words):
        if self.pipelined:
            poptorch.Block.start(ipu_id=0)
        x = self.norm(self.table(words))
        if self.pipelined:
            poptorch.Block.start(ipu_id=1)
        return (self.fc(torch.tanh(x)) ** 2).mean()


def words(count, wrong=None):
    generator = torch.Generator().manual_seed(5)
    data = [torch.randint(10, (6,), generator=generator) for _ in range(count)]
    if wrong is not None:
        data[wrong] = data[wrong] + 10
    return data


class Training:
    """A function that trains, and the same in eager PyTorch."""

    def __init__(self, data, iterations, accumulation=1, pipelined=False, combined=False):
        self.model = Words(pipelined)
        self.eager = Words()
        self.infeed, self.outfeed = poptorch.InfeedQueue(data), poptorch.OutfeedQueue()
        if combined:
            optimizer = poptorch.optim.SGD(
                self.model.parameters(), lr=0.1, momentum=0.9, use_combined_accum=True
            )
        else:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self._eager_optimizer = torch.optim.SGD(self.eager.parameters(), lr=0.1, momentum=0.9)
        self._accumulation = accumulation

        def step(x):
            loss = self.model(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.outfeed.enqueue(loss)

        @poptorch.function
        def run():
            poptorch.repeat(
                iterations, step, infeed=self.infeed, gradient_accumulation=accumulation
            )

        self.run = run

    def train_eager(self, data):
        """Train the other model with the same number of updates; return the losses."""
        losses = []
        for first in range(0, len(data), self._accumulation):
            self._eager_optimizer.zero_grad()
            for x in data[first : first + self._accumulation]:
                loss = self.eager(x) / self._accumulation
                loss.backward()
                losses.append(loss.item() * self._accumulation)
            self._eager_optimizer.step()
        return losses

    def check(self):
        """Compare everything that training changes."""
        check_weights(self.model, self.eager)


def check_weights(model, eager):
    """Compare the weights and the running statistics of two models."""
    theirs = eager.state_dict()
    for name, value in model.state_dict().items():
        if value.is_floating_point():  # (programs store counters as constants)
            torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)


def close(seen, expected):
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_an_index_out_of_range_in_iteration_500():
    good, bad = words(520), words(520, wrong=500)
    data = list(good)
    training = Training(data, 520)
    training.run()
    losses = training.train_eager(good)
    close(training.outfeed.dequeue().tolist(), losses)
    data[:] = bad
    training.infeed.reset()
    follower = Follower(training.outfeed)
    with pytest.raises(poptorch.Error, match=r"the table has 10 rows.*iteration 500 of") as caught:
        training.run()
    assert "test_training_faults.py" in str(caught.value)
    assert follower.wait() is caught.value
    close(follower.elements, training.train_eager(good[:500]))
    # Only forward of the iteration that failed has used the table.
    training.check()
    data[:] = good
    training.infeed.reset()
    training.run()
    close(training.outfeed.dequeue().tolist(), training.train_eager(good))
    training.check()
    training.infeed.close()


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("fault", ["end", "index"])
def test_a_fault_in_the_middle_of_an_update(fault, pipelined, combined):
    """A fault in the call that records the function, and in a call that runs the recording."""
    good = words(16)
    data = []
    training = Training(data, 16, 4, pipelined, combined)
    text = {
        "end": r"element 10 .*\(iteration 10 of the loop, counted from 0, did not begin",
        "index": r"the table has 10 rows.*\(in iteration 10 of the loop",
    }
    for _ in range(2):
        data[:] = good[:10] if fault == "end" else words(16, wrong=10)
        training.infeed.reset()
        follower = Follower(training.outfeed)
        with pytest.raises(poptorch.Error, match=text[fault]) as caught:
            training.run()
        assert follower.wait() is caught.value
        close(follower.elements[:8], training.train_eager(good[:8]))
        # The iterations of the discarded update have enqueued their elements before.
        assert len(follower.elements) in ((9, 10) if pipelined else (10,))
        training.check()
        data[:] = good
        training.infeed.reset()
        training.run()
        close(training.outfeed.dequeue().tolist(), training.train_eager(good))
        training.check()
    training.infeed.close()


def test_a_while_loop_whose_data_ends():
    data = words(7)
    model = Words()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    infeed, outfeed = poptorch.InfeedQueue(data), poptorch.OutfeedQueue()

    @poptorch.function
    def run():
        def step(count, x):
            loss = model(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            outfeed.enqueue((count, loss))
            return count + 1

        return poptorch.while_loop(lambda count: count < 20, step, 0, infeed=infeed)

    def train_eager(data):
        reference = torch.optim.SGD(eager.parameters(), lr=0.1)
        for x in data:
            reference.zero_grad()
            eager(x).backward()
            reference.step()

    for _ in range(2):
        with pytest.raises(poptorch.Error, match=r"element 7.*\(iteration 7 of.*not begin"):
            run()
        assert outfeed.dequeue()[0].tolist() == list(range(7))
        train_eager(data)
        check_weights(model, eager)
        infeed.reset()
    data += words(13)
    infeed.reset()
    assert run() == 20
    infeed.close()


def pipelined_inference(infeed, outfeed, iterations):
    """Return a function that runs four stages, and the results that are expected."""
    layers = [nn.Linear(3, 3) for _ in range(4)]

    @poptorch.function
    def run():
        def body(x):
            x = x * torch.ones(3)
            for number, layer in enumerate(layers):
                poptorch.Block.start(ipu_id=number)
                x = torch.tanh(layer(x))
            outfeed.enqueue(x)

        poptorch.repeat(iterations, body, infeed=infeed)

    def eager(x):
        for layer in layers:
            x = torch.tanh(layer(x * torch.ones(3)))
        return x.detach()

    return run, eager


def test_a_pipeline_whose_data_ends_delivers_what_is_in_flight():
    data = torch.arange(7.0)
    infeed, outfeed = poptorch.InfeedQueue(data), poptorch.OutfeedQueue()
    run, eager = pipelined_inference(infeed, outfeed, 20)
    for _ in range(2):
        with pytest.raises(poptorch.Error, match=r"element 7.*\(iteration 7 of.*not begin"):
            run()
        expected = torch.stack([eager(x) for x in data])
        torch.testing.assert_close(outfeed.dequeue(), expected, rtol=1e-5, atol=1e-6)
        infeed.reset()
    infeed.close()


def test_a_pipeline_that_is_stopped_delivers_what_is_in_flight():
    gate = Gate()
    infeed, outfeed = poptorch.InfeedQueue(gate), poptorch.OutfeedQueue()
    run, eager = pipelined_inference(infeed, outfeed, 20)
    gate.let(4)  # after the first one, which every gate lets through
    job = Job(run)
    for count in (5, 10):
        until(lambda count=count: infeed.statistics()["taken"] == count)
        assert run.stop()
        assert "run: stopped" in str(job.wait())
        expected = torch.stack([eager(torch.tensor(float(i))) for i in range(count - 5, count)])
        torch.testing.assert_close(outfeed.dequeue(), expected, rtol=1e-5, atol=1e-6)
        gate.let(5)
        job = Job(run)
    until(lambda: infeed.statistics()["taken"] == 15)
    infeed.close()
    assert "the infeed queue is closed" in str(job.wait())
    gate.end()


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("where", ["computing", "data", "full"])
@pytest.mark.parametrize("pipelined", [False, True])
def test_ctrl_c(where, pipelined):
    """Ctrl-C quickly ends a training loop, wherever it is, and its follower without an error."""
    data = words(40)
    stalls = Stalling(data, at=9 if where == "data" else None)
    training = Training(stalls, FOREVER // 4 * 4, 4, pipelined)
    outfeed = training.outfeed = poptorch.OutfeedQueue(max_bytes=36 if where == "full" else None)
    follower = None if where == "full" else Follower(outfeed)
    pressed = []

    def press():
        until(lambda: outfeed.statistics()["enqueued"] >= (8 if pipelined else 9))
        time.sleep(0.15)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    job = Job(press)
    with pytest.raises(KeyboardInterrupt):
        training.run()
    ended = time.monotonic()
    job.value()
    assert ended - pressed[0] < 5
    stalls.at = None
    stalls.go_on.set()
    if follower is not None:
        assert follower.wait() is None
    seen = outfeed.dequeue().tolist() if follower is None else follower.elements
    if where != "computing":
        losses = training.train_eager(data[:8])
        close(seen[:8], losses)
        training.check()
    training.infeed.close()
    # The data continues where the program was, with the same weights.
    again = Training(data, 8, 4, pipelined)
    again.run()
    close(again.outfeed.dequeue().tolist(), again.train_eager(data[:8]))
    again.check()
    again.infeed.close()


class Stalling:
    """A dataset that repeats its elements forever, and stalls before one of them."""

    def __init__(self, data, at):
        self.data, self.at, self.go_on = data, at, threading.Event()

    def __call__(self):
        for number in range(FOREVER):
            if number == self.at:
                self.go_on.wait()
            yield self.data[number % len(self.data)]


def test_followers_of_a_training_model():
    data = words(6, wrong=4)
    model = Words()
    outfeed = poptorch.OutfeedQueue()

    class Told(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            loss = self.inner(x.reshape(-1))
            outfeed.enqueue(loss)
            return poptorch.identity_loss(loss, "none")

    options = poptorch.Options().deviceIterations(6)
    options.showCompilationProgressBar(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = poptorch.trainingModel(Told(), options, optimizer)
    eager = copy.deepcopy(model)
    for batch, count in ((data, 4), (words(6), 6)):
        follower = Follower(outfeed)
        try:
            trainer(torch.stack(batch))
            error = None
        except poptorch.Error as raised:
            error = raised
        assert (error is None) == (count == 6)
        assert follower.wait() is error
        reference = torch.optim.SGD(eager.parameters(), lr=0.1)
        losses = []
        for x in batch[:count]:
            reference.zero_grad()
            loss = eager(x)
            loss.backward()
            reference.step()
            losses.append(loss.item())
        close(follower.elements, losses)
    trainer.destroy()
