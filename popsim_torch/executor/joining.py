"""Joins the processes that train one program: they compare it, and start with equal state."""

from __future__ import annotations

import hashlib
import math
import struct

import torch

from popsim_torch.errors import Error
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.device_state import DeviceState
from popsim_torch.files.program import program_digest
from popsim_torch.options import Options
from popsim_torch.options.limits import num_replicas
from popsim_torch.processes.exchange import GradientExchange
from popsim_torch.processes.peers import Peers, listed

__all__ = ["check_replicas", "join", "share_random_state"]

_RANDOM_STATE = "<QQ"  # seed and step


def check_replicas(compiled: CompiledModel, options: Options) -> None:
    """Check that a program runs in as many replicas as it was compiled for.

    Raises:
        Error: It comes from a file, and was compiled for another number.
    """
    plan, loop = compiled.plan, compiled.run.loop
    here, processes = options.replication_factor, options.Distributed.numProcesses
    if here != loop.replicas:
        raise Error(
            f"This program was compiled for Options.replicationFactor({loop.replicas}), and the "
            f"options have {here}. Compile the model for another number."
        )
    if plan is None or plan.replicas == num_replicas(options):
        return
    needed = plan.replicas // loop.replicas
    raise Error(
        f"This program was compiled to train in {plan.replicas} replicas, over all processes; the "
        f"options have {num_replicas(options)}, in {processes} process"
        f"{'es' if processes > 1 else ''}. Start it with as many as it was saved with, for example "
        f"with torchrun --nproc-per-node {needed}. To continue with another number, wrap the model "
        "anew, and load the weights and the state of the optimizer into it. "
        "poptorch.load(filename, lambda options: "
        "options.connectionType(poptorch.ConnectionType.Never)) reads them in any process."
    )


def join(compiled: CompiledModel, options: Options, state: DeviceState) -> GradientExchange | None:
    """Connect the processes that train a program; wait until all of them are here.

    Args:
        compiled: The program.
        options: Say how many processes there are.
        state: The variables of the program.

    Returns:
        The exchange of gradients; None for a program that one process runs by itself.

    Raises:
        Error: The processes do not meet, or have different programs.
    """
    distributed, tensors = options.Distributed, compiled.program.graph.tensors
    reduced = [op for op in compiled.program.graph.ops if op.kind == "all_reduce"]
    if not reduced or distributed.numProcesses == 1:
        return None
    peers = Peers(distributed.processId, distributed.numProcesses, distributed.wait_seconds)
    _compare(peers, compiled)
    numbers = sum(math.prod(tensors[i].host_shape) for op in reduced for i in op.inputs)
    return GradientExchange(peers, numbers, state.hyper_parameter_text)


def _compare(peers: Peers, compiled: CompiledModel) -> None:
    """Check that all processes have the same program."""
    text = f"{program_digest(compiled.program)} {compiled.run.loop}"
    own = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
    found = peers.gather(own, "The comparison of programs")
    ranks = (found != found[0]).any(dim=1).nonzero().flatten().tolist()
    if ranks:
        raise Error(
            f"Options.Distributed: {listed(ranks)} of {peers.size} and process 0 have compiled "
            "different programs. All processes must wrap the same model with the same options and "
            "an optimizer of the same structure, and call it with inputs of the same shapes; "
            "buffers of integers must be equal. print(model.program()) shows a program, if "
            "options.Distributed.disable() is called before."
        )


def share_random_state(exchange: GradientExchange, compiled: CompiledModel) -> None:
    """Continue with the random numbers of process 0; each process gets other ones."""
    executable = compiled.executable
    packed = bytearray(struct.pack(_RANDOM_STATE, executable.seed, executable.step))
    exchange.peers.broadcast(torch.frombuffer(packed, dtype=torch.uint8), "Sharing the seed")
    executable.seed, executable.step = struct.unpack(_RANDOM_STATE, packed)
