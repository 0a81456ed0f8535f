"""Records of runs in files, and the comparison of two runs.

``RunWriter`` writes a run, ``Run`` reads it, ``compare`` says where two runs first differ, and
``eager_record`` records the training of a model that PyTorch itself runs.
"""

from popsim_torch.records.comparison import compare
from popsim_torch.records.difference import (
    Difference,
    FirstDifference,
    SampleDifference,
    StepDifference,
)
from popsim_torch.records.eager import eager_record
from popsim_torch.records.reader import Run
from popsim_torch.records.tensors import RecordedTensor
from popsim_torch.records.writer import RunWriter

__all__ = [
    "Difference",
    "FirstDifference",
    "RecordedTensor",
    "Run",
    "RunWriter",
    "SampleDifference",
    "StepDifference",
    "compare",
    "eager_record",
]
