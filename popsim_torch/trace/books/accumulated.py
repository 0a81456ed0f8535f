"""The gradients that the device accumulates, while hooks of the user see and change them.

``accumulated(gradient, key)`` adds the gradient of a micro-batch to the accumulator of a parameter,
and is what the accumulator holds then. ``keep_accumulated(value, key)`` puts ``value`` there. The
key is the index of the parameter in the model.
"""

from __future__ import annotations

from typing import Any

import torch

from popsim_torch.trace.graph.markers import NAMESPACE
from popsim_torch.typed_torch import new_library

__all__ = ["ACCUMULATED", "KEEP_ACCUMULATED"]


def _register() -> Any:
    library = new_library(NAMESPACE, "FRAGMENT")
    for name in ("accumulated", "keep_accumulated"):
        library.define(f"{name}(Tensor x, int key) -> Tensor")
        torch.library.register_fake(
            f"{NAMESPACE}::{name}", lambda x, key: torch.empty_like(x), lib=library
        )
    return library


_library = _register()  # the operators exist as long as this object

ACCUMULATED = torch.ops.popsim.accumulated.default
KEEP_ACCUMULATED = torch.ops.popsim.keep_accumulated.default
