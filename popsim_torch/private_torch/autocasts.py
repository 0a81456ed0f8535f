"""Autocast: the dispatch key of this device, the operators that PyTorch lists, and casts of inputs.

Why: ``torch.autocast`` turns a dispatch key of its device on. Operators that it casts have kernels
for that key; for this device PyTorch has the key, but no kernels. Only the dispatcher knows which
operators have such kernels for other devices, and ``custom_fwd`` casts only tensors of its device.

Checked: 2.13.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["CAST_INPUTS", "DISPATCH_KEY", "below_autocast", "listed_operators", "without_autocast"]

DISPATCH_KEY = "AutocastIPU"
_KEY: Any = getattr(torch._C.DispatchKey, DISPATCH_KEY)
_KEYS = torch._C.DispatchKeySet(_KEY)

# The function that casts the inputs of `custom_fwd`, in the form for `unittest.mock`.
CAST_INPUTS = (torch.amp.autocast_mode, "_cast")


def without_autocast() -> Any:
    """Return a scope in which operators of this device are not cast."""
    return torch._C._ExcludeDispatchKeyGuard(_KEYS)


def below_autocast(keys: Any) -> Any:
    """Return a set of dispatch keys without that of autocast."""
    return keys.remove(_KEY)


def listed_operators(device_type: str) -> list[str]:
    """Return the ATen operators that autocast handles on a device type, with their overloads."""
    key, prefix = f"Autocast{device_type.upper()}", "aten::"
    return [
        name.removeprefix(prefix)
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(prefix) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    ]
