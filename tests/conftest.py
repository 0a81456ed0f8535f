"""Fixtures for every test. Nothing here is slow to import."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

os.environ["POPSIM_VERIFY_PASSES"] = "1"


def pytest_collection_finish() -> None:
    """Let the garbage collector pass by the tests themselves: there are many, and they stay."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture(params=["processor", "emulated"])
def tile_units(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test as it is on this processor, and with software for matrix units."""
    if request.param == "processor":
        yield request.param
        return
    from popsim_torch import _native

    before = _native.emulate_tile_units(True)
    yield request.param
    _native.emulate_tile_units(before)


@pytest.fixture
def used_tile_units(tile_units: str) -> Iterator[None]:
    """Check that the test has used the matrix units, where that can be seen.

    Without oneDNN convolutions are left to ATen.
    """
    from popsim_torch import _native

    num_products = _native.num_emulated_products()
    yield
    if tile_units == "emulated" and _native.has_onednn():
        assert _native.num_emulated_products() > num_products, "nothing ran on the units"
