"""The device of a trace, and functions that make tensors on a device.

Why: ``torch.utils.rename_privateuse1_backend`` gives a device its name permanently; ``torch.ipu``
is a name that PyTorch knows, but without a module. The list of functions that take a device and
make a tensor is private to ``torch.device``, which uses it as a context manager.

Checked: 2.13.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors as device_constructors

__all__ = ["device_constructors", "register_device_module"]

register_device_module: Callable[[str, Any], None] = torch._register_device_module
