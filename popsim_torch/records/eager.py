"""Records the training of a model that PyTorch itself runs, under the names of programs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from popsim_torch.errors import UsageTypeError
from popsim_torch.ir import names
from popsim_torch.observe.record import Record
from popsim_torch.observe.summary import named_leaves
from popsim_torch.private_torch.tensors import version_of
from popsim_torch.records.tensors import (
    FURTHER_OUTPUT,
    GRADIENT_OF_OUTPUT,
    OUTPUT,
    RecordedTensor,
)
from popsim_torch.records.writer import RunWriter
from popsim_torch.statistics import (
    Fingerprint,
    Moments,
    Request,
    Sample,
    fitting,
    of_pairs,
    statistics_of,
)

__all__ = ["eager_record"]

_DEFAULT_REQUESTS = (Moments(), Fingerprint(), Sample())


class _Summarised(Protocol):
    """An executor: it says which tensors are the outputs of modules."""

    def summary(self) -> Any:
        """Return rows with the path and the outputs of each module."""


@contextmanager
def eager_record(
    model: nn.Module,
    path: str | os.PathLike[str],
    *requests: Request,
    optimizer: torch.optim.Optimizer | None = None,
    like: _Summarised | None = None,
    max_bytes: int | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Iterator[RunWriter]:
    """Record a training loop of PyTorch, to compare it with a run of a program.

    Within the ``with`` block, hooks compute statistics of these tensors:

    * the inputs of the model: ``input``, ``input/1``;
    * what each module returns: ``fc1``, and ``(model)`` for the model itself. The second tensor of
      a call is ``lstm[1]``, the second call ``fc1/1``. A tensor that a module passes on unchanged
      belongs to the module that made it;
    * gradients of these, and of parameters: ``Gradient___fc1``, ``Gradient___fc1.weight``;
    * weights after ``optimizer.step()``: ``UpdatedVar___fc1.weight``.

    ``compare`` knows which results of a program are what a module returns. With ``like`` the run
    has the names of the program itself, ``fc1/Gemm:0``.

    A step ends with ``optimizer.step()``; each call of the model is a micro-batch of it. Calls
    without gradients, such as those of a validation, are not recorded. Neither are modules that are
    called outside of the model. If a backward pass runs twice, the second one counts.

    Args:
        model: The model. Its own ``forward`` is what is compared: a loss that is computed outside
            of it is not recorded.
        path: The folder to write, as for ``RunWriter``.
        *requests: The statistics; ``Moments``, ``Fingerprint`` and ``Sample`` if none is given.
            Tensors that do not have the axis of ``Channels`` have no statistics of channels.
        optimizer: The optimizer. None: each call of the model is a step, also without gradients,
            and no weights are recorded.
        like: The executor of the same model, compiled.
        max_bytes: As for ``RunWriter``.
        meta: As for ``RunWriter``.

    Yields:
        The ``RunWriter``, which also takes whole tensors.

    Raises:
        UsageTypeError: An argument has the wrong type.
        Error: The folder has a run already, or cannot be written.
    """
    if not isinstance(model, nn.Module):
        raise UsageTypeError(
            f"eager_record: the model is a {type(model).__name__}, and an nn.Module is needed."
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageTypeError(
            f"eager_record: the optimizer is a {type(optimizer).__name__}, and one of torch.optim "
            "is needed."
        )
    for one in requests:
        if not isinstance(one, Request):
            raise UsageTypeError(
                f"eager_record: {one!r:.100} asks for no statistics. Pass poptorch.Moments() and "
                "similar ones."
            )
    outputs = {} if like is None else _outputs_of(like)
    with RunWriter(path, max_bytes=max_bytes, meta=meta) as writer, ExitStack() as hooks:
        recorder = _Recorder(writer, requests or _DEFAULT_REQUESTS, outputs, optimizer)
        recorder.watch(model, hooks)
        try:
            yield writer
        finally:
            recorder.finish_step()


# The outputs of modules in a program: names and shapes, by path.
_Outputs = dict[str, list[tuple[str, tuple[int, ...] | None]]]


def _outputs_of(executor: _Summarised) -> _Outputs:
    found: _Outputs = {}
    for row in executor.summary().rows:
        found[row.path] = [(one.name, one.shape) for one in row.outputs]
        # What the rest of the model reads may be a copy, if a later module works in place.
        results = [name for name in row.names if _is_first_result(name)]
        found[row.path] += [(name, None) for name in results[-1:]]
    return found


def _is_first_result(name: str) -> bool:
    parts = names.result_parts(name)
    return parts is not None and parts.output == 0


class _Recorder:
    """Collects the records of a step from hooks, and writes them when it ends."""

    def __init__(
        self,
        writer: RunWriter,
        requests: tuple[Request, ...],
        outputs: _Outputs,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._writer = writer
        self._requests = requests
        self._outputs = outputs
        self._optimizer = optimizer
        self._step = 0
        self._micro_batch = -1
        self._inside = False
        self._records: dict[tuple[str, int | None], Record] = {}
        self._described: set[str] = set()
        self._num_calls: Counter[str] = Counter()
        # The tensors of this call that are recorded, by identity and version. The tensors stay
        # alive so that no other one gets the identity.
        self._seen: dict[tuple[int, int], torch.Tensor] = {}
        self._taken: set[str] = set()

    def watch(self, model: nn.Module, hooks: ExitStack) -> None:
        """Register all hooks, and their removal."""
        handles = [
            model.register_forward_pre_hook(self._on_call, prepend=True, with_kwargs=True),
            *(
                module.register_forward_hook(partial(self._on_output, path))
                for path, module in model.named_modules()
            ),
            model.register_forward_hook(self._on_return, always_call=True),
        ]
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        handles += [
            _hook_gradient(parameter, partial(self._on_parameter_gradient, name))
            for name, parameter in trained.items()
        ]
        if self._optimizer is not None:
            known = {id(one) for group in self._optimizer.param_groups for one in group["params"]}
            updated = {name: one for name, one in trained.items() if id(one) in known}
            handles.append(
                self._optimizer.register_step_post_hook(partial(self._on_update, updated))
            )
        for handle in handles:
            hooks.callback(handle.remove)

    def finish_step(self) -> None:
        """Write the records of the step in one transaction, and begin the next step."""
        if self._records:
            self._writer.write_records(list(self._records.values()))
            self._step += 1
        self._records = {}
        self._micro_batch = -1

    def _on_call(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inside = self._optimizer is None or torch.is_grad_enabled()
        if not self._inside:
            return
        if self._optimizer is None:
            self.finish_step()
        self._micro_batch += 1
        self._num_calls.clear()
        self._seen.clear()
        self._taken.clear()
        tensors = _tensors_in([args, kwargs])
        for name, tensor in zip(names.inputs(len(tensors)), tensors, strict=True):
            self._seen[_identity(tensor)] = tensor
            self._record(RecordedTensor(name, kind="input"), tensor, self._micro_batch)

    def _on_output(self, path: str, _: nn.Module, args: Any, output: Any) -> None:
        if not self._inside:
            return
        call, new = self._num_calls[path], []
        for tensor in _tensors_in(output):
            identity = _identity(tensor)
            if identity not in self._seen:
                self._seen[identity] = tensor
                new.append(tensor)
        for i, tensor in enumerate(new):
            known = self._known_name(path, tuple(tensor.shape))
            name = known or names.module_output(path, call, i)
            described = RecordedTensor(name, module=path, kind=FURTHER_OUTPUT if i else OUTPUT)
            self._record(described, tensor, self._micro_batch)
            if tensor.requires_grad:
                gradient = RecordedTensor(
                    names.gradient(name), module=path, kind=GRADIENT_OF_OUTPUT
                )
                _hook_gradient(
                    tensor, partial(self._on_gradient, gradient, self._micro_batch, self._step)
                )
        self._num_calls[path] += bool(new)

    def _on_return(self, *_: Any) -> None:
        self._inside = False
        self._seen.clear()

    def _on_gradient(
        self, described: RecordedTensor, micro_batch: int, step: int, gradient: torch.Tensor
    ) -> None:
        if step == self._step:  # the graph may live longer than the step, and than the recording
            self._record(described, gradient, micro_batch)

    def _on_parameter_gradient(self, name: str, gradient: torch.Tensor) -> None:
        if self._micro_batch >= 0:  # gradients of a call that is recorded
            module = name.rpartition(".")[0]
            described = RecordedTensor(names.gradient(name), module=module, kind="gradient")
            self._record(described, gradient, self._micro_batch)

    def _on_update(self, updated: Mapping[str, torch.Tensor], *_: Any) -> None:
        if self._micro_batch < 0:
            return
        for name, weight in updated.items():
            module = name.rpartition(".")[0]
            described = RecordedTensor(names.updated(name), module=module, kind="updated weight")
            self._record(described, weight, None)
        self.finish_step()

    def _known_name(self, path: str, shape: tuple[int, ...]) -> str | None:
        """Return the name of the next output of a module in the program, if it is known."""
        for name, known in self._outputs.get(path, ()):
            if name not in self._taken and known in (None, shape):
                self._taken.add(name)
                return name
        return None

    def _record(
        self, described: RecordedTensor, tensor: torch.Tensor, micro_batch: int | None
    ) -> None:
        values = tensor.detach()
        if described.name not in self._described:
            self._described.add(described.name)
            self._writer.describe(
                [
                    RecordedTensor(
                        described.name,
                        tuple(values.shape),
                        values.dtype,
                        described.module,
                        described.kind,
                    )
                ]
            )
        requests = fitting(self._requests, values.dim())
        if values.is_complex():
            requests = of_pairs(requests, values.dim())
            values = torch.view_as_real(values.resolve_conj())
        with torch.no_grad():
            statistics = statistics_of(values, *requests)
        record = Record(described.name, self._step, micro_batch, 0, statistics)
        self._records[described.name, micro_batch] = record


def _hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call a function with the gradient of a tensor, in every backward pass."""
    handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in named_leaves(value) if isinstance(leaf, torch.Tensor)]


def _identity(tensor: torch.Tensor) -> tuple[int, int]:
    # Tensors of inference mode have no version.
    return id(tensor), 0 if tensor.is_inference() else version_of(tensor)
