"""What modules of ``torch.nn``, checkpoints and the compiler do inside.

Why: a trace takes the place of what they do, where it needs a value that there is none of: the
class that all batch norms share, the two lists that ``torch.utils.checkpoint`` compares, and the
compiler's setting that refuses a trace inside of a trace.

Checked: 2.13.
"""

from typing import Any

import torch._dynamo
import torch.utils.checkpoint
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

__all__ = ["BatchNorm", "CachingTorchDispatchMode", "determinism_checks", "dynamo_config"]

determinism_checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
CachingTorchDispatchMode = torch.utils.checkpoint._CachingTorchDispatchMode
dynamo_config: Any = torch._dynamo.config
