"""The programs about training loops run from start to end, and print what they promise."""

import re

import pytest
import torch

from tests.tutorials.running import TUTORIALS, run_alone, run_here

pytestmark = pytest.mark.tutorial

FOLDER = TUTORIALS / "training_loops"


@pytest.fixture
def run_script(capsys):
    """Run a program in this process, and return what it prints."""

    def run(script: str, *arguments: str) -> str:
        run_here(FOLDER / script, *arguments)
        return capsys.readouterr().out

    return run


def test_constants(run_script):
    assert run_script("trivial_dataset.py").splitlines() == [
        "counter: 10",
        "d1: shape (10, 800), all [2.0]",
        "d2: shape (10, 800), all [0.0]",
        "sum of all that came in: 16000.0",
    ]


def test_the_loss_is_read_while_the_loop_runs(tmp_path):
    result = run_alone(FOLDER / "read_while_running.py", tmp_path)
    assert result.returncode == 0, result.stderr
    found = [re.fullmatch(r"Step (\d+) loss =  (\d\S*)", x) for x in result.stdout.splitlines()]
    assert [int(match[1]) for match in found] == list(range(100))
    losses = [float(match[2]) for match in found]
    assert losses == pytest.approx(losses_of_eager_pytorch(100), rel=1e-4, abs=1e-6)
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])


def losses_of_eager_pytorch(steps: int) -> list[float]:
    from training_loops.task import Batches, make_model

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _, (x, y) in zip(range(steps), Batches(), strict=False):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def errors_of_gradients(text: str) -> dict[tuple[str, str, str], str]:
    rows = re.findall(r"^(\w+(?: mean)?) +(float\d\d) +(float\d\d) +(\S+)$", text, re.M)
    return {(reduction, weights, sums): result for reduction, weights, sums, result in rows}


def test_gradients_add_up_in_each_way_and_type(run_script):
    few = errors_of_gradients(run_script("gradient_accumulation.py", "--batches", "8"))
    text = run_script("gradient_accumulation.py", "--batches", "128")
    many = errors_of_gradients(text)
    assert len(many) == 12 and few.keys() == many.keys()
    for (reduction, weights, sums), result in many.items():
        refused = reduction == "mean" and sums == "float16"
        assert (result == "refused") == refused
        if refused:
            continue
        # Sums with few digits are worse the more there is to add; others are not.
        if sums == "float16":
            assert 2 * float(few[reduction, weights, sums]) < float(result) < 1e-2
        else:
            assert float(result) < (1e-6 if weights == "float32" else 1e-4)
    assert text.count("need the mean reduction strategy Running") == 1


def test_networks_take_turns(run_script):
    text = run_script("taking_turns.py", "--iterations", "200")
    assert re.search(
        r"^iteration 150: loss of the discriminator 1\.\d+, of the generator 0\.\d+$", text, re.M
    )
    (difference,) = re.findall(r"PyTorch in the first 20 iterations: (\S+)$", text, re.M)
    assert float(difference) < 1e-5


def test_recomputation_takes_less_memory_and_changes_no_bit(run_script):
    text = run_script("recomputation.py", "--steps", "4", "--batch-size", "128")
    kept, rebuilt = map(float, re.findall(r"(\S+) MiB live at a time", text))
    assert rebuilt < 0.7 * kept
    assert "the same bits in every step: True" in text


def test_a_dataset_is_measured(run_script):
    text = run_script("benchmark_a_dataset.py", "--pictures", "32", "--epochs", "2")
    assert text.count("Completed epoch 2/2") == 2
    assert len(re.findall(r"^Input bound: (?:yes|no)\. An element takes ", text, re.M)) == 2
    rates = re.findall(r"^At most (\d+) pictures a second, \d+\.\d+ GB/s$", text, re.M)
    assert len(rates) == 2 and all(int(rate) > 0 for rate in rates)


def test_a_step_that_takes_longer_than_any_data_is_not_bound_by_it(run_script):
    arguments = ("--pictures", "32", "--epochs", "1", "--milliseconds-per-step", "1e6")
    text = run_script("benchmark_a_dataset.py", *arguments)
    assert text.count("Input bound: no.") == 2


def test_pictures_that_fill_no_batch(run_script, capsys):
    with pytest.raises(SystemExit):
        run_script("benchmark_a_dataset.py", "--pictures", "30")
    assert "--pictures must be a multiple of --batch-size." in capsys.readouterr().err
