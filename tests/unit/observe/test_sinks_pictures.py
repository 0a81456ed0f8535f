"""Pictures of records."""

import builtins

import numpy as np
import pytest

from popsim_torch.errors import Error, UsageValueError
from popsim_torch.observe.record import Record
from popsim_torch.observe.sinks import gradient_flow, histogram_over_time, nan_map
from popsim_torch.statistics import Statistics
from tests.unit.observe.made_records import LAYERS, record, training

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def pixels(figure, path):
    figure.savefig(path, dpi=50)
    assert path.read_bytes().startswith(b"\x89PNG")
    return path.stat().st_size


def mesh(figure):
    return figure.axes[0].collections[0]


def test_a_histogram_for_each_step(tmp_path):
    records = [record("x", step, [1.0, 1.5, -1.0, 0.0]) for step in (0, 10, 20)]
    figure = histogram_over_time([*records, record("y", 0, [1.0])], "x")
    shares = np.ma.filled(mesh(figure).get_array(), 0).reshape(3, 3)
    assert shares.T.tolist() == [[0.25, 0.25, 0.5]] * 3
    assert figure.axes[0].get_title() == "x" and figure.axes[0].get_xlim() == (-5, 25)
    assert pixels(figure, tmp_path / "x.png") > 1000


def test_micro_batches_and_replicas_have_columns_of_their_own():
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    records = [
        record("x", step, [1.0], micro_batch=one, replica=two)
        for step, one in places
        for two in (0, 1)
    ]
    figure = histogram_over_time(records, "x (replica 1)")
    edges = mesh(figure).get_coordinates()[0, :, 0]
    assert edges.tolist() == [-0.25, 0.25, 0.75, 1.25, 1.75]


def test_long_runs_are_thinned():
    figure = histogram_over_time([record("x", step, [1.0]) for step in range(1000)], "x")
    assert 200 <= mesh(figure).get_coordinates().shape[1] <= 401


@pytest.mark.parametrize("values", [[np.nan], [0.0], [-3e38, 1e-40, 3e38]])
def test_histograms_of_odd_values(values, tmp_path):
    assert pixels(histogram_over_time([record("x", 0, values)], "x"), tmp_path / "x.png") > 1000


def test_a_tensor_without_histogram():
    records = [Record("weight", 0, None, 0, Statistics(1, 0, 0))]
    with pytest.raises(UsageValueError, match=r"of 'weight' have no histogram. Ask for"):
        histogram_over_time(records, "weight")
    with pytest.raises(UsageValueError, match=r"no record of a tensor 'wieght'. There is 'weight'"):
        histogram_over_time(records, "wieght")
    with pytest.raises(UsageValueError, match="There are no records"):
        histogram_over_time([], "x")


def test_gradients_by_layer(tmp_path):
    figure = gradient_flow(training(10))
    axes = figure.axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [f"{layer}.weight" for layer in LAYERS] and axes.get_xscale() == "log"
    first, last = ([bar.get_width() for bar in group] for group in axes.containers)
    records = [one for one in training(10) if one.name.startswith("Gradient___")]
    assert first == [one.statistics.norm for one in records[:5]][::-1]
    assert last == [one.statistics.norm for one in records[-5:]][::-1]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["step 0", "step 9"]
    assert pixels(figure, tmp_path / "x.png") > 1000


def test_the_flow_without_gradients_and_without_norms(tmp_path):
    figure = gradient_flow([record("x", 0, [0.0]), record("y", 0, [np.nan])])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["x", "y"]
    assert pixels(figure, tmp_path / "x.png") > 1000
    with pytest.raises(UsageValueError, match=r"no record has a norm. Ask for poptorch.Moments"):
        gradient_flow([Record("x", 0, None, 0, Statistics(1, 0, 0))])


def test_where_nan_is(tmp_path):
    values = ([1.0], [np.inf], [np.nan, np.inf], [2.0])
    records = [record("bad", step, one) for step, one in enumerate(values)]
    figure = nan_map([record("good", 1, [1.0]), *records])
    grid = np.ma.filled(mesh(figure).get_array(), -1).reshape(2, 4)
    assert grid.tolist() == [[-1, 0, -1, -1], [0, 1, 2, 0]]
    assert figure.axes[0].get_title() == "1 of 2 tensors have NaN or infinities"
    assert pixels(figure, tmp_path / "x.png") > 1000


def test_of_many_tensors_only_the_bad_are_shown(tmp_path):
    good = [record(f"good{place}", 0, [1.0]) for place in range(80)]
    figure = nan_map([*good, record("bad", 0, [np.nan])])
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["bad"]
    assert axes.get_xlabel().endswith("80 tensors are not shown")
    assert pixels(nan_map(good), tmp_path / "x.png") > 1000
    with pytest.raises(UsageValueError, match="there are no records"):
        nan_map([])


def test_without_matplotlib_the_error_says_so(monkeypatch):
    found = builtins.__import__

    def without(name, *arguments):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    for draw in (nan_map, gradient_flow, lambda all_of: histogram_over_time(all_of, "x")):
        with pytest.raises(Error, match=r"matplotlib cannot be imported .* pip install matplotlib"):
            draw([record("x", 0, [1.0])])
