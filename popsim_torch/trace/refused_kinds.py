"""Calls that eager PyTorch refuses for bools or for integers.

The shape rules, which a trace follows, take them. A table says which calls are worth a look; these
are tried on the host. Counts of integers (``torch.histc``) work, as on other devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from popsim_torch.private_torch.trees import tree_leaves
from popsim_torch.trace.eager_errors import error_on_host
from popsim_torch.trace.graph.traced_tensors import in_transform, is_traced
from popsim_torch.trace.result_types import kind_of

__all__ = ["check_kinds"]

_INTEGER, _FLOAT = 1, 2  # (of `kind_of`)
_NEEDS_NUMBERS = "abs absolute addcmul ceil fix floor relu round rsub sub subtract trunc"
_NEEDS_FLOATS = "max_pool1d upsample_nearest1d _upsample_nearest_exact1d"
# The lowest kind of the tensors that a function takes.
_LOWEST = dict.fromkeys(_NEEDS_NUMBERS.split(), _INTEGER)
_LOWEST |= {f"{name}_": kind for name, kind in _LOWEST.items()}
_LOWEST |= dict.fromkeys(("__isub__", "__rsub__", "__sub__", "__abs__"), _INTEGER)
_LOWEST |= dict.fromkeys(_NEEDS_FLOATS.split(), _FLOAT)


def check_kinds(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse a call with operands of a kind that eager PyTorch refuses.

    Args:
        func: A function of torch.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        RuntimeError: Eager PyTorch's error.
    """
    if name not in _LOWEST:
        return
    lowest = _LOWEST[name]
    values = tree_leaves((args, kwargs))
    is_doubtful = any(is_traced(value) and kind_of(value) < lowest for value in values)
    if not is_doubtful or in_transform():
        return
    error = error_on_host(func, args, kwargs)
    if isinstance(error, RuntimeError):
        raise error
