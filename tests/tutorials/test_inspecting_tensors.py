"""The programs that inspect tensors print shapes, tables and losses, and those are right."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import popsim_torch as poptorch
from tests.tutorials.running import (
    TUTORIALS,
    data_arguments,
    draw_few_digits,
    run_alone,
    run_here,
)

FOLDER = TUTORIALS / "inspecting_tensors"
NUM_EXAMPLES = 256
GA_2 = ("--gradient-accumulation-count", "2")
GA_4 = ("--gradient-accumulation-count", "4")
ACTIVATIONS = ["dense1", "dense3"]
GRADIENTS = [f"dense{i}.{kind}_grad" for i in (2, 1) for kind in ("bias", "weight")]
COLUMNS = ("Index", "Name", "Mean", "Std", "Minimum", "Maximum", "NaNs", "infs")


@pytest.fixture(scope="module")
def digits_root(tmp_path_factory) -> Path:
    return draw_few_digits(tmp_path_factory.mktemp("digits"), NUM_EXAMPLES)


@pytest.fixture
def run_script(digits_root, capsys):
    """Run a program in this process, and return what it prints."""

    def run(script: str, *arguments: str) -> str:
        run_here(FOLDER / script, "--data-root", str(digits_root), *arguments)
        return capsys.readouterr().out

    return run


def printed(text: str) -> list[str]:
    """Return the lines after that of the arguments."""
    first, *lines = text.splitlines()
    assert first.startswith("Namespace(") and "repeat_count=" in first
    return lines


def shapes(lines: list[str]) -> dict[str, str]:
    keys = [re.fullmatch(r"(Activation|Gradient) key: (\S+) shape: (\(.*\))", x) for x in lines]
    return {match[2]: match[3] for match in keys if match}


def header(names: list[str]) -> str:
    widths = [5, max(map(len, names)) + 5, 12, 12, 12, 12, 7, 7]
    return " ".join(f"{name:<{width}}" for name, width in zip(COLUMNS, widths, strict=True))


def assert_table(lines: list[str], names: list[str]) -> None:
    """Check a table from its title on, byte for byte but for the numbers."""
    assert lines[:2] == ["Step 0 - Summary Stats", header(names)]
    for index, name in enumerate(names):
        row = lines[2 + index]
        start = f"{index:<5} {name:<{max(map(len, names)) + 5}} "
        assert row.startswith(start)
        assert re.fullmatch(r"(-?\d+\.\d{6} +){4}False   False  ", row[len(start) :]), row
        assert len(row) == len(lines[1])


@pytest.mark.tutorial
def test_a_pipeline_and_one_ipu_print_the_same(run_script):
    pipelined = run_script("pipelined_model.py", *["--repeat-count", "2", "--epochs", "1.5"], *GA_4)
    single = run_script("model.py", *["--repeat-count", "8", "--epochs", "1.5"], *GA_4)
    lines = printed(pipelined)
    assert lines == printed(single)
    assert shapes(lines) == {
        "dense1": "(8, 32, 256)",
        "dense3": "(8, 32, 10)",
        "dense2.bias_grad": "(2, 128)",
        "dense2.weight_grad": "(2, 128, 256)",
        "dense1.bias_grad": "(2, 256)",
        "dense1.weight_grad": "(2, 256, 784)",
    }
    found = [re.match(r"Epoch (\d\.\d), Mean loss: \d\.\d{3}$", line) for line in lines]
    assert [match[1] for match in found if match] == ["0.0", "1.0"]


@pytest.mark.tutorial
def test_the_lines_of_a_step(run_script):
    lines = printed(run_script("model.py", *["--repeat-count", "4", "--run-single-step"], *GA_2))
    assert lines[:3] == [
        "Activation key: dense1 shape: (4, 32, 256)",
        "Activation key: dense3 shape: (4, 32, 10)",
        "",
    ]
    assert_table(lines[3:7], ACTIVATIONS)
    assert lines[7:13] == [
        "",
        "Gradient key: dense2.bias_grad shape: (2, 128)",
        "Gradient key: dense2.weight_grad shape: (2, 128, 256)",
        "Gradient key: dense1.bias_grad shape: (2, 256)",
        "Gradient key: dense1.weight_grad shape: (2, 256, 784)",
        "",
    ]
    assert_table(lines[13:19], GRADIENTS)
    assert lines[19:21] == ["Accumulated over 2 micro-batches: sum.", ""]
    assert re.fullmatch(r"Epoch 0\.0, Mean loss: 2\.\d{3}", lines[21])
    assert lines[22:] == [""]


@pytest.mark.tutorial
def test_gradients_of_each_micro_batch_and_a_report(digits_root, tmp_path):
    result = run_alone(
        FOLDER / "pipelined_model.py",
        tmp_path,
        *["--data-root", str(digits_root), "--repeat-count", "2", "--run-single-step"],
        *["--outfeed-pre-accumulated-gradients", *GA_4],
        POPLAR_ENGINE_OPTIONS='{"autoReport.all": "true"}',
    )
    assert result.returncode == 0, result.stderr
    lines = printed(result.stdout)
    assert {shape.split(",")[0] for shape in shapes(lines).values()} == {"(8"}
    assert shapes(lines)["dense1.weight_grad"] == "(8, 256, 784)"
    assert not any("Accumulated" in line for line in lines)
    report = poptorch.report.open(tmp_path)
    static = report.data["static"]
    assert report.name.startswith("popsim_report__")
    assert (static["num_ipus"], report.calls, static["device_iterations"]) == (2, 1, 2)
    # As the tutorial's report on real IPUs: the optimizer and the accumulation by name.
    assert list(report.by_purpose()) == ["gradient accumulation", "SGD"]


@pytest.mark.tutorial
def test_a_repeat_count_that_is_no_multiple(run_script):
    message = (
        r"--repeat-count \(10\) must be a multiple of --gradient-accumulation-count \(4\): use 8 "
        r"or 12\."
    )
    with pytest.raises(ValueError, match=message):
        run_script("model.py", "--repeat-count", "10", *GA_4)


@pytest.mark.tutorial
def test_a_dry_run_says_how_many_bytes_it_will_be(run_script):
    lines = printed(run_script("pipelined_model.py", "--dry-run"))
    assert lines[0] == "1600 micro-batches from table to table. Activations of each:"
    assert "1 of 2 keys are observed, 32768 bytes per step." in lines
    assert "1 of 1 keys are observed, 1280 bytes per step." in lines
    weights = 4 * (784 * 256 + 256 + 256 * 128 + 128)
    assert f"4 of 6 keys are observed, {weights} bytes per step." in lines


@pytest.mark.tutorial
def test_the_numbers_are_those_of_eager_pytorch(run_script, digits_root):
    lines = printed(run_script("model.py", *["--repeat-count", "8", "--run-single-step"], *GA_2))
    expected = eager_step(digits_root, num_batches=8, accumulation=2)
    rows = [line.split() for line in lines if line[:1].isdigit()]
    assert [row[1] for row in rows] == ACTIVATIONS + GRADIENTS
    for _, name, *statistics in rows:
        wide = expected[name].double()
        numbers = [wide.mean(), wide.std(correction=0), wide.min(), wide.max()]
        for got, number in zip(statistics[:4], numbers, strict=True):
            assert abs(float(got) - number.item()) < 2e-6 + 1e-5 * abs(number.item()), name
    assert f"Epoch 0.0, Mean loss: {expected['loss'].mean():.3f}" in lines


def eager_step(root: Path, num_batches: int, accumulation: int) -> dict[str, torch.Tensor]:
    """Train on the same batches; return all activations, sums of gradients, and losses."""
    from inspecting_tensors.inspection import BATCH_SIZE, LEARNING_RATE, Network

    from common.batches import Batches, load_mnist

    torch.manual_seed(0)
    images, labels = load_mnist(data_arguments(root))
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    kept: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        kept.setdefault(name, []).append(tensor.detach().clone())

    batches = iter(Batches(images.flatten(start_dim=1), labels, BATCH_SIZE))
    for number in range(1, num_batches + 1):
        x, digits = next(batches)
        hidden = torch.relu(network.dense1(x))
        logits = network.dense3(torch.relu(network.dense2(hidden)))
        loss = functional.cross_entropy(logits, digits.long())
        loss.backward()
        for name, tensor in (("dense1", hidden), ("dense3", logits), ("loss", loss)):
            keep(name, tensor)
        if number % accumulation == 0:
            for name, parameter in network.named_parameters():
                keep(f"{name}_grad", parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
    return {name: torch.stack(tensors) for name, tensors in kept.items()}
