"""PopTorch's optimizers, and what they do to the weights as data.

``optimizers`` and ``base`` are what users see. ``settings`` copies an optimizer's values, ``rules``
turns them into ops, and ``planning`` makes the ``plan`` of a model's update out of both.
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
