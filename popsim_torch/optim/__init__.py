"""PopTorch's optimizers, and their weight updates as data.

``optimizers`` and ``base`` have the public classes. ``settings`` copies an optimizer's values,
``rules`` converts them to ops, and ``planning`` makes the ``plan`` of a model's update from both.
"""

from popsim_torch.optim.base import DeviceLink, Optimizer, VariableAttributes
from popsim_torch.optim.optimizers import LAMB, SGD, Adam, AdamW, RMSprop

__all__ = [
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "DeviceLink",
    "Optimizer",
    "RMSprop",
    "VariableAttributes",
]
