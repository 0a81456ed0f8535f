"""The one doorway to the C++ library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch  # noqa: F401  (the extension needs torch's libraries to be loaded)

try:
    from popsim_torch import _C
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ImportError(
        "popsim_torch: the C++ library popsim_torch._C is missing or was built for another "
        f"PyTorch ({error}). Build it with `make build`, or install with `pip install .`."
    ) from error

from popsim_torch.errors import Error, InternalError

Arguments = _C.Arguments
Executable = _C.Executable
Graph = _C.Graph
Phase = _C.Phase
ReturnSpec = _C.ReturnSpec
RunConfig = _C.RunConfig
TensorArgument = _C.TensorArgument
TensorKind = _C.TensorKind
TensorListArgument = _C.TensorListArgument
has_onednn = _C.has_onednn
op_table = _C.op_table
schedule_actions = _C.schedule_actions
validate_schedule = _C.validate_schedule


@contextmanager
def translated_errors() -> Iterator[None]:
    """Turn the C++ library's exceptions into the package's."""
    try:
        yield
    except _C.UserError as error:
        raise Error(str(error)) from error
    except _C.InternalError as error:
        raise InternalError(str(error)) from error
