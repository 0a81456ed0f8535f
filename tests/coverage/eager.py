"""What eager PyTorch gives for a call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from tests.coverage.call import Call, out_of_scope, parts, tensor_leaves, weighted
from tests.coverage.outcome import Outcome

_DYNAMIC = (DataDependentOutputException, DynamicOutputShapeException)


class NothingToCompare(Exception):
    """There is no result of eager PyTorch.

    Attributes:
        outcome: Why.
    """

    def __init__(self, kind: str, reason: str = "") -> None:
        super().__init__(kind)
        self.outcome = Outcome(kind, reason)


@contextmanager
def _undisturbed(call: Call) -> Iterator[None]:
    """Ignore warnings, restore buffers, and say why eager PyTorch refuses."""
    buffers = {} if call.module is None else dict(call.module.named_buffers())
    before = {name: value.detach().clone() for name, value in buffers.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except NothingToCompare:
        raise
    except Exception as error:
        raise NothingToCompare("eager", f"{type(error).__name__}: {error}") from error
    finally:
        with torch.no_grad():
            for name, value in before.items():
                buffers[name].copy_(value)


def results(call: Call, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return the tensors of the results.

    Args:
        call: The call.
        dtype: The dtype of floating-point numbers; None: as they are.

    Raises:
        NothingToCompare: There are none.
    """
    if call.out_of_scope:
        raise NothingToCompare(call.out_of_scope)
    with _undisturbed(call), torch.no_grad():
        result = call(call.tensors(dtype))
        found = [tensor.detach().clone() for tensor in tensor_leaves(result)]
    if not found:
        raise NothingToCompare("python", type(result).__name__)
    if out_of_scope(found):
        raise NothingToCompare(out_of_scope(found))
    return found


def wide_results(call: Call) -> list[torch.Tensor] | None:
    """Return the results in float64; None if there are none."""
    try:
        return results(_widened(call), torch.float64)
    except NothingToCompare:
        return None


def gradients(call: Call, dtype: torch.dtype | None = None) -> dict[Any, torch.Tensor]:
    """Return the gradients, by the number of the tensor or the name of the parameter.

    Raises:
        NothingToCompare: There are none.
    """
    if call.out_of_scope:
        raise NothingToCompare(call.out_of_scope)
    tensors = call.tensors(dtype)
    leaves: dict[Any, torch.Tensor] = {i: t for i, t in enumerate(tensors) if t.requires_grad}
    if call.module is not None:
        call.module.zero_grad(set_to_none=True)
        leaves |= dict(call.module.named_parameters())
    with _undisturbed(call):
        # What changes its argument must not get a leaf.
        result = call([t.view_as(t) if t.requires_grad else t for t in tensors])
        for found in (result, call.keep(result)):
            if out_of_scope(tensor_leaves(found)):
                raise NothingToCompare(out_of_scope(tensor_leaves(found)))
        result = call.keep(result)
        loss = weighted(result)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise NothingToCompare("constant")
        loss.backward()
    found = {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
    if not found:
        raise NothingToCompare("constant")
    if out_of_scope(list(found.values())):
        raise NothingToCompare(out_of_scope(list(found.values())))
    return found


def wide_gradients(call: Call) -> dict[Any, torch.Tensor]:
    """Return the gradients in float64; empty if there are none."""
    try:
        return gradients(_widened(call), torch.float64)
    except NothingToCompare:
        return {}


def _widened(call: Call) -> Call:
    """Return a call whose module computes in float64."""
    if call.module is None:
        return call
    module = copy.deepcopy(call.module).double()
    return Call(module, call.structure, call.keep, module)


def is_random(call: Call) -> bool:
    """Return whether the results are drawn: calls differ."""

    def drawn(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return [parts(result).nan_to_num() for result in results(call)]

    try:
        first = drawn(0)
        return any(
            not torch.equal(one, other)
            for seed in range(1, 12)
            for one, other in zip(first, drawn(seed), strict=True)
        )
    except NothingToCompare:
        return False


def is_dynamic(call: Call) -> bool:
    """Return whether values decide the shapes of results or the course of the call."""
    mode = FakeTensorMode()
    tensors = [mode.from_tensor(tensor) for tensor in call.tensors()]
    try:
        with warnings.catch_warnings(), mode:
            warnings.simplefilter("ignore")
            call(tensors)
    except _DYNAMIC:
        return True
    except Exception:
        return False
    return False
