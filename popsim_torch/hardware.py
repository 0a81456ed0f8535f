"""Functions that tell a program about the IPUs of this machine."""

from __future__ import annotations

from popsim_torch import environment
from popsim_torch.errors import UsageAssertionError, UsageTypeError

__all__ = ["ipuHardwareIsAvailable", "ipuHardwareVersion"]

_MAX_IPUS = 64
_MODEL_VARIABLES = ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL")


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Return whether there are IPUs for a model of this size: simulated ones count as real ones.

    The result is False while ``POPTORCH_IPU_MODEL`` or ``POPTORCH_SMALL_IPU_MODEL`` is 1: programs
    then do what they do on machines without IPUs.

    Args:
        num_ipus: The number of IPUs that the model needs; there are 64.

    Raises:
        UsageTypeError: ``num_ipus`` is not an int.
        UsageValueError: One of the variables is neither 0 nor 1.
    """
    if not isinstance(num_ipus, int):
        raise UsageTypeError(
            f"ipuHardwareIsAvailable({num_ipus!r}): the number of IPUs must be an int, got "
            f"{type(num_ipus).__name__}."
        )
    # All variables are read, to report a wrong value even if another variable decides the result.
    is_model = any([environment.flag(variable) for variable in _MODEL_VARIABLES])
    return not is_model and num_ipus <= _MAX_IPUS


def ipuHardwareVersion() -> int:
    """Return the version of the simulated IPUs: 2, or that of ``POPTORCH_IPU_MODEL_VERSION``.

    Raises:
        UsageAssertionError: There is no hardware, see :func:`ipuHardwareIsAvailable`.
        UsageValueError: One of the variables has a wrong value.
    """
    if not ipuHardwareIsAvailable():
        raise UsageAssertionError(
            "ipuHardwareVersion: No IPU hardware available: "
            f"{' or '.join(_MODEL_VARIABLES)} is 1. Unset it to use the simulated IPUs."
        )
    return environment.ipu_model_version()
