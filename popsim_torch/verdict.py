"""``Verdict``: where the first bad number of a run came from."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["OperandNumbers", "Verdict"]


@dataclass(frozen=True)
class OperandNumbers:
    """The numbers that an operand held when the op read it.

    Attributes:
        name: Its name.
        dtype: Its dtype, such as ``float32``.
        shape: Its shape; for inputs and values that of one micro-batch.
        value: The element from which the bad number was computed; None if there is no such one
            element, as in a sum.
        minimum: The smallest finite value; NaN if there is none. The next two are similar.
        maximum: The largest finite value.
        mean: The mean of the finite values.
        nans: The number of values that are NaN.
        infs: The number of values that are infinite.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: float | None
    minimum: float
    maximum: float
    mean: float
    nans: int
    infs: int

    def __str__(self) -> str:
        parts = [f"{self.name} ({self.dtype} {_shape(self.shape)}):"]
        if self.value is not None:
            parts.append(f"{self.value:.6g} there;")
        if math.isnan(self.mean):
            parts.append("no finite values")
        else:
            parts.append(f"from {self.minimum:.6g} to {self.maximum:.6g}, mean {self.mean:.6g}")
        counts = [f"{n} {what}" for n, what in ((self.nans, "NaN"), (self.infs, "infinite")) if n]
        return " ".join(parts) + (f"; {' and '.join(counts)}" if counts else "")


@dataclass(frozen=True)
class Verdict:
    """Where the first bad number of a device iteration came from; ``print`` shows all of it.

    Attributes:
        tensor: The name of the first tensor with a bad number, among those that led to the failed
            check.
        source: What made it: ``"op"``, or the tensor came in bad: ``"input"``, ``"parameter"``,
            ``"buffer"``, ``"state"``, ``"hyper-parameter"`` or ``"constant"``; ``"process"`` if it
            came from another process that trains the model, too; ``"unknown"`` if the repeated
            iteration had no bad number.
        op: The operation, such as ``div`` or ``matmul``; empty if no op made the number.
        phase: ``"forward"``, ``"backward"`` or ``"update"``.
        layer: The path of the module, such as ``layers/0/fc1``; empty outside of modules.
        line: ``file:line`` of the user's code; empty if it is unknown.
        iteration: The device iteration, counted from 0 over all calls of the program; in inference
            the micro-batch within the call.
        micro_batch: The micro-batch within the device iteration, counted from 0.
        replica: The copy of the model, counted from 0.
        stage: The pipeline stage, counted from 0.
        index: The position of the first bad element in the tensor.
        value: The value there: NaN or an infinity.
        rule: What went wrong, such as ``division by zero: 1 / 0``.
        operands: What the op read.
        exact: The element computed from the same operands in float64; None if that is unknown.
        noticed_in: The name of the tensor whose check failed.
        note: What else there is to say; may be empty.
    """

    tensor: str
    source: str
    op: str
    phase: str
    layer: str
    line: str
    iteration: int
    micro_batch: int
    replica: int
    stage: int
    index: tuple[int, ...]
    value: float
    rule: str
    operands: tuple[OperandNumbers, ...]
    exact: float | None
    noticed_in: str
    note: str

    @property
    def more_precision_helps(self) -> bool | None:
        """Whether the op gives a number in float64 from the same operands; None if unknown."""
        return None if self.exact is None else math.isfinite(self.exact)

    def __str__(self) -> str:
        if self.source in ("process", "unknown"):
            return (
                f"A number is NaN or infinite in device iteration {self.iteration}.\n"
                f"  rule:       {self.rule}\n  note:       {self.note}"
            )
        lines = [
            f"The first bad number is {self.value:g}, in '{self.tensor}'{_at(self.index)}.",
            f"  rule:       {self.rule}",
        ]
        if self.op:
            lines.append(f"  op:         {self.op}, in the {self.phase} phase")
        if self.layer:
            lines.append(f"  layer:      {self.layer}")
        if self.line:
            lines.append(f"  line:       {self.line}")
        lines.append(
            f"  when:       device iteration {self.iteration}, micro-batch {self.micro_batch}, "
            f"replica {self.replica}, stage {self.stage}"
        )
        for number, operand in enumerate(self.operands):
            lines.append(f"  {'operands:' if number == 0 else '':10}  {operand}")
        if self.exact is not None:
            lines.append(f"  precision:  {self._precision()}")
        lines.append(f"  noticed in: '{self.noticed_in}'")
        if self.note:
            lines.append(f"  note:       {self.note}")
        return "\n".join(lines)

    def _precision(self) -> str:
        if self.more_precision_helps:
            return f"float64 gives {self.exact:.6g} from the same operands, so more would help"
        return f"float64 gives {self.exact:g} from the same operands, so more would not help"


def _shape(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes)) or "scalar"


def _at(index: tuple[int, ...]) -> str:
    return f" at ({', '.join(map(str, index))})" if index else ""
