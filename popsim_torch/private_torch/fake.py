"""Fake tensors: they have a shape, strides and a dtype, but no values.

Why: the model is traced with them, on the device of this package. ``torch.export`` and
``torch.compile`` also make them, but expose neither the tensors nor the mode, and refuse code that
this package can trace.

Checked: 2.13.
"""

from torch._subclasses.fake_impls import op_implementations_dict as FAKE_RULES
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    is_fake,
    unset_fake_temporarily,
)

__all__ = [
    "FAKE_RULES",
    "FAKE_TENSOR_LOGGER",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "is_fake",
    "register_op_impl",
    "unset_fake_temporarily",
]

# This logger repeats the messages of exceptions.
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
