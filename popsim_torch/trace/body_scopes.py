"""What a tensor is inside of the bodies of loops and branches, and what they leave behind."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.fx

from popsim_torch.trace.call_origins import CallOrigins
from popsim_torch.trace.control.flow import ControlFlow
from popsim_torch.trace.gradients import Gradients
from popsim_torch.trace.graph.traced_tensors import current_graph, node_of
from popsim_torch.trace.known_values import KnownValues
from popsim_torch.trace.result import TraceResult
from popsim_torch.trace.stand_ins import StandIns

__all__ = ["BodyScopes"]


class BodyScopes:
    """Listens to what records loops and branches (``BodyListener``).

    Args:
        result: The trace; filled with what is repeated or chosen.
        origins: Tells where what is recorded comes from.
        gradients: Follows those of forward.
        stand_ins: What stands for tensors of the host outside of all bodies.

    Attributes:
        control_flow: Records loops and branches.
        values: What is known of values while forward runs.
    """

    def __init__(
        self,
        result: TraceResult,
        origins: CallOrigins,
        gradients: Gradients,
        stand_ins: StandIns,
    ) -> None:
        self._result = result
        self._origins = origins
        self._stand_ins = stand_ins
        self.values = KnownValues(result.constants, self.constant)
        self.begin_call = origins.begin
        self.after_call = gradients.after_call
        self.inside_of_body = gradients.inside_of_body
        self.gradient_of_body = gradients.gradient_of_body
        self.control_flow = ControlFlow(self, result.controls)

    def start(self, state: Mapping[str, torch.Tensor]) -> None:
        """Begin a trace in which parameters and buffers are these traced tensors, by name."""
        host = {**self._result.parameters, **self._result.buffers}
        constants = filter(self._result.is_constant, host)
        self.values.start(
            current_graph(), {node_of(state[name]): (name, host[name]) for name in constants}
        )

    def close(self) -> None:
        """Forget the trace."""
        self.values.clear()
        del self._result

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the traced tensor for a parameter or buffer of the model, else ``tensor``.

        In a body it is what stands there for the tensor.
        """
        return self.control_flow.bodies.inside(self._stand_ins.known(tensor))

    def seen_outside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the user's tensor for what stands for it in a body."""
        return self.control_flow.bodies.outside(tensor)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a traced tensor for the data that a host tensor has now."""
        calling = self._origins.current
        self._origins.begin("Constant")
        try:
            return self.control_flow.bodies.inside(self._stand_ins.constant(tensor))
        finally:
            self._origins.return_to(calling)

    def forget(self, gone: set[torch.fx.Node], last: torch.fx.Node) -> None:
        """Forget nodes that were taken out of the graph; ``last`` stood in front of them."""
        self.values.forget(gone, last)

    def state_of(self, node: torch.fx.Node) -> torch.Tensor | None:
        """Return the parameter or buffer that a node stands for, if it does."""
        state = self._stand_ins.state_of(node)
        return None if state is None else self.known(state)
