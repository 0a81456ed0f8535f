"""Functions for tests: they compare results, and check that a model trains."""

from popsim_torch.testing.closeness import allclose
from popsim_torch.testing.measuring import TrainingMeasures
from popsim_torch.testing.trains import assert_trains

__all__ = ["TrainingMeasures", "allclose", "assert_trains"]
