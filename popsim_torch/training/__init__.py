"""Training, evaluation and prediction in one call each, on device loops."""

from popsim_torch.training.fit import evaluate, fit, predict
from popsim_torch.training.history import EpochRecord, History

__all__ = ["EpochRecord", "History", "evaluate", "fit", "predict"]
