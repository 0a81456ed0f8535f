"""A sample of an op: operands of a size that several threads have work with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.ops.one_op import OneOp, dtype_name

F16, F32, F64 = torch.float16, torch.float32, torch.float64
Make = Callable[[Callable[..., torch.Tensor]], torch.Tensor]


@dataclass
class Sample:
    """An op and its operands.

    Attributes:
        kind: Name in the op table.
        name: What is special about it.
        inputs: Shapes of normal numbers of the sample's type, tensors, None, or functions that get
            one that makes normal numbers of a shape.
        outputs: Shapes of results of the sample's type, pairs of type and shape, positions of
            inputs that are overwritten, or None.
        attributes: Of the op; ``"dtype"`` and ``["dtype"]`` stand for the sample's type.
        dtypes: Types to try.
    """

    kind: str
    name: str
    inputs: list[Any]
    outputs: list[Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = (F32, F16)

    def compile(self, dtype: torch.dtype) -> OneOp:
        """Return the op on operands of a type, the same ones each time."""
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        def operand(value: Any) -> torch.Tensor | None:
            if callable(value):
                return value(normal)
            return normal(*value) if isinstance(value, tuple) else value

        def output(value: Any) -> Any:
            is_shape = isinstance(value, tuple) and all(isinstance(size, int) for size in value)
            return (dtype, value) if is_shape else value

        spelt = {"dtype": dtype_name(dtype)}
        attributes = {
            name: [spelt["dtype"]] if value == ["dtype"] else spelt.get(str(value), value)
            for name, value in self.attributes.items()
        }
        # `tests/reference/test_ops.py` compares each sample, once; others run it many times.
        return OneOp(
            self.kind,
            [operand(i) for i in self.inputs],
            [output(o) for o in self.outputs],
            attributes,
            has_reference=False,
        )


def columns(*shape: int) -> Make:
    """Return matrices that lie by columns."""
    return lambda normal: normal(*shape[:-2], shape[-1], shape[-2]).mT


def channels_last(*shape: int) -> Make:
    """Return images that lie with their channels last."""
    axes = (0, len(shape) - 1, *range(1, len(shape) - 1))
    return lambda normal: normal(shape[0], *shape[2:], shape[1]).permute(axes)


def positive(*shape: int) -> Make:
    """Return positive numbers of float32."""
    return lambda normal: normal(*shape).float().abs() + 0.5


def float32(*shape: int) -> Make:
    """Return numbers of float32."""
    return lambda normal: normal(*shape).float()


def whole(limit: int, *shape: int) -> torch.Tensor:
    """Return whole numbers below a limit."""
    return torch.randint(limit, shape, generator=torch.Generator().manual_seed(2))
