"""Fixtures for every test. Nothing here is slow to import."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def reset_seed():
    """Start each test from the same random state."""
    # A test that has not imported torch has no use for its generator.
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def mnist_root() -> Path:
    """A folder with real MNIST digits in torchvision's layout, or a skip."""
    default = ROOT.parent / "shared" / "data" / "mnist"
    root = Path(os.environ.get("POPSIM_MNIST_ROOT", default))
    if not (root / "MNIST" / "raw" / "train-images-idx3-ubyte").is_file():
        pytest.skip(f"no MNIST in {root}; POPSIM_MNIST_ROOT names another folder")
    return root
