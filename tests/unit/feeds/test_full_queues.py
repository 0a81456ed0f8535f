"""Queues that are full but continue: they drop elements, or keep them on disk."""

import collections
import random
import re
import resource
import tempfile

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.errors import Error
from tests.unit.feeds.small_programs import counting

pytestmark = pytest.mark.timeout(60)


def wide(count):
    """Return an element of 1 MiB."""
    return (count + torch.zeros(1 << 18)).float()


def mapped_files():
    with open("/proc/self/maps", encoding="utf-8") as file:
        return [line for line in file if "popsim_torch_queue" in line]


@pytest.mark.parametrize(
    ("when_full", "kept"), [("drop_oldest", range(20, 30)), ("drop_newest", range(10))]
)
def test_elements_are_dropped(when_full, kept):
    queue = poptorch.OutfeedQueue(max_bytes=40, when_full=when_full)
    program = counting(queue, 30)
    for number in (1, 2):
        assert program() == 30
        assert queue.dequeue().tolist() == list(kept)
        found = queue.statistics()
        assert found["dropped"] == 20 * number and found["dequeued"] == 10 * number
        assert found["peak_bytes"] == 40 and found["bytes"] == 0 and found["waits"] == 0
    assert "40 dropped" in repr(queue)


@pytest.mark.parametrize(
    ("arguments", "ready", "depth"),
    [
        ({}, 30, None),
        ({"max_bytes": 43, "when_full": "drop_newest"}, 10, 10),
        ({"max_bytes": 40, "when_full": "spill"}, 30, None),
        ({"max_bytes": 3, "when_full": "drop_oldest"}, 1, 1),
    ],
)
def test_how_full_a_queue_is(arguments, ready, depth):
    queue = poptorch.OutfeedQueue(**arguments)
    assert queue._queue_state() is None
    counting(queue, 30)()
    state = queue._queue_state()
    assert (state.ready, state.depth) == (ready, depth)
    assert (state.waits, state.seconds_waited, state.seconds_full) == (0, 0.0, None)
    assert re.fullmatch(r"OutfeedQueue small_programs\.py:\d+", state.name)
    assert queue.statistics()["ready"] == ready
    queue.get()
    assert queue.statistics()["ready"] == queue._queue_state().ready == ready - 1
    queue.dequeue()  # and no file is left for the tests that count them


def test_a_queue_of_the_newest_element_is_never_full():
    queue = poptorch.OutfeedQueue(poptorch.OutfeedMode.LAST)
    counting(queue, 3)()
    assert queue._queue_state() is None


def test_one_element_always_has_a_place():
    queue = poptorch.OutfeedQueue(max_bytes=0, when_full="drop_oldest")
    counting(queue, 5)()
    assert queue.dequeue().tolist() == [4]


def test_elements_go_to_disk_and_come_back():
    queue = poptorch.OutfeedQueue(max_bytes=40, when_full="spill")
    program = counting(queue, 1000)
    for number in (1, 2):
        program()
        found = queue.statistics()
        assert found["spilled"] == 990 * number
        assert found["bytes"] == found["peak_bytes"] == 40
        assert len(mapped_files()) == 1
        assert [queue.get().item() for _ in range(500)] == list(range(500))
        assert queue.dequeue().tolist() == list(range(500, 1000))
        assert not mapped_files()
    assert found["dropped"] == found["waits"] == 0
    assert "1980 spilled" in repr(queue)


def test_large_elements_on_disk():
    queue = poptorch.OutfeedQueue(max_bytes=2 << 20, when_full="spill")
    counting(queue, 80, wide)()
    assert len(mapped_files()) == 2
    first = queue.get()
    elements = queue.dequeue()
    assert not mapped_files()
    assert first.unique().tolist() == [0]
    assert elements.shape == (79, 1 << 18)
    assert (elements == torch.arange(1.0, 80)[:, None]).all()


def test_one_file_is_read_to_its_end_before_memory_is_used_again():
    queue = poptorch.OutfeedQueue(max_bytes=40, when_full="spill")
    counting(queue, 30)()
    assert [queue.get().item() for _ in range(5)] == list(range(5))
    counting(queue, 20)()  # the queue has room for five
    assert len(mapped_files()) == 1 and queue.statistics()["spilled"] == 40
    assert queue.dequeue().tolist() == [*range(5, 30), *range(20)]
    counting(queue, 5)()
    assert queue.statistics()["spilled"] == 40 and not mapped_files()


def test_what_was_read_needs_no_file():
    queue = poptorch.OutfeedQueue(max_bytes=0, when_full="spill")
    counting(queue, 2, lambda count: (count + torch.zeros(9 << 20)).float())()  # a file for each
    elements = [queue.get(), queue.get()]
    assert [element.unique().item() for element in elements] == [0, 1]
    assert not mapped_files()


def test_what_was_on_disk_stays_with_its_reader():
    queue = poptorch.OutfeedQueue(max_bytes=0, when_full="spill")
    counting(queue, 3, wide)()
    elements = [queue.get() for _ in range(3)]
    counting(queue, 3, lambda count: wide(count + 7))()
    assert [element.unique().item() for element in elements] == [0, 1, 2]
    elements[1].add_(1)
    assert queue.dequeue()[:, 0].tolist() == [7, 8, 9]


def test_a_folder_that_is_not_there(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at all")
    queue = poptorch.OutfeedQueue(max_bytes=8, when_full="spill")
    program = counting(queue, 5)
    text = r"cannot make a file in '/nowhere/at all'.*No such file.*TMPDIR.*in iteration 2 of the"
    with pytest.raises(Error, match=text):
        program()
    assert queue.dequeue().tolist() == [0, 1]


def test_a_disk_without_room():
    queue = poptorch.OutfeedQueue(max_bytes=8, when_full="spill")
    program = counting(queue, 5)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(Error, match=r"cannot have room in .*File too large"):
            program()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert queue.dequeue().tolist() == [0, 1] and not mapped_files()
    program()
    assert queue.dequeue().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("when_full", ["drop_oldest", "drop_newest", "spill"])
@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_runs_and_reads(when_full, seed):
    """Compare a queue of ten elements with a list."""
    chance = random.Random(seed)
    queue = poptorch.OutfeedQueue(max_bytes=80, when_full=when_full, buffer_depth=3)
    start = torch.zeros((), dtype=torch.int32)

    @poptorch.function
    def program(first):
        def body(count):
            queue.enqueue((count, -count))
            return count + 1

        return poptorch.repeat(7, body, inputs=first)

    expected, seen, dropped = collections.deque(), [], 0
    for _ in range(60):
        if chance.random() < 0.4:
            for number in range(int(start), int(start) + 7):
                if len(expected) == 10 and when_full != "spill":
                    dropped += 1
                    if when_full == "drop_newest":
                        continue
                    expected.popleft()
                expected.append(number)
            start = program(start)
        elif chance.random() < 0.2:
            rest = queue.dequeue() if queue.enqueued else (torch.zeros(0), torch.zeros(0))
            assert rest[0].tolist() == list(expected)
            assert rest[1].tolist() == [-number for number in expected]
            expected.clear()
        else:
            for _ in range(chance.randrange(5)):
                found = queue.poll()
                seen = None if found is None else (found[0].item(), found[1].item())
                wanted = expected.popleft() if expected else None
                assert seen == (None if wanted is None else (wanted, -wanted))
        found = queue.statistics()
        assert found["dropped"] == dropped and found["bytes"] <= 80
        assert found["enqueued"] - found["dequeued"] - len(expected) == (
            dropped if when_full == "drop_oldest" else 0
        )


@pytest.mark.parametrize("when_full", ["drop_oldest", "drop_newest", "spill"])
def test_a_queue_without_bounds_is_never_full(when_full):
    with pytest.raises(Error, match=f"when_full='{when_full}' needs max_bytes"):
        poptorch.OutfeedQueue(when_full=when_full)
