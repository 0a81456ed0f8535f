"""The key of the cache: a digest of everything that the program of a traced model depends on.

``forward`` is Python code, so only a trace can show what it does. The steps after the trace depend
only on the trace, on the options and the optimizer, and on this package. All of these are in the
key, if they consist of known kinds of data; otherwise there is no key. Of the weights the key has
only names, shapes and dtypes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import types
from pathlib import Path
from typing import Any

import torch
import torch.fx

from popsim_torch.arguments import OutputSpec
from popsim_torch.private_torch.fake import FakeTensor
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.private_torch.operators import OpOverload
from popsim_torch.trace import TraceResult
from popsim_torch.version import __version__

__all__ = ["trace_key"]

_PACKAGE = Path(__file__).parents[1]
# Debugging information of torch, which is not in a program.
_IGNORED_META = frozenset({"stack_trace", "seq_nr", "autograd_backward", "from_node"})
# Objects of the user. The constants have what forward reads. The plan of updates describes
# the optimizers, and the graph the queues.
_OBJECTS = frozenset({"optimizers", "enqueues", "host_reads", "host_writes"})
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


class _UnknownError(Exception):
    """A trace contains an unknown kind of data."""


def trace_key(traced: TraceResult, settings: object) -> str | None:
    """Return a string that two compilations share only if their programs are the same.

    Args:
        traced: The recorded trace.
        settings: Everything else that the program depends on.

    Returns:
        The key, or None if the trace contains an unknown kind of data.
    """
    hasher = _Hasher()
    try:
        hasher.add(("popsim_torch", __version__, torch.__version__, _package_digest()))
        hasher.add_trace(traced)
        hasher.add(settings)
    except _UnknownError:
        return None
    return hasher.digest.hexdigest()


@functools.cache
def _package_digest() -> str:
    """Return a digest of the code of this package: after changes, old files are not used."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + path.read_bytes())
    for path in sorted(_PACKAGE.glob("_C*")):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()


class _Hasher:
    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._numbers: dict[torch.fx.Node, int] = {}

    def add_trace(self, traced: TraceResult) -> None:
        """Add a whole trace, field by field."""
        for field in dataclasses.fields(traced):
            if field.name in _OBJECTS:
                continue
            self._mark(field.name)
            value = getattr(traced, field.name)
            if field.name in ("parameters", "buffers"):
                for name, tensor in value.items():
                    self.add((name, tensor.dtype, tensor.shape))
                    if traced.is_constant(name):
                        self._add_data(tensor)
            else:
                self.add(value)

    def _add_module(self, module: torch.fx.GraphModule) -> None:
        for node in module.graph.nodes:
            self._numbers[node] = len(self._numbers)
        for node in module.graph.nodes:
            self._add_node(node, module)

    def _add_node(self, node: torch.fx.Node, module: torch.fx.GraphModule) -> None:
        self.add((node.name, node.op, node.target, node.args, node.kwargs))
        if node.op == "get_attr":
            self.add(getattr(module, str(node.target)))
        for name, value in node.meta.items():
            if name not in _IGNORED_META:
                self.add((name, value))

    def add(self, value: Any) -> None:
        """Add a value of any known kind.

        Raises:
            _UnknownError: The value is of an unknown kind.
        """
        kind = type(value)
        if isinstance(value, _PLAIN):
            self._mark(f"{kind.__name__} {value!r}")
        elif isinstance(value, torch.fx.Node):
            self._mark(f"node {self._numbers[value]}")
        elif isinstance(value, torch.fx.GraphModule):
            self._add_module(value)
        elif isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, (list, tuple)):
            self._mark(f"{kind.__name__} {len(value)}")
            for item in value:
                self.add(item)
        elif isinstance(value, dict):
            self._mark(f"{kind.__name__} {len(value)}")
            for pair in value.items():
                self.add(pair)
        elif isinstance(value, (set, frozenset)) and all(type(item) is str for item in value):
            self.add((kind.__name__, sorted(value)))
        elif isinstance(value, slice):
            self.add(("slice", value.start, value.stop, value.step))
        elif isinstance(value, OpOverload):
            self._mark(f"operator {value}")
        elif isinstance(value, types.BuiltinFunctionType):
            self._mark(f"function {value.__module__}.{value.__qualname__}")
        elif isinstance(value, OutputSpec):
            self.add(("outputs", value.names))
        elif dataclasses.is_dataclass(kind):
            self._mark(f"{kind.__module__}.{kind.__qualname__}")
            for field in dataclasses.fields(value):
                self.add((field.name, getattr(value, field.name)))
        else:
            raise _UnknownError(repr(kind))

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor):
            fake = ("fake", tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad)
            self.add((*fake, tensor.storage_offset(), tensor.device))
        elif tensor.is_cpu and tensor.layout is torch.strided:
            self._add_data(tensor)
        else:
            raise _UnknownError(f"a tensor on {tensor.device}")

    def _add_data(self, tensor: torch.Tensor) -> None:
        with DisableTorchFunction():
            plain = tensor.detach().resolve_neg().resolve_conj().contiguous()
            self.add(("data", plain.dtype, plain.shape))
            self.digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())

    def _mark(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        self.digest.update(f"{len(data)} ".encode() + data)
