"""What a program would cost on an IPU: cycles, memory, time. All of it is simulated."""

from popsim_torch.machine.estimate import Estimate
from popsim_torch.machine.formulas import (
    MachineConstant,
    machine_constant,
    machine_constants,
    machine_device,
    matmul_plan,
)
from popsim_torch.machine.parts import (
    Batch,
    CallParts,
    IpuCost,
    IpuMemory,
    Latency,
    Link,
    MachineInfo,
    ModuleCost,
    OpCost,
    ScheduledSlot,
    SlotAction,
    SlotStretch,
    StashEntry,
    Traffic,
    Variable,
)
from popsim_torch.machine.placing import Placing, Placings
from popsim_torch.machine.program import EstimateRequest, estimate_program

__all__ = [
    "Batch",
    "CallParts",
    "Estimate",
    "EstimateRequest",
    "IpuCost",
    "IpuMemory",
    "Latency",
    "Link",
    "MachineConstant",
    "MachineInfo",
    "ModuleCost",
    "OpCost",
    "Placing",
    "Placings",
    "ScheduledSlot",
    "SlotAction",
    "SlotStretch",
    "StashEntry",
    "Traffic",
    "Variable",
    "estimate_program",
    "machine_constant",
    "machine_constants",
    "machine_device",
    "matmul_plan",
]
