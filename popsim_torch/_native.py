"""The one doorway to the C++ library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch  # noqa: F401  (the extension needs torch's libraries to be loaded)

from popsim_torch.errors import Error, InternalError

try:
    from popsim_torch._C import (
        Arguments,
        Executable,
        Graph,
        Phase,
        ReturnSpec,
        RunConfig,
        TensorArgument,
        TensorKind,
        TensorListArgument,
        has_onednn,
        op_table,
        schedule_actions,
        validate_schedule,
    )
    from popsim_torch._C import InternalError as _NativeInternalError
    from popsim_torch._C import UserError as _NativeUserError
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ImportError(
        "popsim_torch: the C++ library popsim_torch._C is missing or was built for another "
        f"PyTorch ({error}). Build it with `make build`, or install with `pip install .`."
    ) from error

__all__ = [
    "Arguments",
    "Executable",
    "Graph",
    "Phase",
    "ReturnSpec",
    "RunConfig",
    "TensorArgument",
    "TensorKind",
    "TensorListArgument",
    "has_onednn",
    "op_table",
    "schedule_actions",
    "translated_errors",
    "validate_schedule",
]


@contextmanager
def translated_errors() -> Iterator[None]:
    """Turn the C++ library's exceptions into the package's."""
    try:
        yield
    except _NativeUserError as error:
        raise Error(str(error)) from error
    except _NativeInternalError as error:
        raise InternalError(str(error)) from error
