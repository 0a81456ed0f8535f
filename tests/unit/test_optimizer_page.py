"""The page about optimizers has all of PyTorch's, and says how each is updated."""

from pathlib import Path

import pytest
import torch

from benchmarks.optimizers import HEADER, OPTIMIZERS, PAGE, error_of, make
from popsim_torch.optim.settings import is_traced

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "optimizers.md").read_text()
ROWS = {
    cells[1].strip(): [cell.strip() for cell in cells[1:-1]]
    for cells in (line.split("|") for line in TEXT.splitlines() if line.startswith("| "))
}
# An error of eager PyTorch in float32 is of this size; Muon computes with 8 bits.
LIMITS = {"Muon": 5e-2}


def test_every_optimizer_of_pytorch_has_a_row_or_a_reason():
    kinds = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    named = {name.partition(",")[0] for name in ROWS}
    assert kinds - named - {"Optimizer", "LBFGS", "SparseAdam"} == set()
    assert "`LBFGS`" in TEXT
    assert "`SparseAdam`" in TEXT


def test_the_page_is_what_the_script_writes():
    around = (
        PAGE.read_text(encoding="utf-8").partition("## How it works")[2].partition("## Meas")[0]
    )
    assert around.strip() in TEXT
    assert list(ROWS["Optimizer"]) == HEADER
    assert ROWS.keys() >= OPTIMIZERS.keys()


SAMPLE = ("Adagrad", "Muon", "SGD", "RAdam")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in OPTIMIZERS],
)
def test_a_row_is_still_true(name):
    module = torch.nn.Linear(2, 2)
    assert ROWS[name][1] == ("its step, traced" if is_traced(make(name, module)) else "an op")
    assert error_of(name) < LIMITS.get(name, 1e-5)
    assert float(ROWS[name][3]) < LIMITS.get(name, 1e-5)
