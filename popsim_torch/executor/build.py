"""Builds an executable: the one call that hands a program of ``ir`` to C++."""

from __future__ import annotations

from popsim_torch import _native, environment
from popsim_torch.enums import PipelineSchedule
from popsim_torch.executor.observed import Observed
from popsim_torch.ir import LoopCounts, Program
from popsim_torch.passes.native_graph import to_native
from popsim_torch.stages import native_name


def executable_text(executable: _native.Executable) -> str:
    """Return what an executable runs, in which order, and how much memory it takes."""
    plan = executable.plan
    return (
        f"{executable.actions()}\n\n{executable.program()}\n"
        f"arena: {plan.arena_bytes} bytes, live at most {plan.peak_live_bytes}\n"
        f"persistent: {plan.persistent_bytes} bytes\n"
    )


def build_executable(
    program: Program,
    loop: LoopCounts,
    *,
    training: bool,
    schedule: PipelineSchedule = PipelineSchedule.Sequential,
    floating_point_checks: bool = False,
    fed: bool = False,
    positions: tuple[int, ...] = (),
    process: int = 0,
    num_processes: int = 1,
    observed: Observed | None = None,
) -> _native.Executable:
    """Compile a program: prepare kernels, plan and allocate memory, write constants.

    Args:
        program: The lowered model.
        loop: How often a call runs the program.
        training: Whether the program has a backward pass and updates.
        schedule: The order in which micro-batches run; ``Default`` is PopTorch's pipeline.
        floating_point_checks: Whether a run ends at the first op whose arithmetic fails.
        fed: Whether inputs come from queues.
        positions: The position of each stage, see ``RunSettings``.
        process: The number of this process among those that run the program together.
        num_processes: The number of these processes.
        observed: A second version of the program, which some device iterations run.

    Raises:
        Error: An op cannot be prepared, or an op that runs at compile time fails.
        InternalError: The program breaks a rule of the IR; this is a bug of this package.
    """
    config = _native.RunConfig(
        loop.device_iterations,
        loop.gradient_accumulation,
        training,
        native_name(schedule),
        floating_point_checks,
        fed,
        environment.stage_threads(),
        positions,
        num_processes,
        process,
        loop.replicas,
        loop.input_groups,
        {t.id: t.replica_groups for t in program.graph.tensors if t.replica_groups},
    )
    with _native.translated_errors():
        graph = to_native(program.graph)
        if observed is None:
            executable = _native.Executable(graph, config)
        else:
            twin = to_native(observed.program.graph)
            executable = _native.Executable(graph, config, twin, observed.num_shared)
        for tensor in program.graph.tensors:
            if tensor.value is not None:
                executable.write(tensor.id, tensor.value)
        if observed is not None:
            _write_own_constants(executable, observed)
            executable.set_pace(observed.every or 0, observed.budget)
        executable.load()
    return executable


def _write_own_constants(executable: _native.Executable, observed: Observed) -> None:
    """Write the constants that only the observed version has."""
    for tensor in observed.program.graph.tensors[observed.num_shared :]:
        if tensor.value is not None:
            executable.write_observed(tensor.id, tensor.value)
