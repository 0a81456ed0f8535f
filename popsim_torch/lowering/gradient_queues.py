"""Adds gradients as elements for queues, in a program's backward pass and update."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from popsim_torch.dtypes import dtype_name
from popsim_torch.enums import OutfeedOptimizerMode
from popsim_torch.ir import Phase, Role, Tensor, TensorKind, names
from popsim_torch.ir.map_code import MapCode
from popsim_torch.lowering.emit.builder import Builder, Place
from popsim_torch.lowering.emit.maps import emit_map
from popsim_torch.optim.captures import GradientEnqueue

_NAME = "OutfeedOptimizer"


class GradientQueues:
    """Adds the ops that enqueue gradients.

    Args:
        builder: The graph under construction.
        gradients: The gradients of one micro-batch, by the parameter's name.
        accumulator_of: Returns the tensor in which the update itself accumulates a parameter's
            gradients; None if there is none, or if it holds something else.
    """

    def __init__(
        self,
        builder: Builder,
        gradients: Mapping[str, Tensor],
        accumulator_of: Callable[[str], Tensor | None],
    ) -> None:
        self._builder = builder
        self._gradients = gradients
        self._accumulator_of = accumulator_of

    def add(self, element: GradientEnqueue) -> None:
        """Add the ops for an element, before the updates and after all accumulations."""
        phase = Phase.UPDATE
        if element.mode == OutfeedOptimizerMode.AFTER_COMPUTE:
            phase = Phase.BACKWARD
        tensors = [self._gradients[name] for name in element.parameters]
        if element.accumulated:
            tensors = [self._accumulated(name, element) for name in element.parameters]
        # The gradients of the first stage are complete last.
        stages = [found[1] for x in tensors if (found := self._builder.written_in(x)) is not None]
        stage = min(stages, default=0) if phase == Phase.BACKWARD else 0
        self._builder.op(
            "enqueue",
            tensors,
            [],
            {"queue": element.queue, "dtypes": [dtype_name(dtype) for dtype in element.dtypes]},
            place=Place(phase, stage, _NAME),
            fixed_phase=True,
        )

    def _accumulated(self, parameter: str, element: GradientEnqueue) -> Tensor:
        """Return the sum or mean of a parameter's gradients, as the options ask for."""
        found = self._accumulator_of(parameter) or self._own_accumulator(parameter)
        if element.divisor == 1:
            return found
        code, place = MapCode(), Place(Phase.UPDATE, 0, names.gradient(parameter))
        total = self._builder.graph.as_real(found)
        mean = code("div", total, element.divisor)
        mean_of = emit_map(self._builder, code, mean, total.dtype, total.shape, place)
        return self._builder.graph.as_complex(mean_of) if found.dtype.is_complex else mean_of

    def _own_accumulator(self, parameter: str) -> Tensor:
        """Accumulate gradients separately, because the update adds them to the velocity."""
        gradient = self._gradients[parameter]
        written = self._builder.written_in(gradient)
        place = Place(Phase.BACKWARD, 0 if written is None else written[1], _NAME)
        graph = self._builder.graph
        dtype = gradient.dtype if gradient.dtype.is_complex else torch.float32
        total = graph.add_tensor(TensorKind.VARIABLE, dtype, gradient.shape, role=Role.ACCUMULATOR)
        whole = graph.add_view(total, total.shape, total.strides, total.offset)
        self._builder.op(
            "accumulate",
            [graph.as_real(gradient), graph.as_real(total)],
            [graph.as_real(whole)],
            {"running": False},
            place=place,
            after=gradient,
        )
        return total
