"""Says where a gradient needs what forward has changed in place."""

from __future__ import annotations

__all__ = ["ChangedInPlaceError", "explained"]

_MESSAGE = "modified by an inplace operation"  # autograd's


class ChangedInPlaceError(RuntimeError):
    """A gradient needs what was changed in place: autograd's error, with the user's line."""


def explained(error: BaseException, line: str) -> ChangedInPlaceError | None:
    """Return an error with the user's line for one of autograd's; None for all others.

    Args:
        error: What was raised.
        line: Where the call is whose gradient was computed; may be empty.
    """
    if _MESSAGE not in str(error) or isinstance(error, ChangedInPlaceError) or not line:
        return None
    return ChangedInPlaceError(
        f"{error} That is the gradient of the call at {line}; what it needs was changed in place "
        "after it. Change a copy (tensor.clone()), or compute a new tensor."
    )
