"""Functions whose loops run on the device: ``function``, ``repeat`` and ``while_loop``."""

from popsim_torch.loops.decorator import function
from popsim_torch.loops.function import Function
from popsim_torch.loops.repeat import repeat, while_loop

__all__ = ["Function", "function", "repeat", "while_loop"]
