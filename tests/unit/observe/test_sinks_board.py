"""Records in TensorBoard."""

import numpy as np
import pytest
import torch

from popsim_torch.errors import UsageTypeError
from popsim_torch.observe.record import Record
from popsim_torch.observe.sinks import SummaryBoard
from popsim_torch.statistics import Channels, Statistics, statistics_of
from tests.unit.observe.made_records import record


class Writer:
    def __init__(self):
        self.scalars, self.histograms, self.flushed = {}, {}, 0

    def add_scalar(self, tag, value, step):
        self.scalars[tag, step] = value

    def add_histogram(self, tag, values, step):
        raise AssertionError

    def add_histogram_raw(self, tag, **arguments):
        self.histograms[tag] = arguments

    def flush(self):
        self.flushed += 1


@pytest.fixture
def writer():
    return Writer()


def test_a_scalar_for_each_statistic(writer):
    sink = SummaryBoard(writer)
    sink.write_records([record("fc.weight", 5, [3.0, -4.0]), record("fc.weight", 6, [1.0])])
    sink.close()
    assert writer.scalars["norm/fc.weight", 5] == 5 and writer.scalars["norm/fc.weight", 6] == 1
    assert writer.scalars["minimum/fc.weight", 5] == -4
    assert len(writer.scalars) == 24 and writer.flushed == 1


def test_the_number_of_dead_channels(writer):
    found = statistics_of(torch.tensor([[0.0, 1.0], [0.0, 2.0]]), Channels())
    SummaryBoard(writer).write_records([Record("x", 3, None, 0, found)])
    assert writer.scalars["dead_channels/x", 3] == 1


def test_what_was_not_asked_for_has_no_scalar(writer):
    SummaryBoard(writer).write_records([Record("x", 0, None, 0, Statistics(4, 1, 0))])
    assert writer.scalars == {("nans/x", 0): 1, ("infs/x", 0): 0} and writer.histograms == {}


def test_other_micro_batches_and_replicas_have_tags_of_their_own(writer):
    places = [(0, 0), (1, 0), (None, 2), (1, 2)]
    SummaryBoard(writer).write_records(
        [record("x", 0, [1.0], micro_batch=one, replica=two) for one, two in places]
    )
    tags = [tag for tag, _ in writer.scalars if tag.startswith("norm/")]
    assert tags == [f"norm/x{end}" for end in ("", "/micro_batch_1", "/replica_2")] + [
        "norm/x/micro_batch_1/replica_2"
    ]


def test_a_histogram_has_at_most_64_bins(writer):
    values = np.random.default_rng(0).normal(0, 1, 5000).astype("float32")
    SummaryBoard(writer).write_records([record("x", 9, values, mantissa_bits=3)])
    found = writer.histograms["histogram/x"]
    assert 20 < len(found["bucket_limits"]) == len(found["bucket_counts"]) <= 64
    assert sum(found["bucket_counts"]) == found["num"] == 5000 and found["bucket_counts"][0] == 0
    assert found["global_step"] == 9 and found["min"] == values.min()
    assert found["sum"] == pytest.approx(values.sum(), rel=1e-4)
    assert found["sum_squares"] == pytest.approx((values.astype(float) ** 2).sum())
    assert (np.diff(found["bucket_limits"]) > 0).all()


def test_a_histogram_without_moments_and_one_without_values(writer):
    whole = record("x", 0, [1.0, 1.0, 2.0]).statistics
    SummaryBoard(writer).write_records(
        [
            Record("x", 0, None, 0, Statistics(3, 0, 0, histogram=whole.histogram)),
            record("y", 0, [np.nan]),
        ]
    )
    assert list(writer.histograms) == ["histogram/x"]
    found = writer.histograms["histogram/x"]
    assert (found["min"], found["max"], found["num"]) == (1, 4, 3)
    assert 3 <= found["sum"] <= 8


def test_a_writer_without_histograms(writer):
    class Old:
        add_scalar = add_histogram = print

    sink = SummaryBoard(Old())
    with pytest.raises(UsageTypeError, match="a Old has no method add_histogram_raw"):
        sink.write_records([record("x", 0, [1.0])])
    sink.close()


def test_the_writer_of_pytorch_takes_it(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        sink = SummaryBoard(writer)
        sink.write_records([record("x", step, [1.0, 2.0, -3.0]) for step in range(3)])
        sink.close()
        events = EventAccumulator(str(tmp_path))
        events.Reload()
        assert [event.value for event in events.Scalars("maximum/x")] == [2.0] * 3
        assert events.Histograms("histogram/x")[0].histogram_value.num == 3
