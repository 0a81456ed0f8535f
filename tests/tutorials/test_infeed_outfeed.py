"""The programs with and without queues train alike, print their times, and plot them."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.tutorials.running import (
    TUTORIALS,
    data_arguments,
    draw_few_digits,
    run_alone,
    run_here,
)

pytestmark = pytest.mark.tutorial

FOLDER = TUTORIALS / "infeed_outfeed"
SMALL = ("--steps", "60", "--batch-size", "16")
WITH = r"Time taken using infeed/outfeed queues: \d+\.\d+(e-\d+)? seconds"
WITHOUT = r"Time taken without infeed/outfeed queues: \d+\.\d+(e-\d+)? seconds"


@pytest.fixture(scope="module")
def digits_root(tmp_path_factory) -> Path:
    return draw_few_digits(tmp_path_factory.mktemp("digits"), 320)


@pytest.fixture
def run_script(digits_root, capsys):
    """Run a program in this process, and return the lines that it prints."""

    def run(script: str, *arguments: str) -> list[str]:
        run_here(FOLDER / script, "--data-root", str(digits_root), *arguments)
        return capsys.readouterr().out.splitlines()

    return run


def losses_of_eager_pytorch(root: Path, steps: int, batch_size: int) -> torch.Tensor:
    from infeed_outfeed.network import loss_of, make_network

    from common.batches import Batches, load_mnist

    images, labels = load_mnist(data_arguments(root))
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    batches = iter(Batches(images, labels.long(), batch_size))
    losses = []
    for _ in range(steps):
        inputs, digits = next(batches)
        loss = loss_of(network(inputs), digits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_the_programs_train_alike_and_print_their_times(run_script, digits_root, tmp_path):
    result = run_alone(
        FOLDER / "mnist_with_feeds.py", tmp_path, "--data-root", str(digits_root), *SMALL
    )
    assert result.returncode == 0, result.stderr
    first, line = result.stdout.splitlines()
    other, other_line = run_script("mnist_without_feeds.py", *SMALL)
    assert re.fullmatch(WITH, first) and re.fullmatch(WITHOUT, other)
    assert line == other_line
    found = re.fullmatch(r"Mean loss of 60 batches: (\S+) at first, (\S+) at last", line)
    expected = losses_of_eager_pytorch(digits_root, 60, 16)
    means = [expected[:6].mean().item(), expected[-6:].mean().item()]
    assert [float(number) for number in found.groups()] == pytest.approx(means, abs=1.01e-4)
    assert means[1] < means[0]


@pytest.mark.parametrize("steps_per_execution", ["1", "60"])
def test_steps_per_execution_change_no_loss(run_script, steps_per_execution):
    one = run_script("mnist_with_feeds.py", *SMALL)
    other = run_script("mnist_with_feeds.py", *SMALL, "--steps-per-execution", steps_per_execution)
    assert one[1:] == other[1:]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("25", r"--steps \(25\) must be a multiple of --steps-per-execution \(10\): use 20 or 30"),
        ("7", r"--steps \(7\) must be a multiple of --steps-per-execution \(10\): use 10\."),
    ],
)
def test_steps_that_do_not_fit(run_script, capsys, steps, message):
    with pytest.raises(SystemExit):
        run_script("mnist_with_feeds.py", "--steps", steps)
    assert re.search(message, capsys.readouterr().err)


def test_the_plot(run_script, tmp_path):
    picture = tmp_path / "plot.png"
    lines = run_script("plot_times.py", "--steps", "20", "--output", str(picture))
    rows = [re.fullmatch(r"(.{25}) +(\d+\.\d) microseconds a step", line) for line in lines]
    names = [row[1].strip() for row in rows if row]
    assert names == [
        *(f"{count} steps per execution" for count in (1, 2, 5, 10, 20)),
        "without queues",
        "eager PyTorch",
    ]
    times = [float(row[2]) for row in rows if row]
    best = min(times[:5])
    assert re.fullmatch(r"(1|2|5|10|20) steps per execution are within 5 % of the best\.", lines[7])
    for line, name, time in zip(
        lines[8:10], ("Without queues", "Eager PyTorch"), times[5:], strict=True
    ):
        ratio = float(re.fullmatch(f"{name} / with queues: (.*)", line)[1])
        assert ratio == pytest.approx(time / best, rel=0.02, abs=0.01)
    assert lines[-1] == f"Saved plot to {picture}"
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert pixels.shape[0] >= 300 and pixels.shape[1] >= 400
    is_coloured = pixels.max(axis=-1) - pixels.min(axis=-1) > 60
    assert 0.001 < is_coloured.mean() < 0.2
