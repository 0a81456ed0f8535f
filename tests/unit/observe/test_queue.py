"""The dictionary of a queue: additions, enqueueing, and what tracing resets."""

import contextlib
import copy
import logging
import pickle
import re

import pytest
import torch
from torch import nn

from popsim_torch.errors import Error, UsageTypeError
from popsim_torch.feeds import OutfeedMode
from popsim_torch.observe import Glob, MaybeOutfeed, MaybeOutfeedQueue
from popsim_torch.ops import op_listener


class Listener:
    """A stand-in for the tracer of a model, which keeps the enqueued elements."""

    def __init__(self):
        self.elements = []
        self.endings = []

    def at_end(self, ending):
        self.endings.append(ending)

    def enqueue(self, queue, structure, tensors):
        self.elements.append(tensors)
        queue._attach(structure, [(x.dtype, tuple(x.shape)) for x in tensors], "a test")


@contextlib.contextmanager
def tracing():
    listener = Listener()
    token = op_listener.set(listener)
    try:
        yield listener
        for ending in listener.endings:
            ending()
    finally:
        op_listener.reset(token)


def x(value=0.0):
    return torch.full((2, 3), value)


def test_keys_come_in_the_order_of_adding():
    queue = MaybeOutfeedQueue()
    with tracing() as trace:
        queue.maybe_outfeed("b", x(1))
        queue.maybe_outfeed("a", x(2))
        assert queue.maybe_enqueue() == ("b", "a")
    assert [tensor[0, 0].item() for tensor in trace.elements[0]] == [1, 2]


def test_filters_choose():
    queue = MaybeOutfeedQueue(filters=["fc1", Glob("*.bias"), re.compile("^d")])
    with tracing():
        for key in ("fc1.weight", "fc2.weight", "fc2.bias", "dense"):
            queue.maybe_outfeed(key, x())
        assert queue.maybe_enqueue() == ("fc1.weight", "fc2.bias", "dense")


def test_a_later_value_takes_the_place_of_an_earlier_one():
    queue = MaybeOutfeedQueue()
    with tracing() as trace:
        for key, value in (("a", 1), ("b", 2), ("a", 3)):
            queue.maybe_outfeed(key, x(value))
        assert queue.maybe_enqueue() == ("a", "b")
    assert [tensor[0, 0].item() for tensor in trace.elements[0]] == [3, 2]


def test_what_changes_a_value_later_does_not_count():
    queue, value = MaybeOutfeedQueue(), x(1)
    with tracing() as trace:
        queue.maybe_outfeed("a", value)
        value.zero_()
        queue.maybe_enqueue()
    assert trace.elements[0][0][0, 0] == 1


def test_nothing_is_enqueued_when_nothing_was_added():
    queue = MaybeOutfeedQueue(filters=[])
    with tracing() as trace:
        queue.maybe_outfeed("a", x())
        assert queue.maybe_enqueue() is None
    assert trace.elements == []
    assert not queue.enqueued
    assert queue.maybe_dequeue() is None


def test_a_second_element_in_a_program_is_refused():
    queue = MaybeOutfeedQueue()
    first, second = MaybeOutfeed(queue, name="a"), MaybeOutfeed(queue, name="b")
    with tracing():
        first(x())
        assert queue.maybe_enqueue() is None
        with pytest.raises(Error, match=r"'b' came after .* only the last one has final_outfeed"):
            second(x())
    with tracing():  # another program
        first(x())


def test_values_that_nobody_enqueues_are_told(caplog):
    queue = MaybeOutfeedQueue()
    with caplog.at_level(logging.WARNING, "poptorch::python"), tracing():
        queue.maybe_outfeed("a", x())
    (record,) = caplog.records
    assert record.getMessage().startswith("MaybeOutfeedQueue: 'a' wait to be enqueued: maybe_enq")


def test_once_enqueued_it_says_so():
    queue = MaybeOutfeedQueue()
    assert not queue.enqueued
    with tracing():
        queue.maybe_outfeed("a", x())
        assert not queue.enqueued
        queue.maybe_enqueue()
    assert queue.enqueued


def test_a_new_trace_starts_with_an_empty_dictionary():
    queue = MaybeOutfeedQueue()
    with tracing():
        queue.maybe_outfeed("left over", x())
    with tracing():
        queue.maybe_outfeed("a", x())
        assert queue.maybe_enqueue() == ("a",)


def test_the_filters_are_a_copy():
    queue = MaybeOutfeedQueue(filters=["a"])
    queue.filters.append("b")
    assert queue.filters == ["a"]
    assert MaybeOutfeedQueue().filters is None


def test_outside_of_a_trace_nothing_can_be_enqueued():
    queue = MaybeOutfeedQueue()
    queue.maybe_outfeed("a", x())
    with pytest.raises(Error, match="enqueue"):
        queue.maybe_enqueue()
    assert not queue.enqueued


def test_a_value_is_made_of_tensors():
    with pytest.raises(UsageTypeError, match=r"the value of 'a' is a str"):
        MaybeOutfeedQueue().maybe_outfeed("a", "text")


def test_a_key_is_a_string():
    with pytest.raises(UsageTypeError, match="the key has to be a string, got 3"):
        MaybeOutfeedQueue().maybe_outfeed(3, x())


def test_a_filter_that_matches_nothing_is_told_once_with_near_names(caplog):
    queue = MaybeOutfeedQueue(filters=["Dense_12S", "a"])
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        for _ in range(2):
            with tracing():
                queue.maybe_outfeed("Dense_128", x())
                queue.maybe_outfeed("a", x())
                queue.maybe_enqueue()
    assert [record.getMessage() for record in caplog.records] == [
        "MaybeOutfeedQueue: the filter 'Dense_12S' matches none of the 2 keys that are offered; "
        "near ones: 'Dense_128'"
    ]


def test_why_a_queue_is_empty():
    assert "No compiled program offers values" in MaybeOutfeedQueue().why_empty()
    queue = MaybeOutfeedQueue(filters=["a"])
    with tracing():
        queue.maybe_outfeed("b", x())
        queue.maybe_enqueue()
    assert queue.why_empty() == "The filters ['a'] let none of these keys through: 'b'."
    with tracing():
        queue.maybe_outfeed("a", x())
    assert queue.why_empty().startswith("'a' wait to be enqueued")
    with tracing():
        queue.maybe_outfeed("a", x())
        queue.maybe_enqueue()
    assert queue.why_empty() == ""


def test_an_element_of_other_keys_needs_another_queue():
    queue = MaybeOutfeedQueue()
    for key in ("a", "b"):
        with tracing():
            queue.maybe_outfeed(key, x())
            if key == "a":
                queue.maybe_enqueue()
            else:
                with pytest.raises(Error, match="All elements of a queue are alike"):
                    queue.maybe_enqueue()


def test_it_is_read_as_other_queues_are():
    queue = MaybeOutfeedQueue(OutfeedMode.LAST, buffer_depth=2, max_bytes=100)
    assert queue.mode == OutfeedMode.LAST
    assert queue.poll() is None
    assert queue.statistics()["enqueued"] == 0
    with pytest.raises(AttributeError, match="nonsense"):
        queue.nonsense()
    with pytest.raises(Error, match="buffer_depth"):
        MaybeOutfeedQueue(buffer_depth=0)


def test_another_process_gets_an_empty_queue_with_the_same_filters():
    queue = MaybeOutfeedQueue(OutfeedMode.LAST, ["a", Glob("b*"), re.compile("c")])
    other = pickle.loads(pickle.dumps(queue))
    assert (other.filters, other.mode) == (queue.filters, OutfeedMode.LAST)
    assert not other.enqueued


def test_a_copy_of_a_model_feeds_the_same_queue():
    layer = MaybeOutfeed(MaybeOutfeedQueue(), name="a")
    assert copy.deepcopy(layer).queue is layer.queue


class Watched(nn.Module):
    """A model with everything that a dry run must not change or compute."""

    def __init__(self, queue):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.queue = queue
        self.tap = MaybeOutfeed(queue, name="norm")

    def forward(self, x):
        self.queue.maybe_outfeed("half", x.half())
        return self.tap(self.norm(x))


def test_dry_run_tells_keys_and_bytes_and_changes_nothing(capsys):
    queue = MaybeOutfeedQueue(filters=["norm", "half"])
    model = Watched(queue)
    text = queue.dry_run(model, torch.rand(32, 3))
    assert capsys.readouterr().out == text + "\n"
    assert text.splitlines() == [
        "Key   Shape    Type     Bytes  Observed",
        "half  (32, 3)  float16  192    yes",
        "norm  (32, 3)  float32  384    yes",
        "2 of 2 keys are observed, 576 bytes per step.",
    ]
    assert model.norm.num_batches_tracked == 0
    assert model.norm.running_mean.tolist() == [0, 0, 0]
    assert not queue.enqueued


def test_dry_run_of_a_function_changes_nothing():
    queue = MaybeOutfeedQueue()
    model, value = Watched(queue), torch.ones(4, 3)

    def step(given):
        queue.maybe_outfeed("sum", given.add_(1).sum())
        return model(given)

    assert queue.dry_run(step, value).endswith("3 of 3 keys are observed, 76 bytes per step.")
    assert value.sum() == 12
    assert model.norm.num_batches_tracked == 0


def test_dry_run_counts_what_is_taken_only():
    queue = MaybeOutfeedQueue(filters=["norm"])
    assert queue.dry_run(Watched(queue), torch.rand(32, 3)).endswith(
        "1 of 2 keys are observed, 384 bytes per step."
    )


def test_dry_run_shows_the_last_trace():
    queue = MaybeOutfeedQueue()
    with tracing():
        queue.maybe_outfeed("a", (x().double(), {"b": x().long()}))
    row = " ".join(queue.dry_run().splitlines()[1].split())
    assert row == "a (2, 3) (2, 3) float32 int32 48 yes"


def test_a_failed_dry_run_leaves_the_queue_as_it_was():
    queue = MaybeOutfeedQueue()

    def fail():
        queue.maybe_outfeed("a", x())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        queue.dry_run(fail)
    assert queue.dry_run() == MaybeOutfeedQueue().dry_run()
    assert not queue._is_watching


def test_dry_run_wants_a_module():
    with pytest.raises(UsageTypeError, match="needs a module or a function, got a str"):
        MaybeOutfeedQueue().dry_run("model")
