"""Internal functions of ``torch.nn`` modules, checkpoints and the compiler.

Why: a trace replaces these functions if they need a value that does not exist. None of them has a
public switch: the common class of all batch norms, a transformer's check of its mask, the method
behind ``module.half()``, the code that ``torch.utils.checkpoint`` runs around a function and its
later comparison, and the compiler's setting that refuses a trace inside of a trace.

Checked: 2.13.
"""

from functools import cache
from typing import Any

import torch.utils.checkpoint
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

__all__ = [
    "BACKWARD_HOOK_NODE",
    "CHECKPOINT_GENERATORS",
    "CONVERSION",
    "MASK_DETECTION",
    "BatchNorm",
    "CachingTorchDispatchMode",
    "determinism_checks",
    "nested_traces",
]

# The function that checks whether a mask is causal, in the form for `unittest.mock`.
MASK_DETECTION = (torch.nn.modules.transformer, "_detect_is_causal_mask")
# The method with which a module converts its tensors, and those of the modules in it.
CONVERSION = "_apply"
# Names in `torch.utils.checkpoint` of the code around a checkpointed function: since 2.14
# `..._generator_impl`, besides the former name.
CHECKPOINT_GENERATORS = tuple(
    name
    for name in vars(torch.utils.checkpoint)
    if name.startswith("_checkpoint_without_reentrant_generator")
)
# The class of autograd's nodes that call the backward hooks of modules.
BACKWARD_HOOK_NODE: Any = BackwardHookFunction._backward_cls
determinism_checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
CachingTorchDispatchMode = torch.utils.checkpoint._CachingTorchDispatchMode


@cache
def nested_traces() -> Any:
    """Scope in which the compiler does not refuse a trace inside of a trace.

    It is one object for all traces: each new one would stay in the thread's context forever. The
    first call imports the compiler, which takes as long as to import PyTorch itself.
    """
    import torch._dynamo

    return torch._dynamo.config.patch(error_on_nested_fx_trace=False)
