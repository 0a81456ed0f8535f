"""The passes over a program, in order: those that complete it, then those that fit it to a host.

Between the two lists a program is the same on every machine; costs, reports, files and golden texts
use this form. Each pass rewrites a program in place. The program is verified after the first list,
and the device's library verifies its input (``csrc/ops/check.h``). With the environment variable
``POPSIM_VERIFY_PASSES=1`` it is verified after each pass, and the error names the pass.
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
    """The requests of the user's options to a program.

    Attributes:
        recomputation: Which forward values the backward pass recomputes.
        returns: The tensors that a run returns.
        ipu_of_stage: The IPU of each pipeline stage.
        positions: The position of each stage, see ``RunSettings``.
        stochastic_rounding: Whether float16 results are rounded at random.
        synthetic_data: Which inputs the device makes.
        last_stage_turns: Whether the last stage runs the backward pass of a micro-batch directly
            after its forward pass, and so keeps nothing for it.
    """

    recomputation: Recomputation
    returns: ReturnRequest
    ipu_of_stage: Mapping[int, int] = field(default_factory=dict)
    positions: tuple[int, ...] = ()
    stochastic_rounding: bool = False
    synthetic_data: SyntheticData = SyntheticData.NONE
    last_stage_turns: bool = True


def invent_inputs(program: Program, request: ProgramRequest) -> None:
    """Make the device generate its inputs, if the options say so."""
    make_inputs(program, request.synthetic_data)


def round_results(program: Program, request: ProgramRequest) -> None:
    """Round float16 results at random, if the options say so."""
    if request.stochastic_rounding:
        round_at_random(program)


def rebuild_values(program: Program, request: ProgramRequest) -> None:
    """Recompute forward values in the backward pass, as the options say."""
    recompute(program.graph, request.recomputation, program.checkpoints, request.positions)


def name_stage_tensors(program: Program, request: ProgramRequest) -> None:
    """Name the tensors that cross from one stage to another."""
    add_stage_tensors(
        program,
        request.ipu_of_stage,
        pipelined=request.returns.pipelined,
        last_stage_turns=request.last_stage_turns,
        positions=request.positions,
    )


def bring_back(program: Program, request: ProgramRequest) -> None:
    """Return outputs, changed inputs and anchored tensors from a run."""
    add_returns(program, request.returns)


PROGRAM_PASSES: tuple[Callable[[Program, ProgramRequest], object], ...] = (
    invent_inputs,
    round_results,
    rebuild_values,
    name_stage_tensors,
    bring_back,
)
"""Complete the program: with the same result on every machine.

Rounding comes before recomputation, so that recomputed values are rounded like the originals.
Recomputation comes before the returns, so that anchors do not influence it.
"""

HOST_PASSES: tuple[Callable[[Graph], object], ...] = (
    fuse_loss_gradient.fuse_loss_gradient,
    fuse_elementwise.fuse_elementwise,
    fuse_attention.fuse_attention,
    fuse_products.fuse_products,
    group_updates,
)
"""Fit a complete program to the machine that runs it, without changing a value."""

REWRITES: tuple[Rewrite, ...] = (
    *fuse_loss_gradient.REWRITES,
    *fuse_elementwise.REWRITES,
    *fuse_attention.REWRITES,
    *fuse_products.REWRITES,
)
"""All patterns and replacements of the host passes, in the order in which they run."""


def run_program_passes(program: Program, request: ProgramRequest) -> Iterator[str]:
    """Run the passes that complete a program, in place; yield the name of each one after it.

    Args:
        program: The program from lowering.
        request: The requests of the options.

    Raises:
        Error: The options ask for a tensor that the program does not have.
        InternalError: The program breaks a rule; this is a bug of this package.
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
        # All other rules are checked when the program is prepared to run.
        verify_names(program.graph)


def run_host_passes(program: Program, *, pipelined: bool) -> Iterator[str]:
    """Run the passes that fit a program to this host, in place; yield the name of each one.

    Args:
        program: A program after all passes that complete it.
        pipelined: Whether several micro-batches are in flight at a time.

    Raises:
        InternalError: The program breaks a rule; this is a bug of this package.
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
    """Verify a program after a pass; the error names the pass."""
    try:
        verify(program.graph, in_flight=in_flight)
    except InternalError as error:
        raise InternalError(f"after the pass {run_pass.__name__}: {error.message}") from error


def _verifies_passes() -> bool:
    return os.environ.get("POPSIM_VERIFY_PASSES") == "1"


def forget_uncomputed(graph: Graph) -> None:
    """Remove the names of values that no op writes any more."""
    written = {root.id for _, op in walk(graph) for root in graph.roots(op.outputs)}
    graph.names = {
        name: tensor_id
        for name, tensor_id in graph.names.items()
        if (root := graph.root_of(tensor_id)).kind != TensorKind.VALUE or root.id in written
    }
