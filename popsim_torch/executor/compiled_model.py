"""``CompiledModel``: a program on the device, and how user calls map to it."""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass

import torch

from popsim_torch import _native
from popsim_torch.arguments import ArgumentSpec, OutputSpec
from popsim_torch.executor.compile_log import CompileLog
from popsim_torch.executor.host_code import HostCode
from popsim_torch.executor.queues import Queues
from popsim_torch.ir import Program, RunSettings
from popsim_torch.optim.plan import OptimizerPlan
from popsim_torch.tables import Described

__all__ = ["CompiledModel"]


@dataclass(frozen=True)
class CompiledModel(Described):
    """A program on the device, and how user calls map to it.

    Attributes:
        executable: The program as it runs.
        program: What it computes, the same on every machine.
        host_program: The program as it was fitted to this host.
        run: How it runs.
        arguments: What calls must look like.
        outputs: What calls return.
        input_dtypes: Element type on the device, per input.
        converts_inputs: Whether any of them is not the caller's type, or none is taken.
        plan: The optimizer's updates; None for inference.
        log: The steps of the compilation.
        duration: How long compilation took.
        host_code: What the program calls of the host's code; None if it calls nothing.
        queues: The queues that the program feeds or is fed from; None if there are none.
        optimizers: Those that the body of a device loop steps.
    """

    executable: _native.Executable
    program: Program
    host_program: Program
    run: RunSettings
    arguments: ArgumentSpec
    outputs: OutputSpec
    input_dtypes: tuple[torch.dtype, ...]
    converts_inputs: bool
    plan: OptimizerPlan | None
    log: CompileLog
    duration: datetime.timedelta = datetime.timedelta()
    host_code: HostCode | None = None
    queues: Queues | None = None
    optimizers: list[torch.optim.Optimizer] = dataclasses.field(default_factory=list)

    def __repr__(self) -> str:
        figures = self._figures()
        return f"CompiledModel({', '.join(f'{name} {value}' for name, value in figures.items())})"

    def _figures(self) -> dict[str, object]:
        return {
            "ops": len(self.program.graph.ops),
            "ops as they run": len(self.host_program.graph.ops),
            "IPUs": self.run.num_ipus,
            "device iterations": self.run.loop.device_iterations,
            "micro-batches per weight update": self.run.loop.gradient_accumulation,
            "seconds to compile": round(self.duration.total_seconds(), 3),
        }
