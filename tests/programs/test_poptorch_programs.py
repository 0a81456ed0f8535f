"""Whole programs written against ``import poptorch`` run as they stand, by the runner."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.custom_ops import library
from tests.forks import run_forked

HERE = Path(__file__).parent


def run(program, *arguments, cwd, started=False):
    """Return what a program writes to stdout and to stderr; a process may be started for it."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("POPTORCH_", "POPART_"))
    }
    root = str(HERE.parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (environment.get("PYTHONPATH", ""), root) if part
    )
    command = ["-m", "popsim_torch", "run", str(HERE / program), *map(str, arguments)]
    if started:
        result = subprocess.run(
            [sys.executable, *command],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
    else:
        result = run_forked(command, cwd=cwd, env=environment, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout, result.stderr


def test_digits_with_checkpoints_and_a_scheduler(tmp_path):
    arguments = ("--checkpoint", tmp_path / "c.pt")
    out, _ = run("mnist_checkpoints.py", *arguments, cwd=tmp_path, started=True)
    losses = [float(value) for value in re.findall(r"epoch \d loss (\S+)", out)]
    assert len(losses) == 3 and losses[-1] < 0.5 * losses[0]
    assert float(re.search(r"accuracy (\S+)", out)[1]) > 80
    assert float(re.search(r"resumed loss (\S+)", out)[1]) < losses[0]


def test_phases(tmp_path):
    out, _ = run("phased_model.py", cwd=tmp_path)
    assert "improved True" in out


def test_pipelines(tmp_path):
    out, _ = run("pipelines.py", cwd=tmp_path)
    lines = out.splitlines()
    found = [line.split(" first ") for line in lines[:3]]
    names = ("Grouped", "Interleaved", "Sequential")
    assert [line[0] for line in found] == [f"{name} same True" for name in names]
    assert len({line[1] for line in found}) == 1 and found[0][1].endswith("improved True")
    assert [line.split() for line in lines[6:8]] == [["0", "(Linear)", "0"], ["1", "(ReLU)", "0"]]


def test_concurrent_stages(tmp_path):
    out, _ = run("concurrent_stages.py", cwd=tmp_path)
    lines = out.splitlines()
    names = ("Grouped", "Interleaved", "Sequential", "Default")
    assert lines[:4] == [f"{name} same True" for name in names]
    told = dict(line.split(": ", 1) for line in lines[4:])
    assert "device_mapping has 5 entries for 4 stages and lists of stages" in told["flat"]
    assert "stage 2 gets 2 value(s) from stage 0, and it takes" in told["arguments"]
    assert "stage 3 gets 4 value(s) from the stages 1 and 2, and it takes" in told["results"]
    assert "a positive multiple of 8, the micro-batches in flight, and is 10" in told["count"]
    assert "the stages 2 and 3 are both on IPU 2" in told["interleaved"]
    assert "device_mapping has [1, [2]] for the stages 1 and 2. Pass an int" in told["nested"]


def test_compiled_in_one_process_and_run_in_another(tmp_path):
    out, _ = run("precompile.py", "export", tmp_path, cwd=tmp_path)
    assert "attached False" in out
    out, _ = run("precompile.py", "run", tmp_path, cwd=tmp_path, started=True)
    lines = dict(line.split(" ", 1) for line in out.splitlines())
    assert lines["loaded"] == lines["direct"] == lines["executable"]
    assert lines["inference"] == "ok"


def test_half_precision(tmp_path):
    out, _ = run("half_precision.py", cwd=tmp_path)
    for kind in ("plain", "stochastic", "automatic"):
        first, last = map(float, re.search(rf"{kind} (\S+) (\S+)", out).groups())
        assert last < first
    assert "stopped: " in out


@pytest.mark.timeout(300)
def test_data_loading(tmp_path):
    out, _ = run("data_loading_benchmark.py", cwd=tmp_path, started=True)
    counts = re.findall(r"(\w+): (\d+) samples", out)
    assert counts == [(kind, "800") for kind in ("Sync", "Async", "AsyncRebatched", "synthetic")]


def test_debugging(tmp_path):
    out, err = run("debugging.py", cwd=tmp_path)
    lines = dict(line.split(" ", 1) for line in out.splitlines())
    assert lines == {
        "names": "Gradient___classifier.bias Gradient___classifier.weight",
        "old": "name (2,)",
        "latency": "3 True",
        "counters": "['input', 'input_complete', 'output', 'output_complete']",
        "backward": "True",
        "mismatch": "True",
        "cycles": "True",
    }
    assert "hidden: (" in err and "hidden_gradient: (" in err


def test_point_clouds(tmp_path):
    out, _ = run("point_clouds.py", cwd=tmp_path)
    lines = dict(line.split(" ", 1) for line in out.splitlines())
    assert lines["sampled"] == "[0, 7, 8, 15]"
    assert lines["groups"] == "[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]"
    assert lines["random"] == "True True"
    first, last = map(float, lines["loss"].split())
    assert last < 0.5 * first


def test_speech_decoding(tmp_path):
    out, _ = run("speech_decoding.py", cwd=tmp_path)
    lines = dict(line.split(" ", 1) for line in out.splitlines())
    assert lines["shapes"] == "[(4, 2), (4, 2), (4, 2, 12)]"
    first, last = map(float, lines["loss"].split())
    assert last < 0.2 * first
    assert lines["decoded"] == lines["spoken"]
    assert lines["sorted"] == "True"


def test_host_calls(tmp_path):
    out, _ = run("host_calls.py", cwd=tmp_path)
    lines = dict(line.split(" ", 1) for line in out.splitlines())
    assert lines == {
        "frozen": "True",
        "calls": "5 torch.bool",
        "same": "True torch.int32",
        "raised": "not today",
        "refused": "True",
    }


def test_custom_operators(tmp_path):
    out, _ = run("custom_op.py", library.loaded(), cwd=tmp_path)
    lines = dict(line.split(" ", 1) for line in out.splitlines())
    assert lines == {
        "inference": "True",
        "training": "True",
        "gather": "True",
        "leaky": "[-0.019999999552965164, 1.0]",
        "outside": "True",
        "error": "True",
    }


def test_annotations(tmp_path):
    out, _ = run("annotations.py", cwd=tmp_path)
    assert out.splitlines() == [
        "serializedMatMul True True",
        "MultiConv True",
        "dynamic slices True",
        "overlap True True",
        "recomputation True True 0",
    ]


def test_model_state(tmp_path):
    out, err = run("model_state.py", cwd=tmp_path)
    assert out.splitlines() == ["counted 24", "went on True 32", "frozen True", "evaluated True"]
    assert "nothing is trained" in err


def test_loops_and_branches(tmp_path):
    out, _ = run("loops_and_branches.py", cwd=tmp_path)
    lines = dict(line.split(" ", 1) for line in out.splitlines())
    first, last = map(float, lines["losses"].split())
    assert last < 0.5 * first
    assert lines["iterations"] == "400"
    assert lines["shapes"] == "(2, 4) (2, 4)"
    assert lines["largest"] == "True"


def test_queues(tmp_path):
    out, _ = run("queues.py", cwd=tmp_path)
    assert out.splitlines()[:4] == [
        "counter 10 last 9",
        "d1 [10, 800] [2.0]",
        "d2 [10, 800] [0.0]",
        "followed 10 [800]",
    ]
    assert re.search(r"Elements per second: \S+, bandwidth: \S+ GB/s\nCompleted epoch 1/1", out)


def test_fitting(tmp_path):
    out, _ = run("fitting.py", cwd=tmp_path)
    epochs = re.findall(r"^Epoch (\d)/5, Mean loss: \d\.\d{3}, accuracy: (\d\.\d{3}), ", out, re.M)
    assert [number for number, _ in epochs] == ["1", "2", "3", "4", "5"]
    assert float(epochs[-1][1]) > 0.8
    assert re.findall(r"^key: (\S+) shape: (.+)$", out, re.M) == 5 * [
        ("2.weight_grad", "(8, 2, 16)"),
        ("0.weight_grad", "(8, 16, 2)"),
    ]
    assert out.splitlines()[-7:] == [
        "epochs 5 improved True",
        "steps True",
        "told the same True",
        "predicted (512, 2) True",
        "accuracy agrees True",
        "loss agrees True",
        "refused: fit: steps_per_execution = 6 is not a multiple of the gradient accumulation of 4 "
        "(options.Training.gradientAccumulation). The nearest multiples are 4 and 8.",
    ]


def test_observing_accumulated_gradients_and_activations(tmp_path):
    out, _ = run("observing.py", "--steps-per-epoch", 500, "--epochs", 2, cwd=tmp_path)
    shapes = dict(re.findall(r"^key: (\S+) shape: (.+)$", out, re.MULTILINE))
    assert shapes == {
        "Dense_128.bias_grad": "(125, 128)",
        "Dense_128.weight_grad": "(125, 128, 256)",
        "Dense_128_acts": "(500, 32, 128)",
        "Probs": "(500, 32, 10)",
    }
    # The probabilities of ten classes: mean, deviation, minimum and maximum.
    mean, _, low, high, nans, infs = re.findall(r"^1 +Probs +(.+)$", out, re.MULTILINE)[-1].split()
    assert mean == "0.100000" and 0 <= float(low) < 0.1 < float(high) <= 1
    assert (nans, infs) == ("False", "False")
    lines = out.splitlines()
    first = lines.index("Gradients callback")
    assert lines[first + 3] == "Epoch 1 - Summary Stats"
    assert lines[first + 4].startswith("Index Name                       Mean         Std  ")
    assert lines[first + 7] == "Accumulated over 4 micro-batches: mean."
    assert lines.count("Epoch 2 - Summary Stats") == 2
    assert lines[lines.index("Single layer activations callback") + 1] == "No data enqueued"
    assert "2 of 6 keys are observed, 131584 bytes per step." in lines


def test_observing_gradients_before_accumulation(tmp_path):
    filters = ("--gradients-filters", "none", "--activations-filters", "nothing")
    arguments = ("--steps-per-epoch", 40, "--epochs", 1, "--outfeed-pre-accumulated-gradients")
    out, log = run("observing.py", *arguments, *filters, cwd=tmp_path)
    shapes = dict(re.findall(r"^key: (\S+) shape: (.+)$", out, re.MULTILINE))
    assert [*shapes] == [
        f"Dense_{n}.{kind}_grad" for n in (10, 128, 256) for kind in ("bias", "weight")
    ]
    assert shapes["Dense_256.weight_grad"] == "(40, 256, 784)"
    assert "the filter 'nothing' matches none of the 2 keys" in log
    assert "let none of these keys through: 'Dense_128_acts', 'Probs'." in out
