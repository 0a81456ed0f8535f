"""``OutfeedQueue``: the elements that a program enqueues come back unchanged."""

import copy
import pickle
import threading
from collections import namedtuple

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import Error
from popsim_torch.feeds.structure import Structure, flatten
from popsim_torch.loops import function, repeat, while_loop
from tests.unit.feeds.small_programs import SECONDS, Reader, counting, passing

pytestmark = pytest.mark.timeout(60)

Pair = namedtuple("Pair", "left right")


def test_all_elements_in_order():
    queue = poptorch.OutfeedQueue()
    assert counting(queue, 20, lambda count: torch.ones(4, 4) * count)() == 20
    found = queue.dequeue()
    assert found.shape == (20, 4, 4) and found[:, 1, 2].tolist() == list(range(20))
    assert queue.dequeue().shape == (0, 4, 4)


def test_the_newest_element():
    queue = poptorch.OutfeedQueue(poptorch.OutfeedMode.LAST)
    counting(queue, 20, lambda count: (torch.ones(4, 4) * count, count.reshape(1)))()
    for _ in range(2):
        first, second = queue.dequeue()
        assert first.shape == (4, 4) and first[0, 0] == 19 and second.tolist() == [19]
    assert queue.poll()[1].tolist() == queue.get(0)[1].tolist() == [19]
    assert queue.drain()[1].tolist() == [19]
    assert queue.mode == poptorch.OutfeedMode.LAST


def test_the_newest_element_is_the_readers_own():
    queue = poptorch.OutfeedQueue(poptorch.OutfeedMode.LAST)
    program = counting(queue, 3)
    program()
    before = queue.dequeue()
    program()
    before += 40
    assert queue.dequeue() == 2 and before == 42


def test_what_is_read_is_the_readers_own():
    queue = poptorch.OutfeedQueue()
    # Large enough to be returned without a copy.
    program = counting(queue, 8, lambda count: count.expand(1 << 17).clone())
    program()
    first = queue.dequeue()
    program()
    first += 100
    second = queue.dequeue()
    assert first[:, -1].tolist() == list(range(100, 108))
    assert second[:, 0].tolist() == list(range(8))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: (x,),
        lambda x: [x, x + 1],
        lambda x: {"b": x, "a": (x, {"c": [x * 2]})},
        lambda x: Pair(x, (x,)),
    ],
)
def test_structures(make):
    queue = poptorch.OutfeedQueue()
    counting(queue, 3, make)()
    found = queue.dequeue()
    expected = make(torch.arange(3))
    structure, leaves = flatten(expected, "it")
    assert flatten(found, "it")[0] == structure
    for one, other in zip(flatten(found, "it")[1], leaves, strict=True):
        assert torch.equal(one, other.int())
    counting(queue, 1, make)()
    element = queue.get(0)
    assert flatten(element, "it")[0] == structure and flatten(element, "it")[1][0].shape == ()


def test_numbers_and_tensors_of_the_host():
    queue = poptorch.OutfeedQueue()
    fixed = torch.arange(3.0)
    counting(queue, 2, lambda count: {"n": 3, "x": 0.5, "t": True, "fixed": fixed})()
    found = queue.dequeue()
    assert found["n"].tolist() == [3, 3] and found["x"].tolist() == [0.5, 0.5]
    assert found["t"].tolist() == [True, True]
    assert torch.equal(found["fixed"], torch.stack([fixed, fixed]))


@pytest.mark.parametrize(
    ("dtype", "returned"),
    [
        (torch.float16, torch.float16),
        (torch.int64, torch.int32),
        (torch.float32, torch.float32),
        (torch.bool, torch.bool),
        (torch.uint8, torch.uint8),
    ],
    ids=str,
)
def test_element_types(dtype, returned):
    queue = poptorch.OutfeedQueue()
    counting(queue, 2, lambda count: count.to(dtype))()
    found = queue.dequeue()
    assert found.dtype == returned and found.tolist() == [0, 1]


def test_scalars_empty_tensors_and_views():
    queue = poptorch.OutfeedQueue()
    base = torch.arange(6.0).reshape(2, 3)
    counting(queue, 2, lambda c: (c, torch.zeros(0, 3), (base + c).t(), base[:, 1:]))()
    scalar, empty, transposed, part = queue.dequeue()
    assert scalar.tolist() == [0, 1] and empty.shape == (2, 0, 3)
    assert torch.equal(transposed, torch.stack([base.t(), base.t() + 1]))
    assert torch.equal(part, torch.stack([base[:, 1:]] * 2))


def test_the_value_at_the_place_of_the_call():
    queue = poptorch.OutfeedQueue()

    @function
    def program():
        def body(x):
            x = x + 1
            queue.enqueue(x)
            x.mul_(10)
            return x

        return repeat(2, body, inputs=torch.zeros(2))

    assert program().tolist() == [110, 110]
    assert queue.dequeue().tolist() == [[1, 1], [11, 11]]


def test_a_training_loop():
    def train(enqueue):
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            enqueue({"loss": loss})

        return step

    x, y = torch.randn(5, 4, 3), torch.randn(5, 4, 1)
    losses = []
    eager = train(lambda element: losses.append(element["loss"].item()))
    for pair in zip(x, y, strict=True):
        eager(*pair)
    infeed, queue = poptorch.InfeedQueue(list(zip(x, y, strict=True))), poptorch.OutfeedQueue()
    step = train(queue.enqueue)

    @function
    def program():
        repeat(5, step, infeed=infeed)

    program()
    torch.testing.assert_close(queue.dequeue()["loss"], torch.tensor(losses))


class Telling(nn.Module):
    def __init__(self, queue):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.queue = queue

    def forward(self, x):
        y = self.linear(x)
        self.queue.enqueue(y)
        return y.relu()


@pytest.mark.parametrize("iterations", [1, 3])
def test_inference(iterations):
    queue = poptorch.OutfeedQueue()
    net = Telling(queue)
    options = poptorch.Options().deviceIterations(iterations)
    model = poptorch.inferenceModel(net, options)
    x = torch.randn(2 * iterations, 3)
    result = model(x)
    found = queue.dequeue()
    assert found.shape == (iterations, 2, 2)
    torch.testing.assert_close(found.flatten(0, 1), net.linear(x).detach())
    torch.testing.assert_close(found.flatten(0, 1).relu(), result)
    model(x)
    assert len(list(queue)) == iterations
    # A copy of the model uses the same queue.
    other = poptorch.inferenceModel(copy.deepcopy(net), options)
    other(x)
    assert len(list(queue)) == iterations


def test_several_queues():
    every, newest = poptorch.OutfeedQueue(), poptorch.OutfeedQueue(poptorch.OutfeedMode.LAST)

    @function
    def program():
        def body(count):
            every.enqueue(count)
            newest.enqueue({"twice": 2 * count})
            return count + 1

        repeat(4, body, inputs=0)
        while_loop(lambda count: count < 3, body, inputs=0)

    program()
    assert every.dequeue().tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert newest.dequeue()["twice"] == 4


def test_a_queue_serves_several_programs():
    queue = poptorch.OutfeedQueue()
    counting(queue, 2)()
    counting(queue, 3, lambda count: count * 10)()
    assert queue.dequeue().tolist() == [0, 1, 0, 10, 20]


def test_before_anything_is_enqueued():
    queue = poptorch.OutfeedQueue()
    assert not queue.enqueued and queue.poll() is None and queue.drain() == []
    for read in (queue.dequeue, lambda: list(queue)):
        with pytest.raises(Error, match="nothing has been enqueued yet"):
            read()
        assert Reader(read).value() == []
    program = counting(queue, 1)
    assert not queue.enqueued
    program()
    assert queue.enqueued and Reader(lambda: queue.enqueued).value()


def test_nothing_of_the_newest_yet():
    queue = poptorch.OutfeedQueue(poptorch.OutfeedMode.LAST)
    queue._attach(Structure(), [(torch.float32, (2,))], "here")
    with pytest.raises(Error, match="nothing has been enqueued yet"):
        queue.dequeue()
    assert Reader(queue.dequeue).value() == [] and queue.poll() is None and queue.drain() == []


def test_iteration_takes_one_at_a_time():
    queue = poptorch.OutfeedQueue()
    counting(queue, 5)()
    elements = iter(queue)
    assert [next(elements).item() for _ in range(2)] == [0, 1]
    assert queue.dequeue().tolist() == [2, 3, 4]
    assert list(elements) == []


def test_iteration_pulls_again():
    queue = poptorch.OutfeedQueue()
    program = counting(queue, 2)
    program()
    elements = iter(queue)
    assert [next(elements).item(), next(elements).item()] == [0, 1]
    program()
    assert [element.item() for element in elements] == [0, 1]


def test_statistics():
    queue = poptorch.OutfeedQueue(buffer_depth=2)
    assert set(queue.statistics().values()) == {0}
    program = counting(queue, 5, lambda count: count.reshape(1).expand(10).float())
    program()
    queue.get(0)
    found = queue.statistics()
    expected = {"enqueued": 5, "dequeued": 1, "bytes": 160, "peak_bytes": 200}
    assert expected.items() <= found.items()
    assert found["waits"] == found["seconds_waited"] == 0
    assert repr(queue) == "OutfeedQueue(ALL, 5 enqueued, 1 dequeued, 160 bytes held, at most 200)"


@pytest.mark.parametrize("depth", [1, 2, 1000])
def test_the_depth_changes_no_element(depth):
    queue = poptorch.OutfeedQueue(buffer_depth=depth)
    counting(queue, 100)()
    assert queue.dequeue().tolist() == list(range(100))


@pytest.mark.parametrize("every", [1, 3, 4, 50])
def test_one_of_several_elements(every):
    queue = poptorch.OutfeedQueue(every=every, max_bytes=200, when_full="raise")
    last = poptorch.OutfeedQueue(poptorch.OutfeedMode.LAST, every=every)
    for _ in range(2):  # the count continues from run to run
        counting(queue, 10)()
        counting(last, 10)()
    expected = [number % 10 for number in range(20)][every - 1 :: every]
    assert [element.item() for element in queue] == expected
    if expected:
        assert last.dequeue() == expected[-1]
    assert queue.statistics()["enqueued"] == len(expected)
    assert pickle.loads(pickle.dumps(queue))._every == every


def test_elements_that_are_left_out_do_not_wait():
    queue = poptorch.OutfeedQueue(every=5, max_bytes=4)
    program = counting(queue, 9)
    program()
    assert queue.statistics()["waits"] == 0 and queue.dequeue().tolist() == [4]


def test_a_full_queue_ends_the_program():
    queue = poptorch.OutfeedQueue(max_bytes=12, when_full="raise")
    program = counting(queue, 4)
    with pytest.raises(Error, match=r"outfeed queue is full: it holds 3 elements.*max_bytes is 12"):
        program()
    assert queue.dequeue().tolist() == [0, 1, 2]
    with pytest.raises(Error, match="is full"):
        program()
    assert queue.dequeue().tolist() == [0, 1, 2]


def test_a_program_waits_for_a_reader():
    queue = poptorch.OutfeedQueue(max_bytes=0)
    reader = Reader(lambda: [element.item() for element in queue.follow(SECONDS)])
    counting(queue, 200)()
    assert reader.value() == list(range(200))
    found = queue.statistics()
    assert found["peak_bytes"] == 4 and found["enqueued"] == found["dequeued"] == 200


def test_a_program_that_waits_says_so():
    queue = poptorch.OutfeedQueue(max_bytes=4)
    program = counting(queue, 2)
    running = Reader(program)
    while queue.statistics()["waits"] == 0:
        assert running.is_alive()
    assert queue.get(SECONDS) == 0
    running.value()
    assert queue.statistics()["seconds_waited"] > 0 and "programs waited" in repr(queue)


def test_stopping_a_program_that_waits_for_a_reader():
    queue = poptorch.OutfeedQueue(max_bytes=0)
    program = counting(queue, 10**6)
    running = Reader(program)
    while queue.statistics()["waits"] == 0:
        assert running.is_alive()
    assert program.stop()
    with pytest.raises(Error, match="stopped"):
        running.value()
    # Readers do not treat this as a failure.
    assert [element.item() for element in queue.follow(SECONDS)][:1] == [0]


def test_closing():
    queue = poptorch.OutfeedQueue()
    program = counting(queue, 3)
    program()
    with queue:
        pass
    assert queue.deleter() is None
    assert [element.item() for element in queue.follow(0, until="close")] == [0, 1, 2]
    for attempt in (program, counting(queue, 1)):
        with pytest.raises(Error, match="closed"):
            attempt()
    with pytest.raises(Error, match="closed"):
        next(queue.follow(0))
    assert queue.dequeue().tolist() == [] and "closed" in repr(queue)


def test_synthetic_data():
    queue = poptorch.OutfeedQueue()
    queue._attach(Structure(), [(torch.float16, (2, 3))], "here", synthetic=True)
    found = queue.dequeue()
    assert found.shape == (0, 2, 3) and found.dtype == torch.float16
    assert queue.poll() is None and list(queue) == []
    with pytest.raises(Error, match="no element will come"):
        queue.get()
    last = poptorch.OutfeedQueue(poptorch.OutfeedMode.LAST)
    last._attach(Structure(), [(torch.float16, (2, 3))], "here", synthetic=True)
    with pytest.raises(Error, match="no last element, as the program runs with synthetic data"):
        last.dequeue()


def test_copies_share_the_queue_and_other_processes_get_an_empty_one():
    queue = poptorch.OutfeedQueue(poptorch.OutfeedMode.LAST, 5, 100, "raise")
    counting(queue, 1)()
    assert copy.deepcopy({"queue": queue})["queue"] is queue
    other = pickle.loads(pickle.dumps(queue))
    assert other.mode == queue.mode and not other.enqueued
    assert other._max_bytes == 100 and other._when_full == "raise" and other._buffer_depth == 5


def test_inside_of_a_function_with_an_infeed():
    infeed, queue = poptorch.InfeedQueue(torch.arange(3)), poptorch.OutfeedQueue()
    passing(infeed, queue, 3)()
    assert queue.dequeue().tolist() == [0, 1, 2]
    assert threading.current_thread() is threading.main_thread()
