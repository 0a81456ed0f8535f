"""The device that a trace is on, and functions that make tensors on a device.

Why: ``torch.utils.rename_privateuse1_backend`` gives a device its name for good; ``torch.ipu`` is
one that PyTorch knows but has no module for. Which functions take a device and make a tensor is a
list that ``torch.device`` keeps for itself, where it is a context.

Checked: 2.13.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors as device_constructors

__all__ = ["device_constructors", "register_device_module"]

register_device_module: Callable[[str, Any], None] = torch._register_device_module
