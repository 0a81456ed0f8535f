"""The errors for steps that cannot be traced."""

from __future__ import annotations

from collections.abc import Iterable

from popsim_torch.errors import Error
from popsim_torch.optim.nested import path_name
from popsim_torch.optim.step_source import StepSource
from popsim_torch.optimizer_steps.mistakes import line_of
from popsim_torch.optimizer_steps.traced_step import CellKey

__all__ = ["failed_trace", "other_states", "shown_key"]


def shown_key(key: CellKey) -> str:
    """Return how an error calls a state, or a number of a group."""
    _, owner, path = key
    return (
        f"'{path_name(path[1])}' of group {path[0]}" if owner == "group" else repr(path_name(path))
    )


def other_states(keys: Iterable[CellKey]) -> Error:
    """Return the error for states that only some first steps make."""
    return Error(
        f"The first step of the optimizer makes {', '.join(sorted(map(shown_key, keys)))} after "
        "one branch of an 'if' only, and differs from later steps. On the device, states are the "
        "same in every step: make them in the constructor."
    )


def failed_trace(source: StepSource, error: Exception) -> Error:
    """Return the error for an exception that comes from the trace of a step."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, AssertionError) and "FakeTensor" in text:
        text = (
            "it computes with a tensor that the device does not know, such as one in an object or "
            "a global name. Keep the tensor in self.state[parameter], or as an attribute of the "
            "optimizer."
        )
    return Error(f"The step of {source.kind.__name__} cannot be traced{line_of(error)}: {text}")
