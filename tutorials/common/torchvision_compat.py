"""Import torchvision next to a torch it was not compiled for.

torchvision's usual wheel is compiled against a CUDA build of torch. Next to a
CPU-only torch its operators cannot be loaded, and the import stops while it
describes one of them: ``operator torchvision::nms does not exist``. Datasets,
transforms and models need none of these operators; their schemas alone are
enough for the import to finish.
"""

import importlib
import sys
from types import ModuleType

import torch

_MISSING_OPERATORS = "operator torchvision::"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# The schemas exist as long as their library object exists.
_libraries: list[torch.library.Library] = []


def import_torchvision() -> ModuleType:
    """Return torchvision. If its normal import fails, import it with operator schemas only.

    Raises:
        ImportError: torchvision is not installed.
        RuntimeError: Its import fails for a reason other than missing operators.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if _MISSING_OPERATORS not in str(error) or _libraries:
            raise
    _forget_partial_import()
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _libraries.append(library)
    return importlib.import_module("torchvision")


def _forget_partial_import() -> None:
    """Drop the submodules that the failed import left behind."""
    partial = [name for name in sys.modules if name.partition(".")[0] == "torchvision"]
    for name in partial:
        del sys.modules[name]
