"""Accumulates gradients at the places of the trace where hooks of the user see their sums."""

from __future__ import annotations

from typing import Any

import torch.fx

from popsim_torch.dtypes import dtype_name
from popsim_torch.errors import Error
from popsim_torch.ir import Attribute, Tensor
from popsim_torch.lowering.emit.builder import Builder, Place
from popsim_torch.lowering.update import UpdateLowering
from popsim_torch.optim.plan import Accumulation, OptimizerPlan
from popsim_torch.trace.books.accumulated import ACCUMULATED
from popsim_torch.trace.named_graph import NamedGraph


class AccumulatedLowering:
    """Adds the accumulations of parameters with hooks behind the accumulation.

    Args:
        builder: The graph under construction.
        named: The trace.
        plan: The update of each parameter.
        updates: Adds the ops of accumulations.
    """

    def __init__(
        self, builder: Builder, named: NamedGraph, plan: OptimizerPlan, updates: UpdateLowering
    ) -> None:
        self._builder = builder
        self._parameters = list(named.traced.parameters)
        self._plan = plan
        self._updates = updates
        # The accumulators, by the parameter's name.
        self._totals: dict[str, Tensor] = {}

    def lower(self, node: torch.fx.Node, place: Place) -> Tensor:
        """Add the ops of a node; return what the accumulator holds after it, in other memory."""
        given: Any = node.args
        source, key = given
        parameter, value = self._parameters[key], self._builder.tensor(source)
        if node.target is not ACCUMULATED:
            total = self._totals[parameter]
            self._copy(value, self._whole(total), place)
            return value
        accumulation = self._accumulation_of(parameter)
        total = self._updates.accumulate(parameter, accumulation, value, place)
        self._totals[parameter] = total
        seen = self._builder.value(value.dtype, value.shape)
        self._copy(self._whole(total), seen, place)
        return seen

    def _whole(self, total: Tensor) -> Tensor:
        return self._builder.graph.add_view(total, total.shape, total.strides, total.offset)

    def _copy(self, source: Tensor, target: Tensor, place: Place) -> None:
        attributes: dict[str, Attribute] = {}
        if source.dtype != target.dtype:
            attributes["dtype"] = dtype_name(target.dtype)
        self._builder.op("copy", [source], [target], attributes, place=place)

    def _accumulation_of(self, parameter: str) -> Accumulation:
        """Return how a parameter's gradients are accumulated.

        Raises:
            Error: Nothing accumulates only gradients.
        """
        where = f"register_post_accumulate_grad_hook on the parameter '{parameter}'"
        update = next((one for one in self._plan.updates if one.parameter == parameter), None)
        if update is None:
            raise Error(
                f"{where}: the optimizer does not update it, so its gradients are not accumulated. "
                "Remove the hook, add the parameter to a group of the optimizer, or use "
                "parameter.register_hook, which sees the gradient of each micro-batch."
            )
        for accumulation in update.accumulations:
            if accumulation.state.accumulates:
                return accumulation
        raise Error(
            f"{where}: SGD with use_combined_accum adds gradients to its velocities, so there is "
            "no accumulated gradient. Leave out use_combined_accum, or use "
            "parameter.register_hook, which sees the gradient of each micro-batch."
        )
