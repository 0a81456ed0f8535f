"""What programs would cost on the simulated machine that the options choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from popsim_torch import logs
from popsim_torch.errors import Error
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.ir import Program, RunSettings
from popsim_torch.machine import Estimate, EstimateRequest, Placings, estimate_program
from popsim_torch.options import Options

__all__ = ["check_memory", "compiled_estimate", "estimate_request"]

_BACK_END = "popart_exception"
_NO_ROOM = "Out of memory: Cannot fit all variable data onto one or more tiles."


def estimate_request(
    program: Program,
    run: RunSettings,
    options: Options,
    *,
    trains: bool,
    fed: bool = False,
    shapes: Sequence[Sequence[int]] = (),
) -> EstimateRequest:
    """Return the request to estimate a program for the machine of the options.

    Args:
        program: The program that is the same on every machine.
        run: The settings of its runs.
        options: The options of the model.
        trains: Whether it trains.
        fed: Whether its inputs come from queues, which have the next elements ready.
        shapes: The shapes of the arguments of a call, if the device makes the inputs.

    Raises:
        Error: The machine has fewer IPUs than the program takes.
    """
    locations = options.TensorLocations
    io_tiles = int(locations("numIOTiles")) if locations.exists("numIOTiles") else 0
    machine = options._simulated
    if machine.ipus is not None and run.num_ipus > machine.ipus:
        raise Error(
            f"Options.machine(ipus={machine.ipus}): the model takes {run.num_ipus} IPUs. "
            "Pass a larger number, use fewer stages or replicas, or let popsim_torch.plan choose "
            "the stages."
        )
    return EstimateRequest(
        program,
        run,
        trains,
        version=machine.version,
        tiles=machine.tiles,
        io_tiles=io_tiles,
        proportions=options.available_memory_proportion,
        placings=Placings(options, run.loop.replicas * run.num_processes),
        feed="waiting" if fed else "staged",
        overlaps_io=bool(io_tiles),
        micro_batch=_micro_batch(shapes, run),
    )


def _micro_batch(shapes: Sequence[Sequence[int]], run: RunSettings) -> int | None:
    """Return the items of a micro-batch, by the arguments of a call; None if they do not tell."""
    if run.reads_inputs:
        return None
    loop = run.loop
    count = loop.device_iterations * loop.gradient_accumulation * loop.num_inputs
    return next((shape[0] // count for shape in shapes if shape), None)


def compiled_estimate(compiled: CompiledModel, options: Options) -> Estimate:
    """Return the estimate of a compiled model."""
    fed = compiled.queues is not None and compiled.queues.feeds_program
    request = estimate_request(
        compiled.program,
        compiled.run,
        options,
        trains=compiled.plan is not None,
        fed=fed,
        shapes=compiled.arguments.shapes,
    )
    return estimate_program(request)


def check_memory(
    program: Program,
    run: RunSettings,
    options: Options,
    *,
    trains: bool,
    report: Callable[[Estimate], Path | None] = lambda estimate: None,
) -> None:
    """Warn or raise an error if a program does not fit ``Options.machine``.

    Without that setting nothing is estimated.

    Args:
        program: The program that is the same on every machine.
        run: The settings of its runs.
        options: The options of the model.
        trains: Whether it trains.
        report: Writes the report of a program that is refused, if the options ask for one, and
            returns its folder.

    Raises:
        Error: The machine has too few IPUs; or the program does not fit, and the options ask for
            an error.
    """
    machine = options._simulated
    if not machine.checks_memory:
        return
    request = estimate_request(program, run, options, trains=trains)
    if machine.out_of_memory == "ignore":
        return
    estimate = estimate_program(request)
    if estimate.verdict != "does not fit":
        return
    text = _description(estimate)
    if machine.out_of_memory == "raise":
        folder = report(estimate)
        if folder is None:
            logs.python.error("%s", text)
        else:
            where = f"Out of memory, the graph profile is available here: {folder}"
            logs.python.error("%s", where)
            text = f"{text} {where}"
        raise Error(text, error_type=_BACK_END)
    logs.python.warning(
        "%s The program runs all the same; Options.machine(out_of_memory='raise') makes this an "
        "error.",
        text,
    )


def _description(estimate: Estimate) -> str:
    """Return the text about a program that does not fit."""
    worst = max(estimate.ipus, key=lambda ipu: ipu.memory.peak)
    memory = worst.memory
    largest = max(memory.classes, key=lambda name: memory.classes[name][0])
    return (
        f"{_NO_ROOM} Simulated: a tile of IPU {worst.ipu} needs about "
        f"{memory.peak / memory.capacity:.1f} times its {memory.capacity} bytes, most of it for "
        f"{largest}. Use recomputation, a smaller micro-batch, more IPUs or a smaller "
        "setAvailableMemoryProportion; popsim_torch.plan proposes stages that fit, and "
        "executor.estimate() shows where the memory goes."
    )
