"""The plugin of pytest: its fixture, in a run of pytest of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

CONFTEST = 'pytest_plugins = ["popsim_torch.pytest_plugin"]\n'
TESTS = """
import torch
from torch import nn


def batches():
    torch.manual_seed(1)
    inputs = [torch.randn(32, 8) for _ in range(10)]
    return [(x, (x.sum(1) > 0).long()) for x in inputs]


def test_a_good_model(assert_trains):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert assert_trains(model, batches(), loss=nn.CrossEntropyLoss(), optimizer=optimizer).losses


def test_a_frozen_model(assert_trains):
    model = nn.Linear(8, 2)
    model.bias.requires_grad_(False)
    assert_trains(model, batches(), loss=nn.CrossEntropyLoss(), loss_falls_by=None)
"""


def test_the_fixture_passes_and_fails_tests(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_models.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "Linear breaks 1 rule of training in 20 steps:" in done.stdout
    assert "1. bias: requires_grad is False" in done.stdout
