"""``InfeedQueue``: elements come into a program, one per iteration."""

import gc
import os
import threading
import time
import weakref
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import popsim_torch as poptorch
from popsim_torch.errors import Error
from popsim_torch.feeds.producer import _stop_all
from popsim_torch.loops import function, repeat
from tests.unit.feeds.small_programs import SECONDS, Gate, Reader, passing, queues

pytestmark = pytest.mark.timeout(60)

Pair = namedtuple("Pair", "left right")


def wait_until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_tensor_is_one_argument():
    infeed, outfeed = queues(torch.arange(12.0).reshape(4, 3))
    passing(infeed, outfeed, 4)()
    assert torch.equal(outfeed.dequeue(), torch.arange(12.0).reshape(4, 3))
    assert infeed.number_of_tuple_elements == 1


def test_a_tuple_is_positional_arguments_behind_the_carried_ones():
    infeed = poptorch.InfeedQueue([(torch.tensor(float(k)), 2 * k) for k in range(3)])

    @function
    def program():
        return repeat(3, lambda total, x, y: total + 10 * x + y, inputs=0.5, infeed=infeed)

    assert program().item() == 0.5 + 12 * (0 + 1 + 2)
    assert infeed.number_of_tuple_elements == 2


def test_a_dictionary_is_keyword_arguments():
    elements = [{"b": np.full(2, k, np.float32), "a": k} for k in range(3)]
    infeed, outfeed = queues(elements)
    passing(infeed, outfeed, 3)()
    found = outfeed.dequeue()
    assert list(found) == ["b", "a"]
    assert found["a"].tolist() == [0, 1, 2] and found["b"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert infeed.number_of_tuple_elements == 2


def test_nests():
    infeed = poptorch.InfeedQueue([(Pair(1.0, [2.0]), {"x": (3.0,)})])

    @function
    def program():
        def body(pair, more):
            assert isinstance(pair, Pair)
            return None if pair.right[0] is None else outfeed.enqueue((pair, more["x"][0]))

        repeat(1, body, infeed=infeed)

    outfeed = poptorch.OutfeedQueue()
    program()
    pair, three = outfeed.dequeue()
    assert (pair, three) == (Pair(torch.tensor([1.0]), [torch.tensor([2.0])]), torch.tensor([3.0]))


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.int64, torch.int32),
        (torch.int32, torch.int32),
        (torch.int16, torch.int16),
        (torch.int8, torch.int8),
        (torch.uint8, torch.uint8),
        (torch.bool, torch.bool),
    ],
    ids=str,
)
def test_element_types(given, returned):
    elements = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(given)
    infeed, outfeed = queues(elements)
    passing(infeed, outfeed, 2)()
    found = outfeed.dequeue()
    assert found.dtype == returned and torch.equal(found, elements.to(returned))


def test_tensors_that_are_not_contiguous_or_need_gradients():
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    infeed, outfeed = queues([weight.t(), weight.t() * 2])
    passing(infeed, outfeed, 2)()
    assert torch.equal(outfeed.dequeue(), torch.stack([weight.t(), weight.t() * 2]).detach())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader(num_workers):
    dataset = TensorDataset(torch.arange(8.0), torch.arange(8))
    infeed, outfeed = queues(DataLoader(dataset, batch_size=2, num_workers=num_workers))
    passing(infeed, outfeed, 4)()
    x, y = outfeed.dequeue()
    assert x.flatten().tolist() == y.flatten().tolist() == list(range(8))


def test_a_run_goes_on_where_the_one_before_stopped():
    infeed, outfeed = queues(torch.arange(5), repeat=True)
    program = passing(infeed, outfeed, 3)
    program()
    program()
    program()
    assert outfeed.dequeue().tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]


def test_two_programs_share_a_queue():
    infeed, outfeed = queues(range(10))
    passing(infeed, outfeed, 2)()
    passing(infeed, outfeed, 3)()
    assert outfeed.dequeue().tolist() == [0, 1, 2, 3, 4]


def test_the_end_of_the_data():
    infeed, outfeed = queues(range(4))
    program = passing(infeed, outfeed, 3)
    program()
    for _ in range(2):
        with pytest.raises(
            Error, match=r"end of the dataset was reached.*element 4 .*has 4.*reset"
        ):
            program()
    assert outfeed.dequeue().tolist() == [0, 1, 2, 3]
    infeed.reset()
    program()
    assert outfeed.dequeue().tolist() == [0, 1, 2]


def test_a_generator_that_ends():
    infeed, outfeed = queues(iter([1.0, 2.0]))
    with pytest.raises(Error, match=r"end of the dataset .* has 2\. Give the queue more data"):
        passing(infeed, outfeed, 3)()
    with pytest.raises(Error, match="only once"):
        infeed.reset()


def test_reset_drops_what_was_made_ahead():
    infeed, outfeed = queues(range(100), prefetch_depth=7)
    program = passing(infeed, outfeed, 2)
    program()
    infeed.reset()
    infeed.reset()
    program()
    assert outfeed.dequeue().tolist() == [0, 1, 0, 1]
    assert infeed.statistics()["taken"] == 4


def test_reset_before_use_and_during_a_run():
    gate = Gate()
    infeed, outfeed = queues(gate)
    infeed.reset()
    reader = Reader(passing(infeed, outfeed, 2))
    assert outfeed.get(SECONDS) == 0
    with pytest.raises(Error, match="reset: a program is running"):
        infeed.reset()
    gate.put(1.0)
    reader.value()


@pytest.mark.parametrize("depth", [1, 2, 255])
def test_elements_are_made_ahead(depth):
    made = []

    def elements():
        for number in range(1000):
            made.append(number)
            yield number

    infeed = poptorch.InfeedQueue(elements, prefetch_depth=depth)
    assert not made and infeed._producer is None
    infeed.initializer  # noqa: B018
    # One more element waits for a slot.
    wait_until(lambda: len(made) == depth + 1)
    time.sleep(0.02)
    assert len(made) == depth + 1 and infeed.prefetch_depth == depth
    assert not infeed.dequeued
    infeed.initializer()
    infeed.close()


def test_dequeued():
    infeed, outfeed = queues(range(2))
    assert not infeed.dequeued
    assert infeed.number_of_tuple_elements == 1 and not infeed.dequeued
    passing(infeed, outfeed, 1)()
    assert infeed.dequeued


def test_elements_are_made_on_one_thread():
    numbers = []

    def elements():
        while True:
            numbers.append(torch.get_num_threads())
            yield torch.ones(1)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with poptorch.InfeedQueue(elements()) as infeed:
            infeed.initializer()
            wait_until(lambda: len(numbers) > 2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert numbers[:3] == [3, 1, 1]  # the first one is made in this thread


def test_an_error_of_the_dataset_is_the_cause():
    def elements():
        yield 1.0
        yield 2.0
        raise ValueError("no more of that")

    infeed, outfeed = queues(elements)
    program = passing(infeed, outfeed, 3)
    text = "the dataset failed at element 2 .*ValueError: no more of that"
    with pytest.raises(Error, match=text) as caught:
        program()
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError) and cause is infeed._failure()
    assert cause.__traceback__.tb_next.tb_frame.f_code.co_name == "elements"
    assert outfeed.dequeue().tolist() == [1, 2]
    infeed.reset()
    assert infeed._failure() is None


def test_an_error_at_the_first_element():
    def elements():
        raise ValueError("not even one")
        yield

    infeed, outfeed = queues(elements)
    for _ in range(2):
        with pytest.raises(Error, match=r"failed at element 0 .*not even one") as caught:
            passing(infeed, outfeed, 1)()
        assert isinstance(caught.value.__cause__, ValueError)


def test_ctrl_c_at_the_first_element():
    infeed = poptorch.InfeedQueue(Gate(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        infeed.initializer()


def test_no_element():
    infeed = poptorch.InfeedQueue([])
    with pytest.raises(Error, match="the dataset has no element"):
        infeed._element()


def test_closing_ends_a_run_that_waits():
    infeed, outfeed = queues(Gate())
    reader = Reader(passing(infeed, outfeed, 2))
    assert outfeed.get(SECONDS) == 0
    infeed.close()
    with pytest.raises(Error, match="the infeed queue is closed"):
        reader.value()
    with pytest.raises(Error, match=r"the queue is closed\. Make another one"):
        infeed.initializer()
    infeed._source._dataset.put(None)


def test_a_scope_closes_the_queue():
    with poptorch.InfeedQueue(range(10**9)) as infeed:
        infeed.initializer()
        thread = infeed._producer._thread
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_the_thread_ends_when_the_queue_is_dropped():
    infeed = poptorch.InfeedQueue(range(10**9))
    infeed.initializer()
    thread = infeed._producer._thread
    there = weakref.ref(infeed)
    del infeed
    gc.collect()
    assert there() is None
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_leaving_the_process_waits_for_a_dataset_that_is_being_dropped():
    is_dropped = threading.Event()

    def elements():
        try:
            while True:
                yield torch.ones(1)
        finally:
            time.sleep(0.2)
            is_dropped.set()

    infeed = poptorch.InfeedQueue(elements())
    infeed.initializer()
    thread = infeed._producer._thread
    del infeed
    gc.collect()
    _stop_all()
    assert is_dropped.is_set() and not thread.is_alive()


def test_a_fork_does_not_use_the_queue():
    infeed = poptorch.InfeedQueue(range(100))
    infeed.initializer()
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            infeed._begin_run()
        except Error as error:
            os.write(there, str(error).encode())
        finally:
            os._exit(0)
    os.close(there)
    os.waitpid(child, 0)
    with os.fdopen(here) as pipe:
        assert "Queues are not shared between processes" in pipe.read()
    infeed.close()


def test_statistics_tell_who_waited():
    gate = Gate()
    infeed, outfeed = queues(gate)
    assert infeed.statistics()["starved_fraction"] == 0
    reader = Reader(passing(infeed, outfeed, 2))
    assert outfeed.get(SECONDS) == 0
    time.sleep(0.1)
    gate.put(1.0)
    reader.value()
    found = infeed.statistics()
    assert (found["pushed"], found["taken"]) == (2, 2) and found["waits"] >= 1
    assert 0.05 < found["seconds_waited"] <= found["seconds_run"]
    assert 0 < found["starved_fraction"] <= 1
    assert "2 made, 2 taken" in repr(infeed)
    gate.put(None)


def test_statistics_tell_how_full_the_queue_is():
    infeed = poptorch.InfeedQueue(torch.arange(20.0), prefetch_depth=4)
    found = infeed.statistics()
    assert (found["ready"], found["depth"]) == (0, 4)
    assert infeed._queue_state() is None
    for _ in range(2):
        infeed.initializer  # noqa: B018
        wait_until(lambda: infeed.statistics()["ready"] == 4)
        infeed.reset()
        assert infeed.statistics()["ready"] == 0
    outfeed = poptorch.OutfeedQueue()
    passing(infeed, outfeed, 3)()
    wait_until(lambda: infeed.statistics()["ready"] == 4)
    state = infeed._queue_state()
    assert (state.name, state.ready, state.depth) == ("InfeedQueue", 4, 4)
    assert state.waits == infeed.statistics()["waits"] and state.seconds_full > 0
    infeed.close()


def test_a_queue_is_not_copied():
    import copy
    import pickle

    infeed = poptorch.InfeedQueue([1.0])
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(Error, match="cannot be copied"):
            attempt(infeed)
