"""What a function computes outside of its loops: recorded call by call, and computed on the host.

Each call of a torch function is run as it is met, and once more in every later call of the recorded
function, on that call's tensors. So the values are those of eager PyTorch. What turns values into
something of Python's is refused: the function's Python code runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from popsim_torch.errors import Error
from popsim_torch.executor.host_weights import METADATA
from popsim_torch.loops.recorded import RecordedTensors, RecordedValue
from popsim_torch.private_torch.modes import function_modes
from popsim_torch.private_torch.operators import HigherOrderOperator
from popsim_torch.private_torch.tensors import version_of
from popsim_torch.private_torch.trees import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from popsim_torch.trace.call_arguments import draws_random_numbers
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import has_memory, is_functorch_wrapped_tensor

__all__ = ["Computation", "OutsideOfLoops", "surroundings"]

_RANDOM = frozenset({"rand", "randn", "randint", "randperm"})
# Results that follow from shapes and types.
_TELL_NO_VALUE = (torch.dtype, torch.Size, torch.device, torch.layout)


def surroundings() -> tuple[Any, ...]:
    """Return the settings of this thread that the results of torch functions depend on."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


@contextmanager
def _in_surroundings(settings: tuple[Any, ...]) -> Iterator[None]:
    if settings == surroundings():
        yield
        return
    grad, autocast, dtype = settings
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=dtype, enabled=autocast):
        yield


@dataclass(frozen=True)
class Computation:
    """A call of a torch function, which each call of the recorded function makes.

    Attributes:
        function: What is called.
        leaves: What is in its arguments; values in the place of tensors.
        structure: How the arguments are put together.
        surroundings: The settings with which it was called.
        changed: Tensors from outside of the function that it changes in place. From then on they
            are the function's own, like its results: loops that follow read the new values.
    """

    function: Callable[..., Any]
    leaves: Sequence[Any]
    structure: TreeSpec
    surroundings: tuple[Any, ...]
    changed: Sequence[torch.Tensor] = ()

    def __call__(self, tensors: list[torch.Tensor]) -> None:
        """Compute in one call, whose tensors get the results."""
        leaves = [
            one.among(tensors) if isinstance(one, RecordedValue) else one for one in self.leaves
        ]
        args, kwargs = tree_unflatten(leaves, self.structure)
        with _in_surroundings(self.surroundings):
            tensors.extend(_tensors_in(self.function(*args, **kwargs)))
        tensors.extend(self.changed)


class OutsideOfLoops(TorchFunctionMode):
    """Records the calls of torch functions outside of loops.

    Args:
        tensors: Those of the function.
        record: Takes each call.
    """

    def __init__(self, tensors: RecordedTensors, record: Callable[[Computation], None]) -> None:
        super().__init__()
        self._tensors = tensors
        self._record = record
        # Tensors from outside that calls were given, by identity.
        self._met: dict[int, torch.Tensor] = {}

    def __enter__(self) -> OutsideOfLoops:
        self._hook = register_optimizer_step_pre_hook(_refuse_step)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._hook.remove()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one call of a torch function, and record it."""
        leaves, structure = tree_flatten((args, kwargs or {}))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        name = getattr(func, "__name__", "")
        if isinstance(func, HigherOrderOperator):
            raise Error(
                f"poptorch.function: '{name}' is called{user_line(' at ')} outside of a loop, and "
                "takes functions of Python's, which are recorded in the body of a loop only. Call "
                "it there, or use torch.where or a Python loop."
            )
        if name == "__iter__":
            with self:
                return iter(args[0].unbind(0))
        self._met.update((id(t), t) for t in given if self._tensors.number_of(t) is None)
        differs = any(map(self._tensors.differs, given))
        self._check(name, leaves, given, differs=differs)
        versions = [_version(tensor) for tensor in given]
        settings, values = surroundings(), [self._value(leaf) for leaf in leaves]
        result = func(*args, **(kwargs or {}))
        made = _tensors_in(result)
        differs = differs or name in _RANDOM or draws_random_numbers(func, kwargs or {})
        changed = [t for t, v in zip(given, versions, strict=True) if _version(t) != v]
        if made or (given and result is None):
            outside = self._from_outside(changed, made)
            self._record(Computation(func, values, structure, settings, outside))
            made += outside
        elif differs and func not in METADATA and not isinstance(result, _TELL_NO_VALUE):
            raise Error(
                f"poptorch.function: '{name}'{user_line(' at ')} turns values that differ from "
                "call to call into something of Python's, outside of a loop. The Python code of "
                "the function runs once, so later calls would have those of the first one. Use "
                "torch.where in the place of `if`, or return the tensor and read it where the "
                "function was called."
            )
        if differs:
            for tensor in changed:
                self._tensors.changed(tensor)
        for tensor in made:
            changed_here = self._tensors.differs(tensor)
            self._tensors.add(tensor, differs=differs or changed_here)
        return result

    def _from_outside(
        self, changed: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the tensors without a number that have the memory of changed ones."""
        memory = {_memory(one) for one in changed if has_memory(one)}
        known = (*changed, *self._met.values())
        found = {id(one): one for one in known if has_memory(one) and _memory(one) in memory}
        return [
            one
            for one in found.values()
            if self._tensors.number_of(one) is None
            and not isinstance(one, nn.Parameter)
            and not any(one is other for other in made)
        ]

    def _value(self, leaf: Any) -> Any:
        return self._tensors.value(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _check(
        self,
        name: str,
        leaves: Sequence[Any],
        given: Sequence[torch.Tensor],
        *,
        differs: bool,
    ) -> None:
        """Refuse a call that cannot be made again."""
        refused = ""
        if name == "backward":
            refused = (
                "gradients are computed in the body of a loop: results of loops do not lead back "
                "to weights. Call backward() and optimizer.step() in the body of poptorch.repeat."
            )
        elif any(map(is_functorch_wrapped_tensor, given)):
            refused = "transforms of torch.func work in the body of a loop. Call them there."
        elif differs and name in ("__deepcopy__", "__reduce_ex__"):
            refused = "a tensor cannot be copied in this way. Use tensor.clone()."
        elif any(isinstance(leaf, slice) and _holds_tensor(leaf) for leaf in leaves):
            refused = "a slice has tensors for bounds. Use tensor.narrow, or Python's numbers."
        if refused:
            raise Error(
                f"poptorch.function: '{name}' is called{user_line(' at ')} outside of a loop, and "
                f"{refused}"
            )


def _refuse_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    # The hook is called in all threads; only the one that records has the mode.
    modes = function_modes()
    if any(isinstance(mode, OutsideOfLoops) for mode in modes):
        raise Error(
            f"poptorch.function: {type(optimizer).__name__}.step() is called{user_line(' at ')} "
            "outside of a loop. Weights are updated in the body of a loop: call it there, or where "
            "the function was called."
        )


def _holds_tensor(bounds: slice) -> bool:
    return any(isinstance(one, torch.Tensor) for one in (bounds.start, bounds.stop, bounds.step))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _tensors_in(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
