"""Tensors inside of transforms (``torch.func``), and the wrappers of functionalisation.

Why: ``torch.func`` has the transforms, but no way to find the transforms that a tensor is inside
of, or to compute outside of them. ``torch.func.functionalize`` updates views when they are read;
the order of the updates determines the names of results, so this package updates them one by one.

Checked: 2.13.
"""

from typing import Any

import torch
from torch._C._functorch import _unwrap_functional_tensor as unwrap_functional_tensor
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functionaltensor,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

__all__ = [
    "functionalize_sync",
    "get_unwrapped",
    "is_batchedtensor",
    "is_functionaltensor",
    "is_functorch_wrapped_tensor",
    "peek_interpreter_stack",
    "temporarily_clear_interpreter_stack",
    "unwrap_functional_tensor",
]

functionalize_sync: Any = torch._functionalize_sync
