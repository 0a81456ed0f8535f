"""Tensors inside of transforms (``torch.func``), and what functionalising wraps tensors in.

Why: ``torch.func`` offers the transforms, but not to ask a tensor which ones it is inside of, nor
to take a step out of them. ``torch.func.functionalize`` brings views up to date when they are read;
the order in which it does decides the names of what it computes, so it is asked for one by one.

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
