"""Types of the C++ library; ``tests/unit/test_native_stub.py`` keeps them true."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

class UserError(RuntimeError): ...
class InternalError(RuntimeError): ...

class TensorKind:
    INPUT: ClassVar[TensorKind]
    CONSTANT: ClassVar[TensorKind]
    VARIABLE: ClassVar[TensorKind]
    VALUE: ClassVar[TensorKind]
    VIEW: ClassVar[TensorKind]

class Phase:
    SETUP: ClassVar[Phase]
    FORWARD: ClassVar[Phase]
    BACKWARD: ClassVar[Phase]
    UPDATE: ClassVar[Phase]

class TensorArgument:
    def __init__(self, input: int) -> None: ...

class TensorListArgument:
    def __init__(self, inputs: Sequence[int]) -> None: ...

class Arguments:
    def __init__(self, values: Sequence[Any]) -> None: ...

class Graph:
    def __init__(self) -> None: ...
    def add_tensor(
        self,
        name: str,
        kind: TensorKind,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int],
        base: int = -1,
        offset: int = 0,
    ) -> int: ...
    def add_op(
        self,
        kind: str,
        name: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        attributes: Mapping[str, Any],
        phase: Phase,
        stage: int,
    ) -> None: ...
    def verify(self) -> None: ...

class ReturnSpec:
    def __init__(self, shape: Sequence[int], dtype: str, keep: bool) -> None: ...

class RunConfig:
    def __init__(
        self, device_iterations: int, gradient_accumulation: int, training: bool, schedule: str
    ) -> None: ...

class OpTime:
    @property
    def op(self) -> int: ...
    @property
    def executions(self) -> int: ...
    @property
    def seconds(self) -> float: ...

class Executable:
    seed: int
    step: int
    def __init__(self, graph: Graph, config: RunConfig, returns: Sequence[ReturnSpec]) -> None: ...
    def load(self) -> None: ...
    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...
    def profile(self, inputs: Sequence[torch.Tensor], repeats: int) -> list[OpTime]: ...
    def write(self, tensor: int, value: torch.Tensor) -> None: ...
    def read(self, tensor: int) -> torch.Tensor: ...
    def read_kept(self, index: int) -> torch.Tensor: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def peak_live_bytes(self) -> int: ...
    @property
    def persistent_bytes(self) -> int: ...
    def actions(self) -> str: ...
    def program(self) -> str: ...

def schedule_actions(name: str, num_stages: int, num_micro_batches: int, training: bool) -> str: ...
def validate_schedule(
    actions: str, num_stages: int, num_micro_batches: int, training: bool
) -> None: ...
def op_table() -> list[tuple[str, str]]: ...
def has_onednn() -> bool: ...
def product_takes_in(
    what: str,
    dtype: str,
    a: Sequence[int],
    a_strides: Sequence[int],
    b: Sequence[int],
    b_strides: Sequence[int],
) -> bool: ...
