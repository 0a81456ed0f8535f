"""Observing what runs again: after a bad number, after destroy, and from a file."""

import gc
import warnings

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

NAME = "fc/Gemm:0"


class Ratio(nn.Module):
    """Its loss is NaN if a row of the input is zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return poptorch.identity_loss(self.fc(x) / x.sum(1, keepdim=True), "mean")


def make(options):
    model = Ratio()
    return poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))


def rows(bad: int | None = None) -> torch.Tensor:
    """Return four micro-batches of two rows; one row may be bad."""
    x = torch.linspace(0.5, 1.5, 32).view(8, 4).clone()
    if bad is not None:
        x[bad] = 0
    return x


def call_with_a_bad_one_between(training, read=lambda: None) -> None:
    """Call three times; the second time, micro-batch 3 of 4 has a bad row and is repeated."""
    training(rows())
    with pytest.raises(poptorch.BadNumberError) as caught:
        training(rows(bad=6))
    assert caught.value.verdict.micro_batch == 3
    read()
    training(rows())


@pytest.mark.parametrize("reads_between", [False, True])
@pytest.mark.parametrize("over", ["micro_batch", "iteration"])
def test_statistics_are_those_of_the_iteration_that_trained(over, reads_between):
    def observed(run):
        options = make_options(ga=4).watch().observe(NAME, every=1, over=over)
        training = make(options)
        run(training)
        found = [(r.step, r.micro_batch, r.statistics.mean) for r in training.observations()]
        training.destroy()
        return found

    def twice(training):
        training(rows())
        training(rows())

    def with_a_bad_one(training):
        read = training.observations if reads_between else lambda: None
        call_with_a_bad_one_between(training, read)

    expected, found = observed(twice), observed(with_a_bad_one)
    assert len(expected) == (8 if over == "micro_batch" else 2)
    assert found == (expected[-len(expected) // 2 :] if reads_between else expected)


def test_a_recorded_run_goes_on_after_a_bad_number(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain, repeated = (make(make_options(ga=4).watch()) for _ in range(2))
        plain.record(tmp_path / "plain")
        repeated.record(tmp_path / "repeated")
        plain(rows())
        plain(rows())
        call_with_a_bad_one_between(repeated, repeated._observing.work)
        plain.destroy()
        repeated.destroy()
    runs = [poptorch.Run(tmp_path / name) for name in ("plain", "repeated")]
    assert [run.steps for run in runs] == [[0, 1]] * 2
    assert poptorch.compare(*runs).equal


def test_destroy_completes_a_run_and_a_later_program_is_not_recorded(tmp_path, caplog):
    def warned():
        return [one.getMessage() for one in caplog.records if one.name == "poptorch::python"]

    training = make(make_options())
    training.record(tmp_path / "a")
    training(rows()[:2])
    training.destroy()
    assert poptorch.Run(tmp_path / "a").state == "closed"
    assert not warned()
    training(rows()[:2])
    assert len(warned()) == 1 and "is not recorded" in warned()[0]
    training.destroy()
    training.record(tmp_path / "b")
    training(rows()[:2])
    training.destroy()
    assert poptorch.Run(tmp_path / "a").steps == poptorch.Run(tmp_path / "b").steps == [0]
    assert len(warned()) == 1


def test_what_is_observed_is_no_part_of_a_file(tmp_path):
    training = make(make_options().observe(lambda info: info.name == NAME, every=1))
    training.compileAndExport(tmp_path / "a.poptorch", rows()[:2])
    again = make(make_options().observe(NAME, every=1))
    again.loadExecutable(tmp_path / "a.poptorch")
    again(rows()[:2])
    assert [record.name for record in again.observations()] == [NAME]
    training(rows()[:2])
    training.save(tmp_path / "b.poptorch")
    loaded = poptorch.load(tmp_path / "b.poptorch")
    loaded(rows()[:2])
    with pytest.raises(poptorch.Error, match="the options observe nothing"):
        loaded.observations()


def test_the_class_of_a_sink_is_refused():
    training = make(make_options().observe(NAME))
    with pytest.raises(TypeError, match=r"the class SummaryFile is no sink.*SummaryFile\(\.\.\.\)"):
        training.add_sink(poptorch.SummaryFile)


class Watcher:
    """A sink that keeps the states of queues."""

    def __init__(self):
        self.states, self.num_records = [], 0

    def write_records(self, records):
        self.num_records += len(records)

    def show_queues(self, states):
        self.states.append(states)

    def close(self):
        pass


class Feeding(Ratio):
    """Puts its output into a queue."""

    def __init__(self, queue):
        super().__init__()
        self.queue = queue

    def forward(self, x):
        self.queue.enqueue(x)
        return super().forward(x)


def test_a_sink_sees_the_queues_of_the_model_and_the_loader_that_feeds_it():
    gc.collect()  # loaders of other tests
    options = make_options().observe(NAME, every=1)
    loader = poptorch.DataLoader(
        options,
        torch.utils.data.TensorDataset(torch.rand(12, 4) + 1),
        2,
        mode=poptorch.DataLoaderMode.Async,
        async_options={"sharing_strategy": poptorch.SharingStrategy.Fork},
    )
    queue, sink = poptorch.OutfeedQueue(max_bytes=8 * 32), Watcher()
    model = Feeding(queue)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    training.add_sink(sink)
    for (x,) in loader:
        training(x)
    training.close_sinks()
    loader_state, queue_state = sink.states[-1]
    assert (loader_state.name, loader_state.depth) == ("DataLoader", 3)
    assert queue_state.name.startswith("OutfeedQueue test_observing_again.py:")
    assert (queue_state.ready, queue_state.depth) == (6, 8)
    assert sink.num_records == 6
    training.destroy()
    loader.terminate()


def test_a_sink_of_fit_sees_its_queues():
    gc.collect()  # loaders of other tests
    sink, net = Watcher(), nn.Linear(4, 4)
    poptorch.fit(
        net,
        [(torch.rand(2, 4), torch.rand(2, 4))] * 6,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        options=make_options().observe("Gradient___*.weight", every=1),
        callbacks=[sink],
        verbose=0,
    )
    data, results = sink.states[-1]
    assert (data.name, data.depth) == ("data of fit", 3)
    assert (results.name, results.depth) == ("results of fit", None)
    assert sink.num_records == 6
