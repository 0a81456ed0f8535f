"""Statistics on the host, where the package does not have them."""

import importlib.util
import sys
import types

import pytest

from tests.unit.records.runs import statistics


@pytest.fixture
def host_statistics(monkeypatch):
    """Make sure that ``statistics_of`` can be imported."""
    name = "popsim_torch.observe.vectors"
    if importlib.util.find_spec(name) is None:
        module = types.ModuleType(name)
        module.statistics_of = statistics
        monkeypatch.setitem(sys.modules, name, module)
