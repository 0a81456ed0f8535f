"""Parts of the machine model alone, for the comparison with published figures."""

from __future__ import annotations

from popsim_torch import _native

__all__ = [
    "MachineConstant",
    "machine_constant",
    "machine_constants",
    "machine_device",
    "matmul_plan",
]

MachineConstant = _native.MachineConstant


def machine_device(version: int) -> _native.MachineDevice:
    """Return the device of a generation of IPUs: 1, 2 or 21."""
    return _native.MachineDevice(version)


def matmul_plan(
    device: _native.MachineDevice,
    m: int,
    k: int,
    n: int,
    *,
    half: bool,
    half_partials: bool,
    float_result: bool,
) -> _native.MatmulPlan:
    """Return how a product [m, k] x [k, n] is divided over the tiles of a device."""
    return _native.plan_matmul(device, m, k, n, 1, half, half_partials, float_result)


def machine_constants() -> list[MachineConstant]:
    """Return the constants of the model: values, units, grades, sources."""
    return _native.machine_constants()


def machine_constant(name: str) -> float:
    """Return a constant of the model, by its name."""
    return next(one.value for one in machine_constants() if one.name == name)
