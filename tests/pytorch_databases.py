"""PyTorch's own databases of operators and modules.

Importing them forbids all later code of the process to change settings of ``torch.backends``, to
find tests of PyTorch that forget to undo it. Here this is undone: other tests change settings.
"""

import torch
from torch.testing._internal import common_methods_invocations as invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

__all__ = ["invocations", "module_db", "op_db"]

# (torch.backends is an object in the place of its module)
_SETTINGS = torch.backends.disable_global_flags.__globals__
_SETTINGS["__allow_nonbracketed_mutation_flag"] = True
