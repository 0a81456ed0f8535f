"""The places of a program where the value of a tensor is the one that its name means."""

from __future__ import annotations

from popsim_torch.ir import Phase, Program, Role, Tensor, TensorKind, Uses

__all__ = ["Place", "Places"]

Place = tuple[int, Phase, int]
"""The index of an op, -1 for none, after which something is; its phase, and its stage."""


class Places:
    """Finds places in a program, as its ops are when this object is made.

    Args:
        program: The program.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._graph = program.graph
        self.uses = Uses(self._graph)
        self._num_setup = sum(op.phase == Phase.SETUP for op in self._graph.ops)

    def of_value(self, name: str, tensor: Tensor) -> Place:
        """Return the place where a tensor has the value that its name means.

        That of a weight is the value that the micro-batch used, since the updated weight has
        another name. That of a state between runs is the one that the latest op left.
        """
        is_state = tensor.role == Role.UPDATED or self._is_state(name)
        return self.complete(tensor) if is_state else self.in_forward(tensor)

    def in_forward(self, tensor: Tensor) -> Place:
        """Return the place where forward reads a tensor: for a variable before any change."""
        writers = self.uses.writers(tensor.id)
        producer = next((op for op in reversed(writers) if tensor.id in op.outputs), None)
        if producer is not None and producer.phase != Phase.SETUP:
            return self.uses.position(producer), producer.phase, producer.stage
        position, phase, stage = self.complete(tensor)
        root = self._graph.root(tensor)
        is_kept = root.role == Role.VALUE  # a value that stays until an anchor reads it
        if root.kind != TensorKind.VARIABLE or is_kept or not writers:
            return position, phase, stage
        if phase != Phase.FORWARD:
            return self._last_setup(), Phase.FORWARD, 0
        return position - 1, phase, stage

    def complete(self, tensor: Tensor) -> Place:
        """Return the op after which a tensor is complete, with its phase and stage."""
        writers = self.uses.writers(tensor.id)
        if not writers or writers[-1].phase == Phase.SETUP:
            return self._last_setup(), Phase.FORWARD, 0
        last = writers[-1]
        return self.uses.position(last), last.phase, last.stage

    def _last_setup(self) -> int:
        return self._num_setup - 1

    def _is_state(self, name: str) -> bool:
        program = self._program
        kept = (program.buffers, program.states, program.scalars)
        return any(name in known for known in kept)
