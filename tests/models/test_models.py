"""Whole models train as in eager PyTorch: the models of ``benchmarks/zoo``."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.zoo.catalogue import ENTRIES
from benchmarks.zoo.trial import try_out

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
QUICK = ("squeezenet1_1", "graph convolution", "graph attention", "experts with fixed room")


def marked(entry):
    missing = [package for package in entry.needs if find_spec(package) is None]
    marks = [pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")]
    if entry.name not in QUICK:
        marks += [pytest.mark.slow, pytest.mark.timeout(1200)]
    return pytest.param(entry, marks=marks, id=entry.name)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("entry", [marked(entry) for entry in ENTRIES])
def test_a_model_trains_as_in_eager_pytorch(entry):
    trial, executor, _ = try_out(entry)
    executor.destroy()
    assert not trial.complaint()
    assert trial.ops > 10


def test_the_page_has_every_model():
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if "|" in line]
    assert [entry.name for entry in ENTRIES if entry.name not in rows] == []


def test_quick_models_exist():
    assert set(QUICK) <= {entry.name for entry in ENTRIES}
