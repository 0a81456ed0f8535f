"""Dtypes: which ones the device holds and returns; its numbers have at most 32 bits.

A complex number is two of them: the device holds complex64.

The host's 64-bit numbers and bfloat16 are converted in two places. When they enter the program,
float64 and bfloat16 become float32, and complex128 becomes complex64. int64 stays int64, because
PyTorch's kernels use it for indices; ``forward`` sees int32, and outputs are returned as int32.
Values that the program computes keep PyTorch's integer dtypes: indices and counts may have 64 bits.
Where ``forward`` asks for float64, bfloat16 or complex128, it gets float32 or complex64
(``trace/graph/device_types.py``).
"""

from __future__ import annotations

import torch

from popsim_torch.enums import OutputMode

_HELD = {
    torch.float64: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex128: torch.complex64,
}
_RETURNED = {**_HELD, torch.int64: torch.int32}

INPUTS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.float16,
    torch.float32,
    torch.bool,
    torch.int64,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
)
"""The dtypes that an input may have."""


def is_continuous(dtype: torch.dtype) -> bool:
    """Return whether tensors of a dtype may have gradients: real and complex numbers."""
    return dtype.is_floating_point or dtype.is_complex


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in programs and messages, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def held_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the device holds an input, a weight or a floating-point buffer.

    Args:
        dtype: The dtype on the host.
    """
    return _HELD.get(dtype, dtype)


def returned_dtype(dtype: torch.dtype, mode: OutputMode = OutputMode.All) -> torch.dtype:
    """Return the dtype in which a tensor is returned to the host.

    Args:
        dtype: The dtype of the tensor in the program.
        mode: The output mode: with ``Sum``, booleans and small integers are returned as int32.
    """
    if mode == OutputMode.Sum and not is_continuous(dtype):
        return torch.int32
    return _RETURNED.get(dtype, dtype)
