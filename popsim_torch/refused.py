"""Names of PopTorch that this version refuses: each is there, and says so when it is called.

A program that only imports one, or has it in a branch that is not taken, runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from popsim_torch.errors import not_supported_yet

__all__ = [
    "CPU",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "for_loop",
    "fps",
    "nearest",
]


def _refused(name: str, feature: str, advice: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise not_supported_yet(f"poptorch.{name}", feature, advice)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raise ``Error``: {feature} is not supported yet. {advice}"
    return refuse


CPU = _refused(
    "CPU",
    "a call of the host from inside the program",
    "Split the model there, or define the operator with torch.library.custom_op.",
)
cond = _refused(
    "cond", "a branch in the program", "Compute both sides and choose with torch.where."
)
ctc_beam_search_decoder = _refused(
    "ctc_beam_search_decoder", "beam search", "Decode on the host what the model returns."
)
custom_op = _refused(
    "custom_op",
    "an operator by name and domain",
    "Define it with torch.library.custom_op and call that.",
)
for_loop = _refused(
    "for_loop",
    "a loop in the program",
    "Write a Python loop: all its trips are recorded.",
)
fps = _refused("fps", "farthest point sampling", "Sample on the host.")
nearest = _refused("nearest", "a search for nearest points", "Use torch.cdist and argmin.")
