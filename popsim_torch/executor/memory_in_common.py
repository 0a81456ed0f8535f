"""Tensors of a model that share memory on the host: the device has a copy of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from popsim_torch.errors import Error
from popsim_torch.executor.host_weights import without_sync
from popsim_torch.ir import Program
from popsim_torch.optim.plan import OptimizerPlan
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.private_torch.trees import tree_leaves
from popsim_torch.trace import TraceResult
from popsim_torch.trace.books.device_loop import DeviceLoopBody
from popsim_torch.trace.graph.traced_tensors import has_memory

__all__ = ["check_apart", "has_elements_apart", "have_elements_in_common", "memory_of"]


def check_apart(
    program: Program, plan: OptimizerPlan | None, traced: TraceResult, module: nn.Module
) -> None:
    """Refuse tensors that change together with others in eager PyTorch.

    Args:
        program: The program, which knows what forward changes.
        plan: The optimizer's updates; None if nothing is trained.
        traced: The trace, with the tensors of the host.
        module: The model.

    Raises:
        Error: The program changes a parameter or buffer that shares memory with another one, or
            with a host tensor that forward reads, or whose elements share memory.
    """
    trained = set() if plan is None else {update.parameter for update in plan.updates}
    # What a loop carries is a value: its changes do not reach the tensor that it begins with.
    carried = set(module.carried_names if isinstance(module, DeviceLoopBody) else ())
    changed = (trained | set(program.changed_state)) - carried
    if not changed and not traced.host_writes:
        return
    hosts = {**traced.parameters, **traced.buffers}
    used = [name for name in (*program.parameters, *program.buffers) if name not in carried]
    for name in sorted(changed & hosts.keys()):
        if not has_elements_apart(hosts[name]):
            raise Error(
                f"{'training' if name in trained else 'forward'} changes '{name}', several "
                "elements of which share their place in memory (expand, unfold). Give the model a "
                "tensor of its own: tensor.contiguous()."
            )
    found = [(name, hosts[name]) for name in used]
    found += [("", one) for one in traced.host_reads]
    with without_sync(), DisableTorchFunction():
        pairs = list(_pairs_in_common(found))
    written = {id(one) for one in traced.host_writes}
    for pair in pairs:
        # A host tensor that shares memory with none but others is the matter of the trace.
        names = [name for name, _ in pair if name]
        for (name, one), other in (pair, pair[::-1]):
            if names and (name in changed or id(one) in written):
                raise Error(
                    f"{'training' if name in trained else 'forward'} changes "
                    f"{_named(name, one, module)}, which shares memory with "
                    f"{_named(*other, module)}. In eager PyTorch both change; the device has a "
                    f"copy of each. {_advice(names, traced)}"
                )


def have_elements_in_common(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a change of one tensor changes the other.

    Args:
        one: A tensor.
        other: Another one.
    """
    (begin, end), (start, stop) = memory_of(one), memory_of(other)
    if start >= end or begin >= stop:
        return False
    size = one.element_size()
    if size != other.element_size() or (start - begin) % size:
        return True
    first = min(begin, start)
    is_of_one = torch.zeros((max(end, stop) - first) // size, dtype=torch.bool)
    is_of_one[_places(one, (begin - first) // size)] = True
    return bool(is_of_one[_places(other, (start - first) // size)].any())


def has_elements_apart(tensor: torch.Tensor) -> bool:
    """Return whether each element of a tensor has a place of its own in memory.

    Args:
        tensor: A tensor of the host.
    """
    extent = 0
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and step <= extent:
            return False
        extent += (n - 1) * step
    return True


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor, and the one after its last element."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return 0, 0
    begin = tensor.data_ptr()
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (steps + 1) * tensor.element_size()


def _places(tensor: torch.Tensor, first: int) -> torch.Tensor:
    """Return the place of each element in memory, counted in elements; the first is given."""
    places = torch.tensor(first)
    for n, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + torch.arange(n) * step
    return places


_Named = tuple[str, torch.Tensor]


def _pairs_in_common(found: Sequence[_Named]) -> Iterator[tuple[_Named, _Named]]:
    """Yield the pairs that have elements in common."""
    ranges = [memory_of(tensor) for _, tensor in found]
    order = sorted(range(len(found)), key=lambda i: ranges[i])
    for at, i in enumerate(order):
        for j in order[at + 1 :]:
            if ranges[j][0] >= ranges[i][1]:
                break
            if have_elements_in_common(found[i][1], found[j][1]):
                yield found[i], found[j]


def _named(name: str, tensor: torch.Tensor, module: nn.Module) -> str:
    if name:
        return f"'{name}'"
    found = {place: leaf for place, leaf in _attributes(module) if has_memory(leaf)}
    with DisableTorchFunction():
        same = [place for place, leaf in found.items() if leaf is tensor]
        behind = [place for place, leaf in found.items() if have_elements_in_common(leaf, tensor)]
    for place in (*same, *behind):
        return f"the attribute '{place}'"
    return f"a host tensor of shape {tuple(tensor.shape)} that forward reads"


def _attributes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in plain attributes of a module and of the modules in it."""
    for path, child in module.named_modules():
        for attribute, value in vars(child).items():
            if attribute not in ("_parameters", "_buffers", "_modules"):
                for leaf in tree_leaves(value):
                    if isinstance(leaf, torch.Tensor):
                        yield f"{path}.{attribute}" if path else attribute, leaf


def _advice(names: Sequence[str], traced: TraceResult) -> str:
    """Return what to do about parameters and buffers, or one of them and a host tensor."""
    if len(names) == 1:
        return f"Make the view in forward, for example self.{names[0]}.t() or self.{names[0]}[0]."
    if all(name in traced.parameters for name in names):
        return (
            "Assign the same nn.Parameter object to both modules, and transpose or slice it in "
            f"forward: F.linear(x, self.{names[0]}.t())."
        )
    return "Register the whole tensor only, and index it in forward: self.whole[0].add_(x)."
