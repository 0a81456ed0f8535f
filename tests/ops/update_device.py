"""A program that only updates weights, and the optimizers to try it with."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from popsim_torch import _native, ir, optim
from popsim_torch.optim.planning import GradientInput, OptimizerPlan
from popsim_torch.passes.group_updates import group_updates
from popsim_torch.passes.native_graph import to_native

SHAPE = (3, 1023)  # several blocks, the last one not full


class Device:
    """A program that does nothing but update weights from the gradients it is given.

    Args:
        plan: What to do; its parameters are those of ``weights``.
        weights: Initial values, by name.
        micro_batches: Gradients per update.
        gradient_dtype: Element type of the gradients; None: the weight's.
        gradient_strides: Strides of the gradients, by name, where they are not contiguous.
        grouped: Let one op update all weights where it can.
        terms: Names of terms of the updates to write, for ``read``.

    Attributes:
        graph: The program.
        executable: The program as it runs.
        loop: How often a run goes through it.
    """

    def __init__(
        self,
        plan: OptimizerPlan,
        weights: dict[str, torch.Tensor],
        micro_batches: int = 1,
        gradient_dtype: torch.dtype | None = None,
        gradient_strides: dict[str, tuple[int, ...]] | None = None,
        *,
        grouped: bool = False,
        terms: Collection[str] = (),
    ) -> None:
        self.graph = ir.Graph()
        self._tensors: dict[str, ir.Tensor] = {}
        for name, weight in weights.items():
            self._variable(name, weight.dtype, weight.shape)
        for update in plan.updates:
            dtype = gradient_dtype or weights[update.parameter].dtype
            strides = (gradient_strides or {}).get(update.parameter)
            self._gradient(update.parameter, dtype, strides)
        for state in plan.states().values():
            parameter = state.name.split("___")[1]
            shape = weights[parameter].shape if state.per_element else (1,)
            self._variable(state.name, state.dtype, shape)
        for scalar in plan.scalars().values():
            self._variable(scalar.name, scalar.dtype, ())
        for update in plan.updates:
            for term in update.terms:
                if term.name in terms:
                    shape = weights[update.parameter].shape if term.per_element else ()
                    self._variable(term.name, torch.float32, shape)
        self._add_ops(plan)
        self.num_grouped = group_updates(self.graph) if grouped else 0
        self.loop = ir.LoopCounts(1, micro_batches)
        config = _native.RunConfig(1, micro_batches, True, "sequential")
        with _native.translated_errors():
            self.executable = _native.Executable(to_native(self.graph), config)
            self.executable.load()
        for name, weight in weights.items():
            self.write(name, weight)
        for state in plan.states().values():
            # Accumulators need no particular value before the first micro-batch.
            value = state.initial_value(weights[state.name.split("___")[1]])
            self.write(state.name, value if state.kind != "Accum" else torch.full_like(value, 7))
        for scalar in plan.scalars().values():
            self.write(scalar.name, torch.tensor(scalar.value))

    def _variable(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = self.graph.add_tensor(ir.TensorKind.VARIABLE, dtype, shape, name=name)
        self._tensors[name] = tensor

    def _gradient(
        self, parameter: str, dtype: torch.dtype, strides: tuple[int, ...] | None
    ) -> None:
        shape = self._tensors[parameter].shape
        graph = self.graph
        source = graph.add_tensor(ir.TensorKind.INPUT, dtype, shape, name=f"input/{parameter}")
        gradient = graph.add_tensor(ir.TensorKind.VALUE, dtype, shape)
        graph.add_op("copy", [source], [gradient], phase=ir.Phase.BACKWARD)
        if strides is not None:
            gradient = graph.add_view(gradient, shape, strides, 0)
        self._tensors[f"Gradient___{parameter}"] = gradient

    def _add_ops(self, plan: OptimizerPlan) -> None:
        for update in plan.updates:
            gradient = self._tensors[f"Gradient___{update.parameter}"]
            for accumulation in update.accumulations:
                state = self._tensors[accumulation.state.name]
                self._op(
                    accumulation.kind,
                    [gradient, state, *self._of(accumulation.scalars)],
                    [state],
                    accumulation.attributes,
                    ir.Phase.BACKWARD,
                )
        norm = []
        if plan.max_grad_norm is not None:
            self._variable("norm", torch.float32, ())
            norm = [self._tensors["norm"]]
            self.graph.add_op(
                "gradient_norm",
                [*map(self._gradient_of, plan.updates), *self._of([plan.loss_scaling])],
                norm,
                plan.norm_attributes,
                phase=ir.Phase.UPDATE,
            )
        for update in plan.updates:
            weight = self._tensors[update.parameter]
            states = self._of(update.states)
            inputs = [weight, self._gradient_of(update), *states, *self._of(update.scalars)]
            inputs += norm if update.clipped else []
            terms = [self._tensors.get(term.name) for term in update.terms]
            while terms and terms[-1] is None:
                terms.pop()
            updated = [weight, *states]
            self._op(update.kind, inputs, updated, update.attributes, ir.Phase.UPDATE, terms)

    def kinds(self) -> set[str]:
        """Return the kinds of its ops."""
        return {op.kind for op in self.graph.ops}

    def _gradient_of(self, update) -> ir.Tensor | None:
        if update.gradient is GradientInput.NONE:
            return None
        accumulated = update.gradient is GradientInput.ACCUMULATOR
        prefix = "Accum" if accumulated else "Gradient"
        return self._tensors[f"{prefix}___{update.parameter}"]

    def _of(self, named) -> list[ir.Tensor]:
        return [self._tensors[item.name] for item in named]

    def _op(self, kind, inputs, updated, attributes, phase, terms=()) -> None:
        views = [self.graph.add_view(t, t.shape, t.strides, 0) for t in updated]
        self.graph.add_op(kind, inputs, [*views, *terms], attributes, phase=phase, name=kind)

    def write(self, name: str, value: torch.Tensor) -> None:
        self.executable.write(self._tensors[name].id, value.detach())

    def read(self, name: str) -> torch.Tensor:
        return self.executable.read(self._tensors[name].id)

    def run(self, *gradients: torch.Tensor) -> None:
        """Make one update; one tensor per parameter, micro-batches along a leading dimension."""
        with _native.translated_errors():
            self.executable.run([gradient.contiguous() for gradient in gradients])


def some_weight(shape=SHAPE, dtype=torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape).to(dtype))


@dataclass
class Case:
    """An optimizer of ours and the one it must agree with."""

    ours: Callable
    reference: Callable


CASES = {
    "SGD": Case(
        lambda p: optim.SGD(p, lr=0.1, weight_decay=0.2),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2),
    ),
    "torch SGD": Case(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ),
    "SGD momentum": Case(
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2, loss_scaling=16.0),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2),
    ),
    "SGD nesterov": Case(
        lambda p: optim.SGD(
            p, lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True, loss_scaling=16.0
        ),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True),
    ),
    "SGD combined": Case(
        lambda p: optim.SGD(
            p,
            lr=0.1,
            momentum=0.9,
            weight_decay=0.2,
            loss_scaling=16.0,
            velocity_scaling=4.0,
            use_combined_accum=True,
        ),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2),
    ),
    "SGD combined nesterov": Case(
        lambda p: optim.SGD(
            p,
            lr=0.1,
            momentum=0.9,
            weight_decay=0.2,
            nesterov=True,
            loss_scaling=16.0,
            velocity_scaling=4.0,
            use_combined_accum=True,
        ),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True),
    ),
    "Adam": Case(
        lambda p: optim.Adam(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2, loss_scaling=16.0),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2),
    ),
    "AdamW": Case(
        lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.2),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2),
    ),
    "LAMB": Case(
        lambda p: optim.LAMB(p, lr=0.1, weight_decay=0.2, loss_scaling=16.0),
        lambda p: optim.LAMB(p, lr=0.1, weight_decay=0.2),
    ),
    "LAMB uncorrected": Case(
        lambda p: optim.LAMB(p, lr=0.1, bias_correction=False, max_weight_norm=3.0),
        lambda p: optim.LAMB(p, lr=0.1, bias_correction=False, max_weight_norm=3.0),
    ),
    "RMSprop": Case(
        lambda p: optim.RMSprop(p, lr=0.1, weight_decay=0.2, loss_scaling=16.0),
        lambda p: torch.optim.RMSprop(p, lr=0.1, weight_decay=0.2),
    ),
    "RMSprop momentum": Case(
        lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    ),
    "RMSprop centered": Case(
        lambda p: optim.RMSprop(p, lr=0.01, alpha=0.9, momentum=0.9, centered=True, eps=1e-3),
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, momentum=0.9, centered=True, eps=1e-3),
    ),
}
