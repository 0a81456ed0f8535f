"""The passes over a program, in their order: those that state it, then those that fit it to a host.

Between the two lists a program is the same on every machine; costs, reports, files and golden texts
read it there. Each pass rewrites a program in place. The program is verified after the first list,
and the device's library verifies what it is given (``csrc/ops/check.h``). With the environment
variable ``POPSIM_VERIFY_PASSES=1`` it is verified after each pass, so that an error tells which.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from popsim_torch.errors import InternalError
from popsim_torch.ir import Graph, Program, TensorKind, graphs, walk
from popsim_torch.passes import (
    fuse_attention,
    fuse_elementwise,
    fuse_loss_gradient,
    fuse_products,
)
from popsim_torch.passes.group_updates import group_updates
from popsim_torch.passes.patterns import Rewrite
from popsim_torch.passes.recompute import recompute
from popsim_torch.passes.recompute_choice import Recomputation
from popsim_torch.passes.returns import ReturnRequest, add_returns
from popsim_torch.passes.stage_tensors import add_stage_tensors
from popsim_torch.passes.stochastic_rounding import round_at_random
from popsim_torch.passes.synthetic_data import SyntheticData, make_inputs
from popsim_torch.passes.verify import verify, verify_names


@dataclass(frozen=True)
class ProgramRequest:
    """What the user's options ask of a program.

    Attributes:
        recomputation: Which forward values the backward pass rebuilds.
        returns: What a run brings back.
        ipu_of_stage: The IPU of each pipeline stage.
        stochastic_rounding: Whether float16 results are rounded at random.
        synthetic_data: Which inputs the device makes by itself.
    """

    recomputation: Recomputation
    returns: ReturnRequest
    ipu_of_stage: Mapping[int, int] = field(default_factory=dict)
    stochastic_rounding: bool = False
    synthetic_data: SyntheticData = SyntheticData.NONE


def invent_inputs(program: Program, request: ProgramRequest) -> None:
    """Let the device make its inputs, if the options say so."""
    make_inputs(program, request.synthetic_data)


def round_results(program: Program, request: ProgramRequest) -> None:
    """Round float16 results at random, if the options say so."""
    if request.stochastic_rounding:
        round_at_random(program)


def rebuild_values(program: Program, request: ProgramRequest) -> None:
    """Rebuild forward values in the backward pass, as the options say."""
    recompute(program.graph, request.recomputation, program.checkpoints)


def name_stage_tensors(program: Program, request: ProgramRequest) -> None:
    """Give names to what crosses from one stage to another."""
    returns = request.returns
    add_stage_tensors(program, request.ipu_of_stage, returns.pipelined)


def bring_back(program: Program, request: ProgramRequest) -> None:
    """Let outputs, changed inputs and anchored tensors come back from a run."""
    add_returns(program, request.returns)


PROGRAM_PASSES: tuple[Callable[[Program, ProgramRequest], object], ...] = (
    invent_inputs,
    round_results,
    rebuild_values,
    name_stage_tensors,
    bring_back,
)
"""State the program: with the same result on every machine.

Rounding comes before recomputation, so that what is rebuilt is rounded as the original was.
Recomputation comes before the returns, so that no anchor has a say in what is rebuilt.
"""

HOST_PASSES: tuple[Callable[[Graph], object], ...] = (
    fuse_loss_gradient.fuse_loss_gradient,
    fuse_elementwise.fuse_elementwise,
    fuse_attention.fuse_attention,
    fuse_products.fuse_products,
    group_updates,
)
"""Fit a complete program to the machine that runs it, changing no value."""

REWRITES: tuple[Rewrite, ...] = (
    *fuse_loss_gradient.REWRITES,
    *fuse_elementwise.REWRITES,
    *fuse_attention.REWRITES,
    *fuse_products.REWRITES,
)
"""All patterns of the host passes and what takes their place, in the order in which they run."""


def run_program_passes(program: Program, request: ProgramRequest) -> Iterator[str]:
    """Run the passes that state a program, in place, and yield the name of each after it.

    Args:
        program: As it was lowered.
        request: What the options ask for.

    Raises:
        Error: The options ask for what the program does not have.
        InternalError: The program breaks a rule; our own bug.
    """
    each = _verifies_passes()
    in_flight = request.returns.pipelined
    if each:
        verify(program.graph, in_flight=in_flight)
    for run_pass in PROGRAM_PASSES:
        run_pass(program, request)
        if each:
            _verify(run_pass, program, in_flight=in_flight)
        yield run_pass.__name__
    if not each:
        # All else is looked at as the program is prepared to run.
        verify_names(program.graph)


def run_host_passes(program: Program, *, pipelined: bool) -> Iterator[str]:
    """Run the passes that fit a program to this host, in place, and yield the name of each.

    Args:
        program: A complete program, all passes that state it done.
        pipelined: Several micro-batches are in flight at a time.

    Raises:
        InternalError: The program breaks a rule; our own bug.
    """
    each = _verifies_passes()
    for run_pass in HOST_PASSES:
        for graph in graphs(program.graph):
            run_pass(graph)
            if each or run_pass is HOST_PASSES[-1]:
                forget_uncomputed(graph)
        if each:
            _verify(run_pass, program, in_flight=pipelined)
        yield run_pass.__name__


def _verify(run_pass: Callable[..., object], program: Program, *, in_flight: bool) -> None:
    """Verify a program after a pass, which the message names."""
    try:
        verify(program.graph, in_flight=in_flight)
    except InternalError as error:
        raise InternalError(f"after the pass {run_pass.__name__}: {error.message}") from error


def _verifies_passes() -> bool:
    return os.environ.get("POPSIM_VERIFY_PASSES") == "1"


def forget_uncomputed(graph: Graph) -> None:
    """Take the names away from values that no op writes any more."""
    written = {root.id for _, op in walk(graph) for root in graph.roots(op.outputs)}
    graph.names = {
        name: tensor_id
        for name, tensor_id in graph.names.items()
        if (root := graph.root_of(tensor_id)).kind != TensorKind.VALUE or root.id in written
    }
