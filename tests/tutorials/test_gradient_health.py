"""The tutorial names the layer that fails first, in each way in which it spoils a training."""

import importlib
import math
import sys
from itertools import islice

import pytest
import torch
from PIL import Image

import popsim_torch as poptorch
from common import digits
from common.batches import Batches
from tests.tutorials.running import TUTORIALS, draw_few_digits, run_here

FOLDER = TUTORIALS / "gradient_health"
STEPS = 8
BROKEN = {"explode": r"fc2\.weight: .*update", "vanish": r"fc1\.weight"}


@pytest.fixture(scope="module")
def parts():
    """The modules of the tutorial."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield [importlib.import_module(name) for name in ("networks", "diagnosis")]
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("networks", "diagnosis"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def batches():
    images, labels = digits.draw_digits(STEPS * 32, seed=1)
    images = torch.from_numpy(images)[:, None] / 255
    return list(islice(Batches(images, torch.from_numpy(labels).long(), 32, 0), STEPS))


@pytest.fixture
def run_script(tmp_path, monkeypatch, capsys):
    """Run the script on a few digits in an empty folder, and return what it prints."""
    root = draw_few_digits(tmp_path / "digits", 320)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        steps = ["--steps", str(STEPS), "--data-root", str(root)]
        run_here(FOLDER / "gradient_health.py", *arguments, *steps)
        return capsys.readouterr().out

    return run


@pytest.mark.tutorial
@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ("explode", "First: in step 0 fc2 explodes: its update is "),
        ("dead", "First: in step 0 conv2 dies: 8 of 16 units get no gradient any more."),
        ("vanish", "First: in step 0 fc1 vanishes: its gradient is "),
    ],
)
def test_the_verdict_names_the_layer(run_script, fault, verdict, tmp_path):
    printed = run_script(fault, "--folder", "out", "--output", "health.png")
    assert verdict in printed
    page = (tmp_path / "out" / "run.html").read_text(encoding="utf-8")
    assert f"Gradient health, fault: {fault}" in page and "Gradient___fc1.weight" in page
    for picture in ("health.png", "out/flow.png", "out/histogram.png"):
        with Image.open(tmp_path / picture) as image:
            assert image.width > 500 and len(image.convert("RGB").getcolors(10**6)) > 10


@pytest.mark.tutorial
def test_every_second_step(run_script, tmp_path):
    printed = run_script("--every", "2")
    assert f"step {STEPS - 2}, 4 tensors; norm: Gradient___fc2.weight" in printed
    assert f"step {STEPS - 1}, " not in printed
    assert (tmp_path / "health.png").is_file() and not (tmp_path / "out").exists()


def test_a_healthy_network_trains(parts, batches):
    measures = train(parts[0], batches, "none")
    assert measures.num_steps == STEPS


@pytest.mark.parametrize("fault", ["explode", "vanish"])
def test_a_spoilt_network_does_not(parts, batches, fault):
    with pytest.raises(AssertionError, match=BROKEN[fault]):
        train(parts[0], batches, fault)


def train(networks, batches, fault):
    torch.manual_seed(0)
    model = networks.make_network(fault)
    optimizer = torch.optim.SGD(model.parameters(), lr=networks.LEARNING_RATES[fault])
    return poptorch.testing.assert_trains(
        model, batches, steps=STEPS, optimizer=optimizer, loss_falls_by=None
    )


# The diagnosis


def record(name, step, values):
    requests = (poptorch.Moments(), poptorch.Sample(64))
    statistics = poptorch.statistics_of(torch.as_tensor(values), *requests)
    return poptorch.Record(name, step, 0, 0, statistics)


def step(number, gradients, biases=None):
    """Return the records of layers with a weight of norm 1, in the order of a backward pass."""
    for layer, norm in reversed(gradients.items()):
        yield record(f"Gradient___{layer}.weight", number, [norm, 0.0])
        yield record(f"Gradient___{layer}.bias", number, (biases or {}).get(layer, [1.0] * 4))
    for layer in gradients:
        yield record(f"{layer}.weight", number, [1.0, 0.0])


def test_layers_have_their_numbers_in_the_order_of_the_network(parts):
    records = [*step(0, {"a": 0.5, "b": 2.0}), *step(3, {"a": 0.25, "b": 1.0})]
    first, second = parts[1].layers_of(records, learning_rate=0.1)
    assert (first.name, second.name, first.steps) == ("a", "b", [0, 3])
    assert first.gradients == [0.5, 0.25] and first.ratios == pytest.approx([0.05, 0.025])
    (finding,) = parts[1].findings([first, second])
    assert (finding.step, finding.layer, finding.kind) == (0, "b", "explodes")


def test_units_are_dead_if_they_stay_without_a_gradient(parts):
    rows = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    records = [one for i, row in enumerate(rows) for one in step(i, {"a": 0.1}, {"a": row})]
    (layer,) = parts[1].layers_of(records, 0.1)
    assert layer.dead().tolist() == [0.5, 0.5, 0.75]
    (finding,) = parts[1].findings([layer])
    assert (finding.step, finding.kind) == (0, "dies") and "2 of 4 units" in finding.text


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_numbers_that_are_not_finite_explode(parts, norm):
    records = [*step(0, {"a": 0.1, "b": 0.1}), *step(1, {"a": norm, "b": 0.1})]
    (finding,) = parts[1].findings(parts[1].layers_of(records, 0.1))
    assert (finding.step, finding.layer, finding.kind) == (1, "a", "explodes")


def test_nothing_is_found_in_a_healthy_network(parts):
    layers = parts[1].layers_of([*step(0, {"a": 0.1, "b": 0.2})], 0.1)
    assert parts[1].report(layers).splitlines()[-1] == "Nothing explodes, vanishes or dies."
    figure = parts[1].draw(layers, "title")
    assert [len(axes.lines) for axes in figure.axes] == [3, 2]
