"""Fake tensors: they have a shape, strides and a dtype, but no values.

Why: the model is traced with them, on the device of this package. ``torch.export`` and
``torch.compile`` also make them, but expose neither the tensors nor the mode, and refuse code that
this package can trace.

Checked: 2.13.
"""

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch._subclasses.fake_impls import op_implementations_dict as FAKE_RULES
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
    UnsupportedOperatorException,
    is_fake,
    unset_fake_temporarily,
)

__all__ = [
    "FAKE_RULES",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeMaker",
    "FakeTensor",
    "FakeTensorDeviceMismatchError",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "is_fake",
    "register_op_impl",
    "unset_fake_temporarily",
    "without_tracebacks",
]


@contextlib.contextmanager
def without_tracebacks() -> Iterator[None]:
    """Keep torch from logging a traceback for an error that is raised anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class FakeMaker:
    """Makes fake tensors of a mode and a device as their constructor does, but much faster.

    Args:
        mode: The mode of the tensors.
        device: Their device.
    """

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        sample = FakeTensor(mode, torch.empty(0, device="meta"), device)
        self._attributes = dict(vars(sample))
        del self._attributes["fake_mode"]  # the mode may own this object
        self._device = sample.fake_device

    def __call__(self, memory: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
        """Return a fake tensor that has the shape and the storage of a ``meta`` tensor."""
        made: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=self._device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._attributes, fake_mode=mode)
        return made
