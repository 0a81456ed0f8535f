"""Names of PopTorch that this version refuses: each is there, and says so when it is called.

A program that only imports one, or has it in a branch that is not taken, runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from popsim_torch.errors import not_supported_yet

__all__ = [
    "MultiConv",
    "dynamic_slice",
    "dynamic_update",
    "serializedMatMul",
    "set_overlap_for_input",
    "set_overlap_for_output",
]


def _refused(name: str, feature: str, advice: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise not_supported_yet(f"poptorch.{name}", feature, advice)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raise ``Error``: {feature} is not supported yet. {advice}"
    return refuse


MultiConv = _refused(
    "MultiConv", "a group of convolutions", "Leave it out: values are the same without it."
)
dynamic_slice = _refused(
    "dynamic_slice", "a slice at a place known at run time", "Use torch.index_select."
)
dynamic_update = _refused(
    "dynamic_update", "an update at a place known at run time", "Use torch.index_copy."
)
serializedMatMul = _refused(
    "serializedMatMul", "a product in slices", "Use torch.matmul: values are the same."
)
set_overlap_for_input = _refused(
    "set_overlap_for_input", "overlapped input", "Leave it out: values are the same without it."
)
set_overlap_for_output = _refused(
    "set_overlap_for_output", "overlapped output", "Leave it out: values are the same without it."
)
