"""What modules of ``torch.nn``, checkpoints and the compiler do inside.

Why: a trace takes the place of what they do, where that needs a value and there is none. None of
them has a public switch: the class that all batch norms share, a transformer's look at its mask,
what ``torch.utils.checkpoint`` runs around a function and compares after it, and the compiler's
setting that refuses a trace inside of a trace.

Checked: 2.13.
"""

from typing import Any

import torch._dynamo
import torch.utils.checkpoint
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

__all__ = [
    "CHECKPOINT_GENERATORS",
    "MASK_DETECTION",
    "BatchNorm",
    "CachingTorchDispatchMode",
    "determinism_checks",
    "dynamo_config",
]

# Where the function is that tells whether a mask is causal, for `unittest.mock`.
MASK_DETECTION = (torch.nn.modules.transformer, "_detect_is_causal_mask")
# Names in `torch.utils.checkpoint` of what runs around a checkpointed function: since 2.14
# `..._generator_impl`, beside the former name.
CHECKPOINT_GENERATORS = tuple(
    name
    for name in vars(torch.utils.checkpoint)
    if name.startswith("_checkpoint_without_reentrant_generator")
)
determinism_checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
CachingTorchDispatchMode = torch.utils.checkpoint._CachingTorchDispatchMode
dynamo_config: Any = torch._dynamo.config
