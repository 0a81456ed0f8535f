"""Fixtures of the tests that compare whole programs."""

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set how many threads PyTorch has, for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
