"""Questions of a program to the machine that it runs on."""

from __future__ import annotations

from popsim_torch import environment
from popsim_torch.errors import UsageAssertionError, UsageTypeError

__all__ = ["ipuHardwareIsAvailable", "ipuHardwareVersion"]

_MAX_IPUS = 64
_MODEL_VARIABLES = ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL")


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Return whether a model of this size finds IPUs: the simulated ones stand for real ones.

    False while ``POPTORCH_IPU_MODEL`` or ``POPTORCH_SMALL_IPU_MODEL`` is 1: programs then take
    what they have for machines without hardware.

    Args:
        num_ipus: How many are needed (count); there are 64.

    Raises:
        UsageTypeError: ``num_ipus`` is not an int.
        UsageValueError: One of the variables is neither 0 nor 1.
    """
    if not isinstance(num_ipus, int):
        raise UsageTypeError(
            f"ipuHardwareIsAvailable({num_ipus!r}): the number of IPUs must be an int, got "
            f"{type(num_ipus).__name__}."
        )
    # Every variable is read, so that a wrong one is reported whatever the others say.
    is_model = any([environment.flag(variable) for variable in _MODEL_VARIABLES])
    return not is_model and num_ipus <= _MAX_IPUS


def ipuHardwareVersion() -> int:
    """Return the version of the simulated IPUs: 2, or as ``POPTORCH_IPU_MODEL_VERSION`` says.

    Raises:
        UsageAssertionError: There is no hardware, see :func:`ipuHardwareIsAvailable`.
        UsageValueError: One of the variables holds what it may not.
    """
    if not ipuHardwareIsAvailable():
        raise UsageAssertionError(
            "ipuHardwareVersion: No IPU hardware available: "
            f"{' or '.join(_MODEL_VARIABLES)} is 1. Unset it to use the simulated IPUs."
        )
    return environment.ipu_model_version()
