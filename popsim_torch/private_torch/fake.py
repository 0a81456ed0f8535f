"""Fake tensors: what has a shape, strides and an element type, and no values.

Why: the model is traced with them, on a device of ours. ``torch.export`` and ``torch.compile``
make them too, but show neither the tensors nor the mode, and refuse what a trace of ours allows.

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

# It repeats what the exceptions say.
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
