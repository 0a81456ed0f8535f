"""A plugin of pytest: ``pytest_plugins = ["popsim_torch.pytest_plugin"]`` in a ``conftest.py``.

It is not loaded by itself, because it would make each start of pytest wait for PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from popsim_torch.testing import TrainingMeasures, assert_trains

__all__ = ["assert_trains"]


@pytest.fixture(name="assert_trains")
def _assert_trains() -> Callable[..., TrainingMeasures]:
    """Return :func:`popsim_torch.testing.assert_trains`."""
    return assert_trains
