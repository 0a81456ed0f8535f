"""``CompiledModel``: a compiled program, and how a user's call maps to it."""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass

import torch

from popsim_torch import _native
from popsim_torch.arguments import ArgumentSpec, OutputSpec
from popsim_torch.executor.compile_log import CompileLog
from popsim_torch.executor.constant_watch import Constant
from popsim_torch.executor.host_code import HostCode
from popsim_torch.executor.observed import Observer
from popsim_torch.executor.queues import Queues
from popsim_torch.ir import Program, RunSettings
from popsim_torch.optim.plan import OptimizerPlan
from popsim_torch.tables import Described

__all__ = ["CompiledModel"]


@dataclass(frozen=True)
class CompiledModel(Described):
    """A compiled program, and how a user's call maps to it.

    Attributes:
        executable: The program in the form that runs.
        program: The program that is the same on every machine.
        host_program: The program, fitted to this host.
        run: The settings of a run.
        arguments: The arguments that calls must have.
        outputs: The results that calls return.
        input_dtypes: The dtype on the device, per input.
        converts_inputs: Whether an input has another dtype on the device than in the call, or the
            device makes the inputs itself.
        plan: The optimizer's updates; None for inference.
        log: The steps of the compilation.
        duration: The time that compilation took.
        host_code: The host functions that the program calls; None if it calls none.
        queues: The queues that the program feeds, and that feed it; None if there are none.
        optimizers: The optimizers that the body of a device loop steps.
        constants: The attributes with host tensors that forward has read.
        observer: Reads the statistics that the program computes; None if it computes none.
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
    constants: tuple[Constant, ...] = ()
    observer: Observer | None = None

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

    def connect(self, queues: Queues | None) -> None:
        """Connect the program with the user's queues, if there are any, and with its observer."""
        if queues is None and self.observer is None:
            return
        more = () if self.observer is None else self.observer.queues
        (queues or Queues({})).connect(self.executable, len(self.input_dtypes), self.run.loop, more)
