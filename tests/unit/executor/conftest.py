"""The log lines about copies between host and device."""

import logging

import pytest


@pytest.fixture
def implicit_copies(caplog):
    """Count the implicit copies by their log line."""
    caplog.set_level(logging.DEBUG, logger="poptorch::python")

    def count(direction="Host"):
        return sum(f"Implicit copyWeightsTo{direction}()" in r.message for r in caplog.records)

    return count
