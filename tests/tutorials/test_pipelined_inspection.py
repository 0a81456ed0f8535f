"""The tutorial of pipelining and inspection: four models, and what its callbacks print."""

import re
from pathlib import Path

import pytest
import torch

import popsim_torch as poptorch
from common.batches import Batches, load_mnist
from tests.tutorials.running import (
    TUTORIALS,
    data_arguments,
    draw_few_digits,
    run_alone,
    run_here,
)

SCRIPT = TUTORIALS / "pipelined_inspection" / "mnist.py"
FEW_STEPS = ("--steps-per-epoch", "8", "--epochs", "2")
GRADIENTS, MULTIPLE, SINGLE = (
    f"{name} callback"
    for name in ("Gradients", "Multi-layer activations", "Single layer activations")
)
ACCUMULATED = "Accumulated over 4 micro-batches: sum."


@pytest.fixture(scope="module")
def digits_root(tmp_path_factory) -> Path:
    return draw_few_digits(tmp_path_factory.mktemp("digits"), 128)


@pytest.fixture
def run_script(digits_root, capsys):
    """Run the program for a few steps in this process, and return what it prints."""

    def run(*arguments: str) -> str:
        run_here(SCRIPT, "--data-root", str(digits_root), *FEW_STEPS, *arguments)
        return capsys.readouterr().out

    return run


def callbacks(printed: str, epoch: int) -> dict[str, list[str]]:
    """Return the lines of each callback in an epoch, counted from 1."""
    text = re.split(r"^(Epoch \d/\d - loss: \d\.\d{4})\n", printed, flags=re.M)
    assert text[0] == "" and [line[:9] for line in text[1::2]] == ["Epoch 1/2", "Epoch 2/2"]
    blocks = text[2 * epoch].split("\n\n")
    lines = [block.strip("\n").splitlines() for block in blocks]
    return {name: rest for name, *rest in lines}


def keys(lines: list[str]) -> dict[str, str]:
    found = [re.fullmatch(r"key: (\S+) shape: (\(.*\))", line) for line in lines]
    return {match[1]: match[2] for match in found if match}


def rows(lines: list[str]) -> dict[str, list[str]]:
    """Return the statistics of each row of a table, as they are printed."""
    cells = [line.split() for line in lines if re.match(r"\d", line)]
    return {name: numbers for _, name, *numbers in cells}


def assert_is_softmax(row: list[str]) -> None:
    """Check statistics of probabilities of ten classes."""
    mean, _, minimum, maximum, *flags = row
    assert mean == "0.100000" and float(minimum) >= 0 and float(maximum) <= 1
    assert flags == ["False", "False"]


@pytest.mark.tutorial
def test_both_pipelined_models_print_the_same(run_script, digits_root, tmp_path):
    result = run_alone(SCRIPT, tmp_path, "--data-root", str(digits_root), *FEW_STEPS)
    assert result.returncode == 0, result.stderr
    assert run_script("--model-type", "Model") == result.stdout
    for epoch in (1, 2):
        found = callbacks(result.stdout, epoch)
        assert list(found) == [GRADIENTS, MULTIPLE]
        gradients = found[GRADIENTS]
        assert keys(gradients) == {
            "Dense_128.bias_grad": "(2, 128)",
            "Dense_128.weight_grad": "(2, 128, 256)",
        }
        assert gradients[2] == f"Epoch {epoch} - Summary Stats"
        assert gradients[3].split()[:3] == ["Index", "Name", "Mean"]
        assert gradients[-1] == ACCUMULATED
        activations = found[MULTIPLE]
        assert keys(activations) == {
            "Dense_128_acts": "(8, 32, 128)",
            "Dense_10_acts": "(8, 32, 10)",
        }
        assert_is_softmax(rows(activations)["Dense_10_acts"])


@pytest.mark.tutorial
def test_a_sequential_model_on_one_ipu_has_two_taps(run_script):
    result = run_script("--no-pipelining", "--gradients-filters", "none")
    found = callbacks(result, 1)
    assert list(found) == [GRADIENTS, MULTIPLE]
    assert keys(found[GRADIENTS]) == {
        "Dense_10.bias_grad": "(8, 10)",
        "Dense_10.weight_grad": "(8, 10, 128)",
        "Dense_128.bias_grad": "(8, 128)",
        "Dense_128.weight_grad": "(8, 128, 784)",
    }
    assert ACCUMULATED not in found[GRADIENTS]
    assert list(keys(found[MULTIPLE])) == ["Dense_128_acts", "Dense_10_acts"]


@pytest.mark.tutorial
def test_a_model_on_one_ipu_has_one_plain_tap(run_script):
    result = run_script("--no-pipelining", "--model-type", "Model", "--use-gradient-accumulation")
    found = callbacks(result, 2)
    assert list(found) == [GRADIENTS, SINGLE]
    assert keys(found[GRADIENTS])["Dense_128.weight_grad"] == "(2, 128, 784)"
    assert keys(found[SINGLE]) == {"Dense_128_acts": "(8, 32, 128)"}
    assert float(rows(found[SINGLE])["Dense_128_acts"][2]) == 0  # after a ReLU


@pytest.mark.tutorial
def test_filters_and_gradients_before_accumulation(run_script):
    result = run_script(
        *("--gradients-filters", "Dense_10.b", "256.bias"),
        *("--activations-filters", "Dense_10"),
        "--outfeed-pre-accumulated-gradients",
    )
    found = callbacks(result, 1)
    assert keys(found[GRADIENTS]) == {
        "Dense_10.bias_grad": "(8, 10)",
        "Dense_256.bias_grad": "(8, 256)",
    }
    assert keys(found[MULTIPLE]) == {"Dense_10_acts": "(8, 32, 10)"}


@pytest.mark.tutorial
def test_filters_that_match_nothing(run_script):
    found = callbacks(run_script("--activations-filters", "conv"), 1)
    assert found[MULTIPLE][0] == "No data enqueued"
    assert "Dense_128_acts" in found[MULTIPLE][1]


@pytest.mark.tutorial
def test_a_plain_tap_has_no_filters(run_script, capsys):
    with pytest.raises(SystemExit):
        run_script("--no-pipelining", "--model-type", "Model", "--activations-filters", "Dense")
    assert "a Model without pipelining has a single, plain tap" in capsys.readouterr().err


@pytest.mark.tutorial
def test_the_losses_are_those_of_eager_pytorch(run_script, digits_root):
    from pipelined_inspection import mnist

    text = run_script("--no-pipelining", "--model-type", "Model", "--use-gradient-accumulation")
    printed = [float(loss) for loss in re.findall(r"^Epoch .* loss: (.*)$", text, re.M)]

    torch.manual_seed(0)
    model = mnist.Model(poptorch.OutfeedQueue())
    optimizer = torch.optim.SGD(model.parameters(), lr=mnist.LEARNING_RATE)
    images, labels = load_mnist(data_arguments(digits_root))
    batches = iter(Batches(images.unsqueeze(1), labels.long(), mnist.BATCH_SIZE))
    losses = []
    for number in range(1, 17):
        inputs, digits = next(batches)
        loss = mnist.loss_of(model(inputs), digits)
        loss.backward()
        losses.append(loss.item())
        if number % mnist.ACCUMULATION == 0:
            optimizer.step()
            optimizer.zero_grad()
    expected = [sum(losses[:8]) / 8, sum(losses[8:]) / 8]
    assert printed == pytest.approx(expected, abs=1.01e-4)
