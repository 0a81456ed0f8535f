"""Records what a function computes outside of its loops; the host computes it in every call.

Each call of a torch function runs at once, and again in every later call of the recorded function,
on the tensors of that call. So the values are those of eager PyTorch. Code that turns tensor values
into Python values is refused, because the function's Python code runs only once.
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
# Results of these types follow from shapes and dtypes.
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
    """A call of a torch function that every call of the recorded function repeats.

    Attributes:
        function: The torch function.
        leaves: The leaves of its arguments; recorded values in the place of tensors.
        structure: The structure of the arguments.
        surroundings: The settings of PyTorch at the call.
        changed: Tensors from outside of the function that the call changes in place. From then on
            they belong to the function, like its results: later loops read the new values.
    """

    function: Callable[..., Any]
    leaves: Sequence[Any]
    structure: TreeSpec
    surroundings: tuple[Any, ...]
    changed: Sequence[torch.Tensor] = ()

    def __call__(self, tensors: list[torch.Tensor]) -> None:
        """Compute the call again; append the results to the tensors of the function's call."""
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
        tensors: The tensors of the function.
        record: Records a call.
    """

    def __init__(self, tensors: RecordedTensors, record: Callable[[Computation], None]) -> None:
        super().__init__()
        self._tensors = tensors
        self._record = record
        # The tensors from outside that were arguments of calls, by id.
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
                "takes Python functions, which can only be recorded in the body of a loop. Call "
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
                f"poptorch.function: '{name}'{user_line(' at ')} turns values that differ "
                "from call to call into Python values, outside of a loop. The Python code of the "
                "function runs once, so later calls would use the values of the first call. Use "
                "torch.where instead of `if`, or return the tensor and read it after the call of "
                "the function."
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
        """Return the tensors from outside that share memory with changed tensors."""
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
        """Refuse a call that cannot be repeated in later calls."""
        refused = ""
        if name == "backward":
            refused = (
                "gradients are computed in the body of a loop: results of loops do not lead back "
                "to weights. Call backward() and optimizer.step() in the body of poptorch.repeat."
            )
        elif any(map(is_functorch_wrapped_tensor, given)):
            refused = "transforms of torch.func are supported only in a loop body. Call them there."
        elif differs and name in ("__deepcopy__", "__reduce_ex__"):
            refused = "a tensor cannot be copied in this way. Use tensor.clone()."
        elif any(isinstance(leaf, slice) and _holds_tensor(leaf) for leaf in leaves):
            refused = "a slice has tensors as bounds. Use tensor.narrow, or Python integers."
        if refused:
            raise Error(
                f"poptorch.function: '{name}' is called{user_line(' at ')} outside of a loop, and "
                f"{refused}"
            )


def _refuse_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    # The hook runs in all threads; only the thread that records has the mode.
    modes = function_modes()
    if any(isinstance(mode, OutsideOfLoops) for mode in modes):
        raise Error(
            f"poptorch.function: {type(optimizer).__name__}.step() is called{user_line(' at ')} "
            "outside of a loop. Weights are updated in the body of a loop: call it there, or "
            "outside of the function."
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
