"""The interface to the C++ library: all Python code uses the library through this module."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch  # (must come first: the extension needs torch's libraries)

from popsim_torch.errors import BACKEND_ERROR_TYPE, Error, InternalError

_FOLDER = Path(__file__).parent


def _check_torch() -> None:
    """Check that the library was built for this PyTorch release, as symbols of others may differ.

    Raises:
        ImportError: The library was built for another release, or it was not built.
    """
    built_for = _FOLDER / "built_for.txt"  # written by setup.py
    if not built_for.exists():
        raise ImportError(
            f"popsim_torch: {_FOLDER} has no C++ library: it was not built. Run `make build` in a "
            "checkout, or install the package with `pip install .`."
        )
    release = built_for.read_text().strip()
    if str(torch.__version__).split(".")[:2] != release.split("."):
        raise ImportError(
            f"popsim_torch: the C++ library was built for PyTorch {release}, and this is PyTorch "
            f"{torch.__version__}. Run `pip install torch=={release}.*`, or build popsim_torch for "
            "this PyTorch: `pip install --no-build-isolation .` in its sources."
        )


_check_torch()

try:
    from popsim_torch._C import (
        Arguments,
        AttributeRule,
        BadExecution,
        BadNumber,
        BadTensor,
        ConvolutionPlan,
        Executable,
        Fusion,
        Graph,
        Infeed,
        Inlet,
        InputPlace,
        MachineConstant,
        MachineDevice,
        MachineSettings,
        MatmulPlan,
        NumberRecord,
        OpDef,
        Operand,
        Outfeed,
        Outlet,
        Phase,
        PlainArguments,
        Plan,
        RunConfig,
        TensorArgument,
        TensorKind,
        TensorListArgument,
        Timeline,
        add_custom_op,
        built_targets,
        choose_target,
        custom_op_types,
        custom_ops,
        emulate_tile_units,
        estimate,
        find_custom_op,
        fits_32_bits,
        has_cost_rule,
        has_onednn,
        has_tile_units,
        infer_types,
        look_for_custom_ops,
        machine_constants,
        max_in_flight,
        min_cut_work,
        module_marks,
        multiplies_tiles,
        num_emulated_products,
        onednn_version,
        op_cost,
        op_table,
        parse_schema,
        plan_convolution,
        plan_matmul,
        product_can_fuse,
        schedule_actions,
        schedule_times,
        target,
        tensor_marks,
        usable_targets,
        use_one_thread,
        validate_schedule,
        work_of,
    )
    from popsim_torch._C import InternalError as _NativeInternalError
    from popsim_torch._C import UserError as _NativeUserError
except ImportError as error:  # pragma: no cover - depends on the installation
    found = ", ".join(path.name for path in sorted(_FOLDER.glob("_C*.so")))
    raise ImportError(
        f"popsim_torch: the C++ library ({found}) cannot be loaded by Python "
        f"{platform.python_version()}: {error}. It must have been built by this Python and for "
        "this PyTorch: run `make build` in a checkout, or install the package again."
    ) from error

__all__ = [
    "ERRORS",
    "Arguments",
    "AttributeRule",
    "BadExecution",
    "BadNumber",
    "BadTensor",
    "ConvolutionPlan",
    "Executable",
    "Fusion",
    "Graph",
    "Infeed",
    "Inlet",
    "InputPlace",
    "MachineConstant",
    "MachineDevice",
    "MachineSettings",
    "MatmulPlan",
    "NumberRecord",
    "OpDef",
    "Operand",
    "Outfeed",
    "Outlet",
    "Phase",
    "PlainArguments",
    "Plan",
    "RunConfig",
    "TensorArgument",
    "TensorKind",
    "TensorListArgument",
    "Timeline",
    "add_custom_op",
    "built_targets",
    "custom_op_types",
    "custom_ops",
    "emulate_tile_units",
    "estimate",
    "find_custom_op",
    "fits_32_bits",
    "has_cost_rule",
    "has_onednn",
    "has_tile_units",
    "infer_types",
    "look_for_custom_ops",
    "machine_constants",
    "max_in_flight",
    "min_cut_work",
    "module_marks",
    "multiplies_tiles",
    "num_emulated_products",
    "onednn_version",
    "op_cost",
    "op_table",
    "parse_schema",
    "plan_convolution",
    "plan_matmul",
    "product_can_fuse",
    "schedule_actions",
    "schedule_times",
    "target",
    "tensor_marks",
    "translated",
    "translated_errors",
    "usable_targets",
    "use_one_thread",
    "validate_schedule",
    "work_of",
]


ERRORS = (_NativeUserError, _NativeInternalError)
"""The exceptions that the C++ library raises."""


def translated(error: BaseException) -> Error:
    """Return the package's exception for one of the C++ library's ``ERRORS``."""
    kind = InternalError if isinstance(error, _NativeInternalError) else Error
    return kind(str(error), error_type=BACKEND_ERROR_TYPE)


@contextmanager
def translated_errors() -> Iterator[None]:
    """Turn the C++ library's exceptions into the package's."""
    try:
        yield
    except ERRORS as error:
        raise translated(error) from error


_LIBRARIES = {
    # The names of each target in ATen, Intel's MKL and oneDNN (torch's own and ours), lowest first.
    "sse4": ("default", "SSE4_2", "SSE41"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512", "AVX512_CORE"),
}


def _obey_environment() -> None:
    """Use the target that the environment variable ``POPSIM_CPU`` names, if it is set.

    The other libraries that compute are limited to this target by their own variables, unless those
    are already set.

    Raises:
        Error: The target does not exist, or this processor or build does not have it.
    """
    wanted = os.environ.get("POPSIM_CPU", "")
    if not wanted:
        return
    usable = usable_targets()
    if wanted not in usable:
        known = "" if wanted in built_targets() else ", which this build does not know"
        raise Error(
            f"POPSIM_CPU={wanted}{known}: the targets that this processor and build have are "
            f"{', '.join(usable)}. Unset POPSIM_CPU to use {usable[-1]}, or build for all targets: "
            "`POPSIM_TARGETS=all make build` in a checkout."
        )
    choose_target(wanted)
    if wanted not in _LIBRARIES:
        return
    aten, mkl, onednn = _LIBRARIES[wanted]
    os.environ.setdefault("ATEN_CPU_CAPABILITY", aten)
    os.environ.setdefault("MKL_ENABLE_INSTRUCTIONS", mkl)
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", onednn)
    held = os.environ["ATEN_CPU_CAPABILITY"].upper()
    in_use = torch.backends.cpu.get_cpu_capability()
    if in_use != held:
        warnings.warn(
            f"POPSIM_CPU={wanted}: PyTorch computes with {in_use}, because it was used before "
            f"popsim_torch was imported. Set ATEN_CPU_CAPABILITY={aten} as well.",
            stacklevel=2,
        )


_obey_environment()
