"""Element types: what the device holds and gives back, whose numbers have 32 bits at most.

The host's 64-bit numbers, and bfloat16, become 32-bit ones in two places. On their way in, float64
and bfloat16 become float32; int64 stays what it is, since PyTorch's kernels index with it, and
comes back as int32, and forward sees it as that. What the program computes in between keeps the
integers that PyTorch gives it: indices and counts may have 64 bits. Forward itself makes float32
where it asks for float64 or bfloat16 (``trace/graph/device_types.py``).
"""

from __future__ import annotations

import torch

from popsim_torch.enums import OutputMode

_HELD = {torch.float64: torch.float32, torch.bfloat16: torch.float32}
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
)
"""What an input may be."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of an element type in programs and messages, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def held_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which the device holds an input, a weight or a floating-point buffer.

    Args:
        dtype: The host's.
    """
    return _HELD.get(dtype, dtype)


def returned_dtype(dtype: torch.dtype, mode: OutputMode = OutputMode.All) -> torch.dtype:
    """Return the type in which a tensor comes back to the host.

    Args:
        dtype: The type that the program gives it.
        mode: ``Sum`` counts: booleans and small integers come back as int32.
    """
    if mode == OutputMode.Sum and not dtype.is_floating_point:
        return torch.int32
    return _RETURNED.get(dtype, dtype)
