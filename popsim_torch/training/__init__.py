"""Training, evaluation and prediction with one call each, as device loops."""

from popsim_torch.training.fit import evaluate, fit, predict
from popsim_torch.training.history import EpochRecord, History
from popsim_torch.training.ready_callbacks import (
    Checkpoint,
    EarlyStopping,
    LearningRateScheduler,
)

__all__ = [
    "Checkpoint",
    "EarlyStopping",
    "EpochRecord",
    "History",
    "LearningRateScheduler",
    "evaluate",
    "fit",
    "predict",
]
