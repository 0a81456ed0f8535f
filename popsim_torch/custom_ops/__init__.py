"""Custom operators with a name and a domain, and kernels in libraries or in Python."""

from popsim_torch.custom_ops.abi import custom_op_include
from popsim_torch.custom_ops.call import custom_op
from popsim_torch.custom_ops.python_ops import PythonOp, register_custom_op

__all__ = ["PythonOp", "custom_op", "custom_op_include", "register_custom_op"]
