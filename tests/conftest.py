"""Fixtures for every test. No import here is slow."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

os.environ["POPSIM_VERIFY_PASSES"] = "1"


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collection: there are many, and all stay."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def exempt_what_stays() -> Iterator[None]:
    """Exempt what a file's tests leave, modules above all: collections look at what is new only."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def reset_seed():
    """Start each test from the same random state."""
    # A test that has not imported torch does not use its generator.
    torch = sys.modules.get("torch")
    if torch is not None:
        # `torch.manual_seed` also tells every absent accelerator, each with the stack as text.
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def mnist_root() -> Path:
    """Return a folder with real MNIST digits in torchvision's layout, or skip the test."""
    default = ROOT.parent / "shared" / "data" / "mnist"
    root = Path(os.environ.get("POPSIM_MNIST_ROOT", default))
    if not (root / "MNIST" / "raw" / "train-images-idx3-ubyte").is_file():
        pytest.skip(f"no MNIST in {root}; POPSIM_MNIST_ROOT names another folder")
    return root


@pytest.fixture(params=["processor", "emulated"])
def tile_units(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test with this processor's instructions, and with matrix units in software."""
    if request.param == "processor":
        yield request.param
        return
    from popsim_torch import _native

    before = _native.emulate_tile_units(True)
    yield request.param
    _native.emulate_tile_units(before)


@pytest.fixture
def used_tile_units(tile_units: str) -> Iterator[None]:
    """Check that the test has used the matrix units, in runs where this can be checked.

    Without oneDNN, ATen computes the convolutions.
    """
    from popsim_torch import _native

    num_products = _native.num_emulated_products()
    yield
    if tile_units == "emulated" and _native.has_onednn():
        assert _native.num_emulated_products() > num_products, "no product ran on the matrix units"
