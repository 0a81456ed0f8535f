"""The one doorway to the C++ library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch  # noqa: F401  (the extension needs torch's libraries to be loaded)

from popsim_torch.errors import Error, InternalError

try:
    from popsim_torch._C import (
        Arguments,
        AttributeRule,
        Executable,
        Fusion,
        Graph,
        OpDef,
        Operand,
        Phase,
        Plan,
        ReturnSpec,
        RunConfig,
        TensorArgument,
        TensorKind,
        TensorListArgument,
        emulate_tile_units,
        has_onednn,
        has_tile_units,
        infer_types,
        min_cut_work,
        num_emulated_products,
        op_table,
        parse_schema,
        product_can_fuse,
        schedule_actions,
        validate_schedule,
        work_of,
    )
    from popsim_torch._C import InternalError as _NativeInternalError
    from popsim_torch._C import UserError as _NativeUserError
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ImportError(
        "popsim_torch: the C++ library popsim_torch._C is missing or was built for another "
        f"PyTorch ({error}). Build it with `make build`, or install with `pip install .`."
    ) from error

__all__ = [
    "ERRORS",
    "Arguments",
    "AttributeRule",
    "Executable",
    "Fusion",
    "Graph",
    "OpDef",
    "Operand",
    "Phase",
    "Plan",
    "ReturnSpec",
    "RunConfig",
    "TensorArgument",
    "TensorKind",
    "TensorListArgument",
    "emulate_tile_units",
    "has_onednn",
    "has_tile_units",
    "infer_types",
    "min_cut_work",
    "num_emulated_products",
    "op_table",
    "parse_schema",
    "product_can_fuse",
    "schedule_actions",
    "translated",
    "translated_errors",
    "validate_schedule",
    "work_of",
]


ERRORS = (_NativeUserError, _NativeInternalError)
"""What the C++ library raises."""


def translated(error: BaseException) -> Error:
    """Return the package's exception for one of the C++ library's ``ERRORS``."""
    kind = InternalError if isinstance(error, _NativeInternalError) else Error
    return kind(str(error))


@contextmanager
def translated_errors() -> Iterator[None]:
    """Turn the C++ library's exceptions into the package's."""
    try:
        yield
    except ERRORS as error:
        raise translated(error) from error
