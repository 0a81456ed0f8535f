"""The speed of datasets."""

import json
import time

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.errors import Error

pytestmark = pytest.mark.timeout(60)


def figures(result):
    assert len(result) == 1
    return json.loads(result[0])["epochs"]


@pytest.mark.parametrize("copies", [True, False])
def test_figures(capsys, copies):
    dataset = [{"x": torch.ones(2, 3), "y": (1, torch.ones(4).half())}] * 10
    epochs = figures(poptorch.dataset_benchmark(dataset, 2, 5, do_memcpy=copies))
    assert len(epochs) == 2
    for epoch in epochs:
        assert all(isinstance(value, float) for value in epoch.values())
        seconds = epoch["time_elapsed"]
        assert seconds > 0
        assert epoch == {
            "elements_processed": 5.0,
            "total_bytes_processed": 5.0 * (24 + 8 + 8),
            "time_elapsed": seconds,
            "elements_per_second": 5 / seconds,
            "bandwidth": 200 / seconds / 1e9,
        }
    out = capsys.readouterr().out
    assert out.count("Elements per second: ") == 2 and "bandwidth: " in out
    assert "Completed epoch 1/2\n" in out and "Completed epoch 2/2\n" in out


def test_the_time_is_the_datasets(capsys):
    def slow():
        for number in range(3):
            time.sleep(0.02)
            yield number

    (epoch,) = figures(poptorch.dataset_benchmark(slow, 1, 3, print_stats=False))
    assert epoch["time_elapsed"] >= 0.055
    assert capsys.readouterr().out == "Completed epoch 1/1\n"


def test_how_long_elements_were_waited_for():
    def uneven():
        for number in range(20):
            time.sleep(0.03 if number == 10 else 0)
            yield number

    (text,) = poptorch.dataset_benchmark(uneven, 2, 10, print_stats=False)
    first, second = json.loads(text)["waits"]
    assert set(first) == {"total", "p50", "p90", "p99", "max"}
    assert 0 <= second["p50"] <= second["p90"] <= second["p99"] <= second["max"]
    assert 0.02 <= second["max"] <= second["total"]


@pytest.mark.parametrize(("seconds_per_step", "bound"), [(0.001, True), (10, False)])
def test_whether_the_data_would_be_the_limit(seconds_per_step, bound, capsys):
    def slow():
        while True:
            time.sleep(0.005)
            yield 1.0

    infeed = poptorch.InfeedQueue(slow)
    calls = [(poptorch.dataset_benchmark, slow), (poptorch.infeed_benchmark, infeed)]
    for benchmark, data in calls:
        (text,) = benchmark(data, 3, 4, seconds_per_step=seconds_per_step)
        verdict = json.loads(text)["verdict"]
        assert verdict["input_bound"] is bound
        assert verdict["seconds_per_element"] >= 0.005
        ratio = verdict["seconds_per_element"] / seconds_per_step
        assert verdict["data_over_step"] == pytest.approx(ratio)
        said = f"Input bound: {'yes' if bound else 'no'}. An element takes "
        assert said in capsys.readouterr().out
    infeed.close()


@pytest.mark.parametrize("seconds", [0, -1.0, "1", True, float("inf"), float("nan")])
def test_times_of_steps(seconds):
    with pytest.raises(Error, match="seconds_per_step must be a number of seconds above 0"):
        poptorch.dataset_benchmark([1.0], 1, 1, seconds_per_step=seconds)


def test_a_queue():
    infeed = poptorch.InfeedQueue(range(3), repeat=True)
    (epoch,) = figures(poptorch.infeed_benchmark(infeed, 1, 100))
    assert epoch["elements_processed"] == 100
    # The queue is unchanged.
    assert infeed.statistics()["pushed"] == 0
    infeed.initializer()
    with pytest.raises(Error, match="a program uses the queue"):
        poptorch.infeed_benchmark(infeed, 1, 1)


@pytest.mark.parametrize(("epochs", "elements"), [(0, 1), (1, 0), (1, 1.5), (True, 1)])
def test_counts(epochs, elements):
    with pytest.raises(Error, match="must be an integer of 1 or more"):
        poptorch.dataset_benchmark([1.0], epochs, elements)


def spoilt():
    yield 1.0
    raise ValueError("no more")


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        ([1.0, 2.0], "the data has run out after 2 elements"),
        (spoilt, "the dataset failed at element 1 .*ValueError: no more"),
        ([torch.zeros(0, 3)], r"a tensor of the shape \[0, 3\]"),
        ([1.0, (1.0,)], "element 1 is"),
        (3, "a int cannot be iterated"),
        (poptorch.InfeedQueue([1.0]), "Call poptorch.infeed_benchmark"),
    ],
    ids=["short", "failing", "empty", "uneven", "no data", "queue"],
)
def test_mistakes(dataset, text):
    with pytest.raises(Error, match=text):
        poptorch.dataset_benchmark(dataset, 1, 3)


def test_other_mistakes():
    with pytest.raises(Error, match="a list is not an InfeedQueue"):
        poptorch.infeed_benchmark([1.0], 1, 1)
    with pytest.raises(Error, match="apply_debug_options must be True or False"):
        poptorch.dataset_benchmark([1.0], 1, 1, apply_debug_options=3)
