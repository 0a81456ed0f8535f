"""A layer for the optimizers to train."""

import pytest
import torch


@pytest.fixture
def fc() -> torch.nn.Linear:
    return torch.nn.Linear(3, 2)
