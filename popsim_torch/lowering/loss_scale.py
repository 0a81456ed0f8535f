"""Adds the ops of automatic loss scaling: the device adapts the loss scale."""

from __future__ import annotations

import torch

from popsim_torch.dtypes import dtype_name
from popsim_torch.ir import Phase, Program, Role, Tensor, TensorKind, names
from popsim_torch.ir.map_code import MapCode, MapValue
from popsim_torch.lowering.emit.builder import Builder, Place
from popsim_torch.lowering.emit.maps import emit_map
from popsim_torch.optim.loss_scale import LossScaleRule
from popsim_torch.optim.plan import Scalar

_FLOAT = torch.float32


class LossScaleLowering:
    """Adds the ops that apply the factor of the loss scale, and those that change it.

    Args:
        builder: The graph under construction.
        program: Receives the states.
        rule: The rule by which the factor changes.
    """

    def __init__(self, builder: Builder, program: Program, rule: LossScaleRule) -> None:
        self._builder = builder
        self._program = program
        self._rule = rule
        self._factor = self._state(names.LOSS_SCALE_FACTOR)
        self._final: Tensor | None = None
        self._counts: list[Tensor] = []
        self._num_elements = 0
        self._followed: dict[tuple[str, Phase, int], Tensor] = {}

    @property
    def counts(self) -> list[Tensor]:
        """The numbers of elements that were too large, for each gradient."""
        return self._counts

    def final_scale(self, scale: Tensor, stage: int) -> Tensor:
        """Return the scale of a backward pass.

        Args:
            scale: The loss scale of the optimizer.
            stage: The stage of the loss.
        """
        code = MapCode()
        place = Place(Phase.BACKWARD, stage, names.FINAL_LOSS_SCALE)
        final = self._scalar(code, code("mul", scale, self._factor), place)
        self._builder.graph.set_name(final, place.name)
        self._final = final
        return final

    def follow(self, scalar: Scalar, tensor: Tensor, phase: Phase, stage: int = 0) -> Tensor:
        """Return a hyper-parameter, scaled by the factor if its gradients are scaled by it."""
        if scalar.gradient_scale == 0:
            return tensor
        key = (scalar.name, phase, stage)
        if key not in self._followed:
            code = MapCode()
            instruction = "mul" if scalar.gradient_scale > 0 else "div"
            result = code(instruction, tensor, self._factor)
            self._followed[key] = self._scalar(code, result, Place(phase, stage, scalar.name))
            if phase == Phase.BACKWARD:  # Accumulations run before the end.
                assert self._final is not None
                self._builder.move_last_op_after(self._final)
        return self._followed[key]

    def observe(self, gradient: Tensor, name: str) -> None:
        """Count the elements of a micro-batch's gradient that are too large.

        Args:
            gradient: The gradient of a parameter.
            name: The name of the gradient.
        """
        if gradient.numel == 0:
            return
        written = self._builder.written_in(gradient)
        place = Place(Phase.BACKWARD, 0 if written is None else written[1], name)
        code = MapCode()
        too_large = code("not", code("le", code("abs", gradient), self._rule.threshold))
        seen = emit_map(self._builder, code, too_large, _FLOAT, gradient.shape, place)
        self._builder.move_last_op_after(gradient)
        flags = self._builder.graph.root(seen)
        count = self._sum(flags, place, after=flags)
        total = self._state(f"{names.LOSS_SCALE_FACTOR}/count/{name}")
        self._builder.op(
            "accumulate",
            [count, total],
            [self._whole(total)],
            {"running": False},
            place=place,
            after=count,
        )
        self._counts.append(total)
        self._num_elements += gradient.numel

    def adapt(self, scale: Tensor) -> None:
        """Change the factor after all updates.

        Args:
            scale: The loss scale of the optimizer.
        """
        rule, place = self._rule, Place(Phase.UPDATE, 0, names.updated(names.LOSS_SCALE_FACTOR))
        step = self._state(f"{names.LOSS_SCALE_FACTOR}/step")
        seen = self._state(f"{names.LOSS_SCALE_FACTOR}/seen")
        found = self._sum_of_counts(place)
        most = rule.share * self._num_elements * rule.micro_batches * rule.period

        def is_due(code: MapCode) -> MapValue:
            return code("ge", code("add", step, 1.0), float(rule.period))

        def all_seen(code: MapCode) -> MapValue:
            return code("add", seen, found)

        def new_factor(code: MapCode) -> MapValue:
            doubled = code("mul", self._factor, 2.0)
            final = code("abs", code("mul", scale, doubled))
            grown = code("where", code("le", final, rule.largest_scale), doubled, self._factor)
            halved = code("max", code("mul", self._factor, 0.5), rule.least_factor)
            adapted = code("where", code("le", all_seen(code), most), grown, halved)
            return code("where", is_due(code), adapted, self._factor)

        def new_step(code: MapCode) -> MapValue:
            return code("where", is_due(code), 0.0, code("add", step, 1.0))

        def new_seen(code: MapCode) -> MapValue:
            return code("where", is_due(code), 0.0, all_seen(code))

        formulas = {self._factor.id: new_factor, step.id: new_step, seen.id: new_seen}
        values = {}
        for state, formula in formulas.items():
            code = MapCode()
            values[state] = self._scalar(code, formula(code), place)
        for state, value in values.items():
            whole = self._whole(self._builder.graph.tensors[state])
            self._builder.op("copy", [value], [whole], place=place)

    def _sum_of_counts(self, place: Place) -> Tensor:
        if not self._counts:
            return self._builder.constant(torch.zeros((), device="cpu"))
        graph = self._builder.graph
        joined = self._builder.value(_FLOAT, (len(self._counts),))
        parts = [graph.add_view(count, (1,), (1,), 0) for count in self._counts]
        self._builder.op("cat", parts, [joined], {"axis": 0}, place=place)
        return self._sum(joined, place)

    def _sum(self, tensor: Tensor, place: Place, after: Tensor | None = None) -> Tensor:
        total = self._builder.value(_FLOAT, ())
        axes = list(range(len(tensor.shape)))
        self._builder.op(
            "reduce",
            [tensor],
            [total],
            {"function": "sum", "axes": axes, "keepdim": False, "dtype": dtype_name(_FLOAT)},
            place=place,
            after=after,
        )
        return total

    def _scalar(self, code: MapCode, result: MapValue, place: Place) -> Tensor:
        return emit_map(self._builder, code, result, _FLOAT, (), place)

    def _state(self, name: str) -> Tensor:
        tensor = self._builder.graph.add_tensor(
            TensorKind.VARIABLE, _FLOAT, (), name=name, role=Role.STATE
        )
        self._program.states[name] = tensor.id
        return tensor

    def _whole(self, state: Tensor) -> Tensor:
        view = self._builder.graph.add_view(
            state, state.shape, state.strides, state.offset, role=Role.UPDATED
        )
        self._builder.graph.set_name(view, names.updated(state.name))
        return view
