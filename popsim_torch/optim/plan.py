"""The weight update of a model as data: the ops, states and scalars of an optimizer.

An ``OptimizerPlan`` becomes ir as follows, for every ``ParameterUpdate`` ``u`` of parameter ``w``:

1. Every micro-batch (backward phase), for every ``a`` in ``u.accumulations``: op ``a.kind`` with
   inputs ``[Gradient___w, a.state, *a.scalars]`` and one output, a view of the whole of
   ``a.state`` named ``a.output``.
2. Once, after all micro-batches (update phase), when ``plan.replicas`` is above 1: op
   ``all_reduce`` with all accumulators as inputs, and a view of each, ``w_reducedGrad``, as its
   outputs. It adds up the accumulators of all replicas, in all processes.
3. Once (update phase), when ``plan.max_grad_norm`` is not None: op
   ``gradient_norm`` with inputs ``[*gradients, plan.loss_scaling]``, where the gradients are the
   second inputs of all update ops, the attributes ``plan.norm_attributes``, and one float32 output
   of shape ``()``, ``GlobalNorm___0``.
4. Once (update phase): op ``u.kind`` with inputs ``[w, gradient, *u.states, *u.scalars]``,
   followed by the output of ``gradient_norm`` when ``u.clipped``. ``u.gradient`` chooses
   ``gradient``: the gradient itself, the accumulator, or nothing (an empty input slot). Outputs: a
   view of the whole of ``w`` named ``u.updated_name``, then one view per state, in the order of
   ``u.states``, named ``u.updated_state_names``, then the anchored ones of ``u.terms``.

An accumulator adds up the gradients of all micro-batches of a device iteration;
``Cursor.accumulation_step`` is 0 for the first of them.

Scalars are float32 tensors of shape ``()``; anchors show some of them in the weight's dtype.
Scalars that are not constant are variables of the device and keep their name; constant ones can be
unnamed constants.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from popsim_torch.errors import Error
from popsim_torch.ir import names
from popsim_torch.optim.formula import InitialValue, UpdateFormula
from popsim_torch.optim.loss_scale import LossScaleRule

__all__ = [
    "Accumulation",
    "AttributeValue",
    "GradientInput",
    "HyperParameter",
    "OptimizerPlan",
    "ParameterUpdate",
    "Scalar",
    "State",
    "Term",
]

AttributeValue = bool | int | float | str


class GradientInput(enum.Enum):
    """The source of the gradient of an update op."""

    GRADIENT = "gradient"
    """``Gradient___w`` of the only micro-batch."""
    ACCUMULATOR = "accumulator"
    """``Accum___w``, after the last micro-batch."""
    NONE = "none"
    """The op has no gradient: the velocity already contains it (combined SGD)."""


@dataclasses.dataclass(frozen=True)
class HyperParameter:
    """A value of the optimizer object, before scalars are derived from it."""

    value: float
    constant: bool


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A hyper-parameter on the device: a float32 tensor of shape ``()``.

    Attributes:
        name: Tensor name, e.g. ``scaledLearningRate0___specific___fc1.weight``. Parameters outside
            of all groups share ``...___default___FLOAT``, so a name may occur in several updates.
        value: Value in its derived form, e.g. ``lr * (1 - dampening) / (loss_scaling * ...)``.
        constant: Whether it is part of the program: never uploaded again, and without a listed
            tensor name.
        dtype: ``torch.float32``, or float64 for formulas, even if the name ends in ``FLOAT16``: in
            float16, ``1 - lr * weight_decay`` would mostly be 1, and weights would not decay.
        shown_dtype: The dtype in an anchor: float16 for some scalars of a float16 weight.
        gradient_scale: 1: it is proportional to the scale of the gradients; -1: to its inverse;
            0: to neither.
    """

    name: str
    value: float
    constant: bool
    dtype: torch.dtype = torch.float32
    gradient_scale: int = 0
    shown_dtype: torch.dtype = torch.float32

    @property
    def kind(self) -> str:
        """The kind of scalar, independent of the parameter, such as ``scaledLearningRate0``."""
        return names.hyper_parameter_kind(self.name)


@dataclasses.dataclass(frozen=True)
class State:
    """A tensor that an update keeps from one device iteration to the next.

    Attributes:
        name: Tensor name, ``<kind>___<parameter>``.
        kind: ``Accum``, ``Accl``, ``Accl1``, ``Accl2``, ``Accl3`` or ``Step``.
        dtype: The dtype of the tensor.
        per_element: True: the shape of the parameter. False: shape ``(1,)``.
        initial: Value before the first update.
        initial_per_weight: The initial weight times this factor is added to ``initial``.
        scale: The tensor holds the true value times this factor.
        shape: The shape, if it is neither of these.
        initial_from: How it begins, if that is neither of these.
        given: The value that the optimizer holds for it on the host; None if it holds none.
        path: Where the optimizer keeps it on the host: keys in the state of the parameter.
        owner: ``group``, ``optimizer`` or ``state`` if it is kept there instead.
        number: ``bool``, ``int`` or ``float`` if the host has a number or a truth value of
            Python's; ``flag`` if it has nothing.
    """

    name: str
    kind: str
    dtype: torch.dtype
    per_element: bool = True
    initial: float = 0.0
    initial_per_weight: float = 0.0
    scale: float = 1.0
    shape: tuple[int, ...] | None = None
    initial_from: InitialValue | None = dataclasses.field(default=None, compare=False)
    given: torch.Tensor | None = dataclasses.field(default=None, compare=False)
    path: tuple[Any, ...] = ()
    owner: str = ""
    number: str = ""

    @property
    def accumulates(self) -> bool:
        """Whether the only purpose of the state is to add up gradients."""
        return self.kind == "Accum"

    def shape_for(self, weight: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the state of a weight.

        Args:
            weight: The shape of the weight.
        """
        if self.shape is not None:
            return self.shape
        return tuple(weight) if self.per_element else (1,)

    def initial_value(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the state before the first update.

        Args:
            weight: The parameter's value, any shape.

        Returns:
            A new CPU tensor of the state's dtype, shaped like ``weight`` or ``(1,)``.
        """
        if self.given is not None:
            return self.given.detach().to("cpu", self.dtype)
        if self.initial_from is not None:
            return self.initial_from.of(weight).to(self.dtype)
        if self.dtype.is_complex and self.shape is None:  # states of pairs of numbers
            pairs = torch.view_as_real(weight.detach().to("cpu", self.dtype).resolve_conj())
            real = dataclasses.replace(self, dtype=torch.float32)
            return torch.view_as_complex(real.initial_value(pairs))
        shape = self.shape_for(weight.shape)
        value = torch.full(shape, self.initial, dtype=torch.float32, device="cpu")
        if self.initial_per_weight:
            value += self.initial_per_weight * weight.detach().to("cpu", torch.float32)
        return value.to(self.dtype)


@dataclasses.dataclass(frozen=True)
class Term:
    """A float32 tensor that an update op computes internally, and writes only if it is anchored.

    Attributes:
        name: Tensor name, such as ``AdamUpdater___<parameter>``.
        per_element: True: the shape of the parameter. False: one number, of shape ``()``.
    """

    name: str
    per_element: bool = True


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """An op that runs for every micro-batch and adds its gradient to a state.

    Inputs of the op: ``[Gradient___w, state, *scalars]``; output: a view of the whole of ``state``.

    Attributes:
        kind: Op name: ``accumulate`` or ``sgd_combined_accumulate``.
        state: The state to add to: ``Accum___w``, or ``Accl___w`` for combined SGD (then ``state``
            is also one of the update's states).
        output: Name of the op's output, e.g. ``UpdatedVar___Accum___w``.
        scalars: Further inputs.
        attributes: Attributes of the op.
    """

    kind: str
    state: State
    output: str
    scalars: tuple[Scalar, ...] = ()
    attributes: Mapping[str, AttributeValue] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ParameterUpdate:
    """The op that updates one parameter, once per device iteration.

    Inputs of the op: ``[w, gradient, *states, *scalars]`` and then, when ``clipped``, the output of
    ``gradient_norm``. Outputs: ``[updated_name, *updated_state_names]``, each a view of the whole
    of the tensor that it updates, and after them ``terms``. The orders of states, scalars and
    terms are those of the op's schema (``csrc/ops/update``).

    Attributes:
        parameter: Canonical name of the parameter, ``w``.
        kind: Op name: ``sgd_update``, ``sgd_momentum_update``, ``sgd_combined_update``,
            ``adam_update``, ``lamb_update`` or ``rmsprop_update``; or ``formula``.
        gradient: The source of the second input.
        states: Tensors the op reads and writes, besides the parameter.
        scalars: Hyper-parameters the op reads.
        attributes: Attributes of the op.
        accumulations: Ops that run before, for every micro-batch.
        clipped: Whether the op takes the global gradient norm as its last input.
        terms: Additional tensors that the op can return.
        formula: The graph of the update, for the kind ``formula``. Its inputs are weight, gradient
            and states of each of its parameters, and then ``scalars`` without the last one: the
            factor that gradients contain. Updates of parameters that depend on each other share it.
        counter: A count of updates that the op itself does not need, but PyTorch has.
        constants: What the optimizer keeps on the host for the parameter beside numbers and
            tensors: the path and the value of each.
    """

    parameter: str
    kind: str
    gradient: GradientInput
    states: tuple[State, ...]
    scalars: tuple[Scalar, ...]
    attributes: Mapping[str, AttributeValue] = dataclasses.field(default_factory=dict)
    accumulations: tuple[Accumulation, ...] = ()
    clipped: bool = False
    terms: tuple[Term, ...] = ()
    formula: UpdateFormula | None = None
    counter: State | None = None
    constants: tuple[tuple[Any, ...], ...] = ()

    @property
    def updated_name(self) -> str:
        """Name of the op's first output."""
        return names.updated(self.parameter)

    @property
    def updated_state_names(self) -> tuple[str, ...]:
        """Names of the op's other outputs, one per state."""
        if self.kind == "sgd_combined_update":
            return tuple(names.velocity_after_update(self.parameter) for _ in self.states)
        return tuple(names.updated(state.name) for state in self.states)

    @property
    def accumulator(self) -> State | None:
        """``Accum___w``, or None when there is no separate accumulator."""
        for accumulation in self.accumulations:
            if accumulation.state.accumulates:
                return accumulation.state
        return None

    @property
    def all_states(self) -> tuple[State, ...]:
        """Every state of this parameter, once: the accumulator, if any, and ``kept``."""
        accumulator = self.accumulator
        return self.kept if accumulator is None else (accumulator, *self.kept)

    @property
    def kept(self) -> tuple[State, ...]:
        """The states that the optimizer keeps: ``states``, and the counter, if any."""
        return self.states if self.counter is None else (*self.states, self.counter)

    @property
    def all_scalars(self) -> tuple[Scalar, ...]:
        """The scalars of the update and of its accumulations."""
        return (*self.scalars, *(s for a in self.accumulations for s in a.scalars))


@dataclasses.dataclass(frozen=True)
class OptimizerPlan:
    """Everything that a compiled program needs of an optimizer.

    Attributes:
        type_name: ``SGD1`` (combined), ``SGD2``, ``ADAM``, ``ADAMW``, ``LAMB`` or ``RMSPROP``.
        updates: One per trained parameter, in the order of the model's parameters.
        loss_scaling: ``lossScaling_FLOAT``: the seed of the backward pass.
        max_grad_norm: The largest global norm a gradient may have; None: no clipping.
        norm_attributes: Attributes of the ``gradient_norm`` op.
        groups: Per group of the optimizer, the names of its parameters in the model.
        defaults: Hyper-parameters of parameters in no group, by attribute name.
        group_values: Hyper-parameters per group, by attribute name.
        modes: The properties that cannot change after compilation, by their names in error messages
            (a plural).
        loss_scale_rule: How the device adapts the loss scale by itself; None if it does not.
        replicas: Replicas whose gradients are added up before the updates, in all processes.
        replicas_here: Those of one process.
        description: The log lines that describe the optimizer.
    """

    type_name: str
    updates: tuple[ParameterUpdate, ...]
    loss_scaling: Scalar
    max_grad_norm: float | None
    norm_attributes: Mapping[str, AttributeValue]
    groups: tuple[tuple[str, ...], ...]
    defaults: Mapping[str, HyperParameter]
    group_values: tuple[Mapping[str, HyperParameter], ...]
    modes: Mapping[str, object]
    loss_scale_rule: LossScaleRule | None = None
    replicas: int = 1
    replicas_here: int = 1
    description: tuple[str, ...] = ()

    def scalars(self) -> dict[str, Scalar]:
        """Return every scalar of the plan once, by name, constant ones included."""
        found = {self.loss_scaling.name: self.loss_scaling}
        for update in self.updates:
            for scalar in update.all_scalars:
                found.setdefault(scalar.name, scalar)
        return found

    def variable_scalars(self) -> dict[str, Scalar]:
        """Return the scalars that are tensors of the device, by name: ``ipu_param``."""
        return {name: scalar for name, scalar in self.scalars().items() if not scalar.constant}

    def states(self) -> dict[str, State]:
        """Return every state of the plan by name, accumulators included."""
        return {state.name: state for update in self.updates for state in update.all_states}

    def saved_states(self) -> list[str]:
        """Return the names of the states in ``ipu_state``: all except the accumulators."""
        saved = [name for name, state in self.states().items() if state.kind != "Accum"]
        return saved if self.loss_scale_rule is None else [*saved, names.LOSS_SCALE_FACTOR]

    def without_values(self) -> OptimizerPlan:
        """Return the plan without values that are written to the device.

        The removed values are those of variable scalars, and of states before the first update. The
        program depends on everything else.
        """

        def bare(scalar: Scalar) -> Scalar:
            return scalar if scalar.constant else dataclasses.replace(scalar, value=0.0)

        def empty(state: State) -> State:
            return State(state.name, state.kind, state.dtype, state.per_element, shape=state.shape)

        updates = tuple(
            dataclasses.replace(
                update,
                states=tuple(map(empty, update.states)),
                constants=(),
                scalars=tuple(map(bare, update.scalars)),
                accumulations=tuple(
                    dataclasses.replace(
                        one, state=empty(one.state), scalars=tuple(map(bare, one.scalars))
                    )
                    for one in update.accumulations
                ),
            )
            for update in self.updates
        )
        return dataclasses.replace(
            self,
            updates=updates,
            loss_scaling=bare(self.loss_scaling),
            groups=(),
            defaults={},
            group_values=(),
            description=(),
        )

    def as_data(self) -> OptimizerPlan:
        """Return the plan without graphs, as a file holds it: the program has their ops."""

        def plain_path(path: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(int(key) if isinstance(key, int) else key for key in path)

        def plain(state: State) -> State:
            path = plain_path(state.path)
            return dataclasses.replace(state, initial_from=None, given=None, path=path)

        updates = tuple(
            dataclasses.replace(
                update,
                formula=None,
                states=tuple(map(plain, update.states)),
                constants=tuple((plain_path(path), value) for path, value in update.constants),
            )
            for update in self.updates
        )
        return dataclasses.replace(self, updates=updates)

    def check_replaceable(self, new: OptimizerPlan) -> None:
        """Check that a program that was compiled with this plan can continue with another plan.

        Args:
            new: Plan for the same parameters and the same accumulation settings.

        Raises:
            Error: The new plan needs another program.

        Source:
            PopTorch's behaviour: dampening, Adam's accumulator dtypes and the TensorFlow variant of
            RMSprop are not compared; the compiled structure stays.
        """
        for name, mode in self.modes.items():
            if name == _UPDATE_RULES and new.modes.get(name) != mode:
                raise Error(_rule_difference(traced=name in new.modes))
            if name not in new.modes:
                raise Error(
                    f"{name} do not match: the model was compiled with {mode}, but the step of the "
                    "new optimizer has to be traced, because of maximize, amsgrad, hooks, groups "
                    "that differ in a switch (such as decoupled_weight_decay) or a step of its "
                    "own. Compile a new model for it."
                )
            if new.modes[name] != mode:
                raise Error(
                    f"{name} do not match: the model was compiled with {mode}, the new optimizer "
                    f"has {new.modes[name]}. Compile a new model for it."
                )
        if self.groups != new.groups:
            raise Error(_group_difference(self.groups, new.groups))
        old_scale = HyperParameter(self.loss_scaling.value, self.loss_scaling.constant)
        new_scale = HyperParameter(new.loss_scaling.value, new.loss_scaling.constant)
        _check_values("the optimizer", {"loss_scaling": old_scale}, {"loss_scaling": new_scale})
        _check_values("the defaults", self.defaults, new.defaults)
        for index, (old, values) in enumerate(
            zip(self.group_values, new.group_values, strict=True)
        ):
            _check_values(f"group {index}", old, values)

    def changed_scalars(self, new: OptimizerPlan) -> Iterator[Scalar]:
        """Yield the variable scalars of ``new`` whose value differs from this plan."""
        replacements = new.scalars()
        for name, scalar in self.variable_scalars().items():
            replacement = replacements.get(name)
            if replacement is not None and replacement.value != scalar.value:
                yield replacement

    def state_ratios(self, new: OptimizerPlan) -> dict[str, float]:
        """Return the factors by which states must be multiplied when ``new`` replaces this plan.

        Stored velocities are scaled: by the loss scale (separate momentum) or by the velocity scale
        (combined). If that scale changes, the true velocity must stay the same.

        Returns:
            The factors by state name, without factors of 1.
        """
        replacements = new.states()
        ratios = {}
        for name, state in self.states().items():
            replacement = replacements.get(name)
            if replacement is not None and replacement.scale != state.scale:
                ratios[name] = replacement.scale / state.scale
        return ratios


_UPDATE_RULES = "Update rules"


def _rule_difference(*, traced: bool) -> str:
    """Return the error message for a program of a traced step.

    Args:
        traced: Whether the step of the new optimizer is traced, too.
    """
    other = (
        "that of the new optimizer computes something else: its class, a switch of a group, or a "
        "number that its code asks for differs"
        if traced
        else "the new optimizer has none of these, and is updated by an op of the device"
    )
    return (
        f"{_UPDATE_RULES} do not match: the model was compiled with the traced step of its "
        "optimizer, because of maximize, amsgrad, hooks, groups that differ in a switch or a step "
        f"of its own; {other}. Compile a new model for it."
    )


def _group_difference(old: tuple[tuple[str, ...], ...], new: tuple[tuple[str, ...], ...]) -> str:
    """Return the error message for parameter groups that differ."""
    advice = "The groups and their parameters must stay as they were when the model was compiled."
    if len(old) != len(new):
        return f"Number of optimizer groups do not match: {len(old)} and {len(new)}. {advice}"
    index = next(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
    return (
        f"Optimizer groups do not match: group {index} had {list(old[index])}, "
        f"now {list(new[index])}. {advice}"
    )


def _check_values(
    where: str, old: Mapping[str, HyperParameter], new: Mapping[str, HyperParameter]
) -> None:
    """Raise ``Error`` if constants differ, or variables have become constants."""
    for name, before in old.items():
        after = new.get(name)
        if after is None:
            raise Error(f"Optimizer attribute '{name}' is missing in {where} of the new optimizer.")
        if before.constant != after.constant:
            kinds = ("constant", "non constant")
            was, becomes = kinds if before.constant else kinds[::-1]
            raise Error(
                f"Can not replace a {was} value with a {becomes} value: '{name}' in {where}. "
                "A poptorch optimizer's values are variable when they are passed to its "
                "constructor, or marked so by variable_attrs before the model is compiled."
            )
        if before.constant and before.value != after.value:
            raise Error(
                f"Values are constant but do not match: '{name}' in {where} was {before.value} "
                f"when the model was compiled, now {after.value}. To change it later, pass it "
                "explicitly to the constructor of a poptorch optimizer."
            )
