"""The tutorial scripts run from start to end, and their shared parts work."""

import importlib
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

import popsim_torch as poptorch
from common import digits, torchvision_compat
from tests.forks import run_forked

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "tutorials" / "observing_tensors"
GRADIENTS = [f"Gradient___fc{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")]


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """A home folder without MNIST; its cache of drawn digits is made once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def run_script(home, tmp_path):
    """Run a tutorial in an empty folder; every warning is an error."""
    environment = os.environ | {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(ROOT),
        "MPLCONFIGDIR": matplotlib.get_cachedir(),  # the list of fonts is slow to make
    }

    def run(
        script: str | Path, *arguments: str, started: bool = False
    ) -> subprocess.CompletedProcess:
        command = [str(TUTORIALS / script), *arguments]
        if not started:
            return run_forked(command, cwd=tmp_path, env=environment, strict=True)
        return subprocess.run(
            [sys.executable, "-W", "error", *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )

    return run


def total_loss(stdout: str) -> tuple[float, int]:
    """Return the loss summed over batches, and the number of batches."""
    match = re.search(r"^Loss: (\d+\.\d+) over (\d+) batches$", stdout, re.MULTILINE)
    assert match, stdout
    return float(match[1]), int(match[2])


def assert_is_histogram(path: Path) -> None:
    """Check that a picture has a plausible size, a background and bars."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width >= 400 and image.height >= 300
        pixels = np.asarray(image.convert("RGB")).astype(int)
    is_white = (pixels == 255).all(axis=-1)
    is_coloured = pixels.max(axis=-1) - pixels.min(axis=-1) > 60
    assert 0.3 < is_white.mean() < 0.99
    assert 0.01 < is_coloured.mean() < 0.6


# --- Scripts --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.tutorial
def test_gradient_histogram_with_drawn_digits(run_script, tmp_path):
    result = run_script("gradient_histogram.py", started=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("drawn digits") == 1
    names = result.stdout.split()
    assert set(GRADIENTS) <= set(names)
    assert "UpdatedVar___fc1.weight" in names
    loss, num_batches = total_loss(result.stdout)
    assert num_batches == 8
    mean = re.search(r"^Mean loss of a batch: (\d\.\d{4})$", result.stdout, re.MULTILINE)
    assert float(mean[1]) == pytest.approx(loss / num_batches, abs=1e-4)
    assert len(result.stdout.splitlines()) < 50 and "\n  fc1\n    values     fc1." in result.stdout
    assert 1.5 * num_batches < loss < 2.5 * num_batches  # log(10) is 2.3
    assert "Saved histogram to GradientHistogram.png" in result.stdout
    assert_is_histogram(tmp_path / "GradientHistogram.png")


def test_the_histogram_counts_zeros_apart_and_all_batches(monkeypatch):
    monkeypatch.syspath_prepend(str(TUTORIALS))
    histogram = importlib.import_module("gradient_histogram").Histogram()
    for _ in range(2):
        histogram.add(torch.tensor([[0.0, -0.75, 0.75], [1e-30, 0.0, 1.5]]))
    assert (histogram.num_zeros, histogram.num_elements) == (4, 12)
    assert histogram.counts.sum() == 8  # 1e-30 is counted in the first bar
    assert histogram.counts[0] == 2 and histogram.counts.max() == 4
    assert histogram.percent(histogram.num_zeros) == pytest.approx(100 / 3)


def test_statistics_give_the_histogram_of_the_values(monkeypatch):
    monkeypatch.syspath_prepend(str(TUTORIALS))
    kind = importlib.import_module("gradient_histogram").Histogram
    values = torch.randn(5000).pow(9) * 2.0 ** torch.arange(-60.0, 20.0).repeat(63)[:5000]
    values[::7], values[3] = 0, 1e-42
    ones, others = kind(), kind()
    ones.add(values)
    others.add_statistics(poptorch.statistics_of(values, poptorch.Histogram(), poptorch.Counts()))
    assert torch.equal(ones.counts, others.counts)
    assert (ones.num_zeros, ones.num_elements) == (others.num_zeros, others.num_elements)
    assert ones.num_zeros == int((values == 0).sum()) and ones.counts.sum() == (values != 0).sum()


@pytest.mark.slow
@pytest.mark.tutorial
def test_gradient_histogram_with_statistics_is_the_same_picture(run_script, tmp_path):
    arguments = ("--batch-size", "2000", "--output")
    anchored = run_script("gradient_histogram.py", *arguments, "anchored.png")
    observed = run_script("gradient_histogram.py", *arguments, "observed.png", "--observe")
    assert observed.returncode == 0, observed.stderr
    assert total_loss(observed.stdout) == total_loss(anchored.stdout)
    assert_is_histogram(tmp_path / "observed.png")
    names = ("anchored.png", "observed.png")
    one, other = (np.asarray(Image.open(tmp_path / name)) for name in names)
    assert np.array_equal(one, other)


@pytest.mark.slow
@pytest.mark.tutorial
def test_gradient_histogram_is_repeatable_and_learns(run_script, tmp_path):
    arguments = ("--batch-size", "100", "--learning-rate", "0.1", "--output", "picture.png")
    first = run_script("gradient_histogram.py", *arguments)
    second = run_script("gradient_histogram.py", *arguments)
    assert first.returncode == 0, first.stderr
    loss, num_batches = total_loss(first.stdout)
    assert num_batches == 80
    assert loss < 1.8 * num_batches  # 2.3 without learning
    assert total_loss(second.stdout) == (loss, num_batches)
    assert_is_histogram(tmp_path / "picture.png")


@pytest.mark.tutorial
def test_gradient_histogram_with_real_digits(run_script, tmp_path, mnist_root):
    result = run_script("gradient_histogram.py", "--data-root", str(mnist_root))
    assert result.returncode == 0, result.stderr
    assert "drawn digits" not in result.stdout
    loss, num_batches = total_loss(result.stdout)
    assert 1.5 * num_batches < loss < 2.5 * num_batches
    assert_is_histogram(tmp_path / "GradientHistogram.png")


@pytest.mark.tutorial
def test_gradient_histogram_with_a_wrong_folder(run_script, tmp_path):
    result = run_script("gradient_histogram.py", "--data-root", "nowhere")
    assert result.returncode == 1
    assert result.stderr.startswith("No MNIST in nowhere: expected nowhere/MNIST/raw")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.tutorial
def test_print_tensor(run_script):
    result = run_script("print_tensor.py", "--steps", "2")
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d: loss (.*)$", result.stdout, re.M)]
    assert len(losses) == 2 and losses[1] < losses[0]
    # Titles, in every step; the input has no gradient, so none is printed.
    for title in ("input", "hidden", "hidden_gradient", "prediction", "squares"):
        assert len(re.findall(rf"^{title}: ", result.stderr, re.M)) == 2, title
    assert "prediction_gradient" not in result.stderr
    number = r"-?\d\.\d{7}e[+-]\d\d"
    assert re.search(
        rf"^prediction: \[\n +\[ *{number}\]\n +\[ *{number}\]\n\]$", result.stderr, re.M
    )
    assert "..." in result.stderr


@pytest.mark.tutorial
def test_direct_anchoring(run_script):
    result = run_script("direct_anchoring.py")
    assert result.returncode == 0, result.stderr
    for name in ("fc2.weight", "Gradient___fc2.bias", "UpdatedVar___fc2.weight"):
        assert f"  {name}\n" in result.stdout
    shapes = dict(re.findall(r"^  (\w+) +shape (\(.*\))$", result.stdout, re.M))
    # 4 device iterations of 2 micro-batches; a bias of 4 classes, 8 hidden units.
    assert shapes == {
        "all": "(32,)",
        "sum": "(4,)",
        "final": "(4,)",
        "every_n": "(16,)",
        "weight": "(4, 8)",
    }
    assert "agree with the other copies" in result.stdout


@pytest.mark.tutorial
def test_direct_anchoring_without_repetition(run_script):
    result = run_script(
        "direct_anchoring.py",
        *("--device-iterations", "1", "--gradient-accumulation", "1", "--period", "1"),
    )
    assert result.returncode == 0, result.stderr
    shapes = dict(re.findall(r"^  (\w+) +shape (\(.*\))$", result.stdout, re.M))
    assert {shapes[name] for name in ("all", "sum", "final", "every_n")} == {"(4,)"}


@pytest.mark.tutorial
def test_readme_example(run_script, tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    result = run_script(script, started=True)
    assert result.returncode == 0, result.stderr
    assert "'Gradient___weight'" in result.stdout
    assert result.stdout.endswith("torch.Size([8, 10])\n")
    assert len(re.findall(r"^logits: ", result.stderr, re.M)) == 2
    assert len(re.findall(r"^logits_gradient: ", result.stderr, re.M)) == 2


# --- Drawn digits -----------------------------------------------------------------


def test_digits_are_the_same_for_the_same_seed():
    images, labels = digits.draw_digits(50, seed=1)
    again, _ = digits.draw_digits(50, seed=1)
    other, _ = digits.draw_digits(50, seed=2)
    assert images.shape == (50, 28, 28) and labels.shape == (50,)
    assert images.dtype == labels.dtype == np.uint8
    assert np.array_equal(images, again)
    assert not np.array_equal(images, other)


def test_digits_have_ink_inside_and_all_classes_in_equal_shares():
    images, labels = digits.draw_digits(1000, seed=3)
    assert np.bincount(labels).tolist() == [100] * 10
    assert images.max(axis=(1, 2)).min() > 200  # thin lines fall between pixels
    ink = images.mean(axis=(1, 2)) / 255
    assert ink.min() > 0.02 and ink.max() < 0.4
    edge = np.concatenate([images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]])
    assert edge.mean() < 3  # almost nothing is cut off


def test_digits_of_a_class_resemble_each_other():
    images, labels = digits.draw_digits(2000, seed=4)
    flat = images.reshape(len(images), -1) / 255
    means = np.stack([flat[:1000][labels[:1000] == digit].mean(axis=0) for digit in range(10)])
    distance = ((flat[1000:, None] - means) ** 2).sum(-1)
    assert (distance.argmin(axis=1) == labels[1000:]).mean() > 0.8


def test_drawn_digits_are_written_once_and_read_by_torchvision(tmp_path):
    root = digits.drawn_mnist_root(tmp_path)
    assert list(tmp_path.iterdir()) == [root]  # nothing unfinished is left
    images_file = root / "MNIST" / "raw" / "train-images-idx3-ubyte"
    header = struct.unpack(">4I", images_file.read_bytes()[:16])
    assert header == (0x803, digits.NUM_TRAIN, 28, 28)
    written_ns = images_file.stat().st_mtime_ns
    assert digits.drawn_mnist_root(tmp_path) == root
    assert images_file.stat().st_mtime_ns == written_ns

    mnist = torchvision_compat.import_torchvision().datasets.MNIST
    assert len(mnist(root)) == digits.NUM_TRAIN
    test_split = mnist(root, train=False)
    assert len(test_split) == digits.NUM_TEST
    images, labels = digits.draw_digits(digits.NUM_TEST, digits._SEED + 1)
    assert np.array_equal(test_split.data.numpy(), images)
    assert np.array_equal(test_split.targets.numpy(), labels)


def test_a_failed_drawing_leaves_nothing(tmp_path, monkeypatch):
    def fail(root):
        (root / "half").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(digits, "write_mnist", fail)
    with pytest.raises(OSError, match="disk full"):
        digits.drawn_mnist_root(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- torchvision -------------------------------------------------------------------


@pytest.fixture
def no_torchvision(monkeypatch):
    """Forget torchvision for the length of a test."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torchvision_compat, "_libraries", [])


def test_torchvision_imports():
    torchvision = torchvision_compat.import_torchvision()
    assert torchvision_compat.import_torchvision() is torchvision
    assert torchvision.transforms.ToTensor()(Image.new("L", (28, 28))).shape == (1, 28, 28)


def test_a_working_torchvision_is_left_alone(no_torchvision, monkeypatch):
    working = ModuleType("torchvision")
    monkeypatch.setitem(sys.modules, "torchvision", working)
    assert torchvision_compat.import_torchvision() is working
    assert torchvision_compat._libraries == []


def test_other_failures_of_torchvision_are_shown(no_torchvision, monkeypatch, tmp_path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('something else')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="something else"):
        torchvision_compat.import_torchvision()
    assert torchvision_compat._libraries == []
