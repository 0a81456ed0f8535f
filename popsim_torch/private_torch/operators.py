"""Classes of operators, and operators that take functions.

Why: ``torch.ops`` has the operators, but neither their classes, nor their schemas, nor the
information which of them ``torch.library.custom_op`` made. Functions such as ``torch.cond`` call
operators that take functions; a mode sees these operators.

Checked: 2.13.
"""

from typing import Any

import torch
from torch._functorch.autograd_function import custom_function_call
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims_common import canonicalize_dim

__all__ = [
    "NLL_LOSS",
    "OPDEFS",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "canonicalize_dim",
    "cond_op",
    "custom_function_call",
    "has_composite_kernel",
    "has_functionalize_kernel",
    "has_meta_kernel",
    "is_replaced_in_transforms",
    "map_impl",
    "opname",
    "overload_name",
    "scan_op",
    "schema_of",
    "while_loop_op",
]

# Cross entropy's second half, for inputs of any rank; `torch.nn.functional` checks them again.
NLL_LOSS: Any = torch._C._nn.nll_loss_nd


def schema_of(operator: OpOverload) -> torch.FunctionSchema:
    """Return the schema of an operator: its arguments, its results, and what it changes."""
    return operator._schema


def opname(target: object) -> str:
    """Return the name of an operator without namespace and overload; "" for other objects."""
    return target._opname if isinstance(target, OpOverload) else ""


def overload_name(operator: OpOverload) -> str:
    """Return the name of an overload as in Python: "default" for the one without a name."""
    return operator._overloadname


def has_composite_kernel(name: str) -> bool:
    """Return whether an operator consists of other operators, also for gradients."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


def is_replaced_in_transforms(name: str) -> bool:
    """Return whether the transforms of ``torch.func`` call other operators in its place."""
    key = "FuncTorchDynamicLayerFrontMode"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def has_functionalize_kernel(name: str) -> bool:
    """Return whether an operator has a rule of its own for the removal of mutation."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "Functionalize"))


def has_meta_kernel(name: str, operator: OpOverload) -> bool:
    """Return whether C++ computes the shapes of an operator's results, without Python code."""
    return bool(
        torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "Meta")
        and torch._C.DispatchKey.Meta not in operator.py_kernels
    )
