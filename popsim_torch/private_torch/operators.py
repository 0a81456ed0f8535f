"""Classes of operators, and operators that take functions.

Why: ``torch.ops`` gives operators, but neither the class that they are of, nor which of them were
made by ``torch.library.custom_op``. Functions such as ``torch.cond`` are calls of operators that
take functions; what a mode sees of such a call is that operator.

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
    "map_impl",
    "scan_op",
    "while_loop_op",
]

# Cross entropy's second half, for inputs of any rank; `torch.nn.functional` checks them again.
NLL_LOSS: Any = torch._C._nn.nll_loss_nd
