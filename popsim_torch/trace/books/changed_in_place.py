"""Explains autograd's error about a tensor that was changed in place."""

from __future__ import annotations

from popsim_torch.errors import UsageRuntimeError

__all__ = ["ChangedInPlaceError", "explained"]

_MESSAGE = "modified by an inplace operation"  # autograd's


class ChangedInPlaceError(UsageRuntimeError):
    """A gradient needs a tensor that was changed in place; has the user's line."""


def explained(error: BaseException, line: str) -> ChangedInPlaceError | None:
    """Return an error with the user's line for that error of autograd; None for all others.

    Args:
        error: The exception that was raised.
        line: The place of the call whose gradient was computed; may be empty.
    """
    if _MESSAGE not in str(error) or isinstance(error, ChangedInPlaceError) or not line:
        return None
    return ChangedInPlaceError(
        f"{error} This is the gradient of the call at {line}; a tensor that it needs was changed "
        "in place after the call. Change a copy (tensor.clone()), or compute a new tensor."
    )
