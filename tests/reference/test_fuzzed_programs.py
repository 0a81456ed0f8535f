"""Programs that hypothesis makes up, on the device and by the reference interpreter.

Graphs of many operators, with views, changes in place, loops, branches, float16, integers and
random numbers; forward, backward and updates. Each runs with the passes that fit it to the host and
without them. Programs in which rounding decides are not judged: a small change of what they are
given must change little.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption

import popsim_torch as poptorch
from popsim_torch.enums import OutputMode
from popsim_torch.executor.build import build_executable
from popsim_torch.ir import TensorKind
from popsim_torch.reference import OPS, Interpreter
from tests.parity.compare import Loop
from tests.parity.control.flow import cond, for_loop
from tests.parity.test_random_graphs import COMMON, REFUSALS, SHIFT, Graph, Step
from tests.parity.test_random_graphs import shapes as some_shapes
from tests.parity.test_random_graphs import steps as plain_steps
from tests.reference.agree import variables_of

SEED = 5
NUDGE = 1e-6
# Shares of the largest number, of programs in float32 and of those that round to float16.
CLOSE, CLOSE_IN_HALF = 2e-4, 2e-2
_MARGIN = 4  # by how much less a nudge may change
TYPES = [
    lambda x: F.dropout(x, 0.4, training=True),
    lambda x: x.half().tanh() * 0.5,
    lambda x: (x.half().flatten() @ x.half().flatten() * 0.01).float() + x,
    lambda x: torch.sort(x.half().flatten()).values.sum() + x.float(),
    lambda x: x + torch.randn_like(x) * 0.1,
    lambda x: x * (x > SHIFT).to(torch.int64).sum().clamp(max=3),
    lambda x: x.float() + (x.float() * 8 + SHIFT).to(torch.int32).float() * 0.1,
    lambda x: x.float() * torch.arange(x.numel()).view(x.shape).remainder(3).bool(),
]
OPTIMIZERS = {
    "sgd": lambda weights: poptorch.optim.SGD(weights, lr=0.1, momentum=0.5, weight_decay=0.01),
    "adam": lambda weights: poptorch.optim.Adam(weights, lr=0.01, eps=1e-2),
    "rmsprop": lambda weights: poptorch.optim.RMSprop(weights, lr=0.01, eps=1e-2),
}


@dataclass(frozen=True)
class Control:
    """A loop, a branch, or a change of the element type; bodies see all tensors outside."""

    kind: str
    choice: int
    a: int
    bodies: tuple[tuple[Step, ...], tuple[Step, ...]]

    def apply(self, tensors: list[torch.Tensor], first_changeable: int) -> None:
        """Append the step's result to the tensors."""
        a = tensors[-1 - self.a % len(tensors)]
        if self.kind == "type":
            tensors.append(TYPES[self.choice % len(TYPES)](a).float())
            return
        first, second = (self._function(steps, tensors) for steps in self.bodies)
        if not poptorch.isRunningOnIpu():
            # Eager runs tell what autograd refuses; the device traces bodies that never run, too.
            tensors.append(first(a.clone())[0] + second(a.clone())[0])
        elif self.kind == "loop":
            tensors += for_loop(self.choice % 4, first, [a])
        else:
            flag = (a - SHIFT).mean() * (1 if self.choice % 2 else -1) > 0
            tensors += cond(flag, first, [a], second, [a])

    @staticmethod
    def _function(steps: tuple[Step, ...], outside: list[torch.Tensor]):
        def call(x: torch.Tensor) -> list[torch.Tensor]:
            tensors = [*outside, x]
            for step in steps:
                step.apply(tensors, len(outside) + 1)
            return [torch.tanh(x * 0.5 + tensors[-1].mean())]

        return call


@dataclass(frozen=True)
class Recipe:
    """A program: what ``Graph`` reads, and its optimizer."""

    parameters: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[int, ...], ...]
    steps: tuple[Step | Control, ...]
    seed: int
    loop: Loop
    optimizer: str
    reduction: str = field(default="none")

    def make_inputs(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        count = self.loop.micro_batches
        sizes = [(shape[0] * count, *shape[1:]) for shape in self.inputs]
        return [torch.randn(size, generator=generator) for size in sizes]


bodies = st.lists(plain_steps, min_size=1, max_size=2).map(tuple)
controls = st.builds(
    Control,
    st.sampled_from(["loop", "branch", "type", "type"]),
    st.integers(0, 40),
    st.integers(0, 15),
    st.tuples(bodies, bodies),
)
recipes = st.builds(
    Recipe,
    st.lists(some_shapes, min_size=2, max_size=3).map(tuple),
    st.lists(some_shapes.filter(bool), min_size=1, max_size=2).map(tuple),
    st.lists(st.one_of(plain_steps, plain_steps, controls), min_size=4, max_size=10).map(tuple),
    st.integers(0, 1000),
    st.sampled_from([Loop(), Loop(2, 1), Loop(1, 2), Loop(2, 2)]),
    st.sampled_from([*OPTIMIZERS]),
)


def refuse_what_eager_refuses(model: Graph, inputs: list[torch.Tensor], loop: Loop) -> None:
    """Reject graphs that PyTorch does not differentiate."""
    try:
        model(*(x.chunk(loop.micro_batches)[0].clone() for x in inputs))[-1].backward()
    except RuntimeError as error:
        if not any(text in str(error) for text in REFUSALS):
            raise
        raise UnsatisfiedAssumption from error
    model.zero_grad()


@dataclass
class Results:
    """What comes back, and what stays: variables by their ids."""

    returned: list[torch.Tensor]
    kept: dict[int, torch.Tensor]

    def differences(self, other: Results, close: float) -> list[str]:
        """Return what is further off than a share of the largest number."""
        pairs = [
            *(
                (f"return {i}", *pair)
                for i, pair in enumerate(zip(self.returned, other.returned, strict=True))
            ),
            *((f"variable {i}", value, other.kept[i]) for i, value in self.kept.items()),
        ]
        return [name for name, a, b in pairs if not _is_close(a, b, close)]


def _is_close(a: torch.Tensor, b: torch.Tensor, close: float) -> bool:
    a, b = a.double().reshape(-1), b.double().reshape(-1)
    largest = float(b.abs().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=close, atol=close * largest + 1e-7)


def interpreted(device, inputs: list[torch.Tensor], nudge: float = 0.0) -> Results:
    """Return what the interpreter gives, maybe of numbers a little larger."""
    twin = Interpreter.like(device)
    graph = device.compiled.program.graph
    if nudge:
        for tensor in graph.of_kind(TensorKind.VARIABLE):
            if tensor.dtype.is_floating_point and tensor.numel:
                value = twin.read(tensor.id)
                twin.write(tensor.id, value * (1 + nudge))
    returned = twin.run([x * (1 + nudge) for x in inputs])
    return Results(returned, {i: twin.read(i) for i in variables_of(graph)})


def without_passes(device, inputs: list[torch.Tensor]) -> Results:
    """Return what the device gives for the program as it was lowered."""
    compiled = device.compiled
    program, graph = compiled.program, compiled.program.graph
    bare = build_executable(program, compiled.run.loop, training=True)
    bare.seed = compiled.executable.seed
    for i in variables_of(graph):
        bare.write(i, compiled.executable.read(i))
    returned = bare.run([x.clone() for x in inputs])
    return Results(returned, {i: bare.read(i) for i in variables_of(graph)})


def has_bodies(recipe: Recipe) -> bool:
    return any(isinstance(step, Control) and step.kind != "type" for step in recipe.steps)


def check(recipe: Recipe) -> None:
    model, inputs = Graph(recipe), recipe.make_inputs()
    refuse_what_eager_refuses(model, inputs, recipe.loop)
    options = recipe.loop.options()
    options.outputMode(OutputMode.All)
    options.randomSeed(SEED)
    optimizer = OPTIMIZERS[recipe.optimizer](model.parameters())
    device = poptorch.trainingModel(model, options, optimizer)
    try:
        device.compile(*inputs)
    except poptorch.Error as error:
        # (a body that changes what its gradient needs is refused, even if no loss needs it)
        if has_bodies(recipe) and "modified by an inplace operation" in str(error):
            raise UnsatisfiedAssumption from error
        raise
    try:
        judge(device, inputs)
    finally:
        device.destroy()


def judge(device, inputs: list[torch.Tensor]) -> None:
    """Compare a call of the device with the interpreter; reject what rounding decides."""
    graph = device.compiled.program.graph
    expected = interpreted(device, inputs)
    nudged = interpreted(device, inputs, NUDGE)
    halves = any(tensor.dtype == torch.float16 for tensor in graph.tensors) or any(
        "half" in str(op.attributes.get("code")) for op in graph.ops
    )
    close = CLOSE_IN_HALF if halves else CLOSE
    if not all(x.isfinite().all() for x in (*expected.returned, *expected.kept.values())):
        raise UnsatisfiedAssumption
    if nudged.differences(expected, close / _MARGIN):
        raise UnsatisfiedAssumption
    bare = without_passes(device, inputs)
    returned = list(device(*inputs))
    executable = device.compiled.executable
    fitted = Results(returned, {i: executable.read(i) for i in variables_of(graph)})
    assert bare.differences(expected, close) == [], "as it was lowered"
    assert fitted.differences(expected, close) == [], "fitted to the host"


@settings(max_examples=25, derandomize=True, **COMMON)
@given(recipes)
def test_fuzzed_programs(recipe):
    check(recipe)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=500, print_blob=True, **COMMON)
@given(recipes)
def test_many_fuzzed_programs(recipe):
    check(recipe)


def test_a_loop_without_iterations():
    """Its gradient has nothing to read."""
    first = Step("unary", 0, 0, 0, (0, 0, 0))
    loop = Control("loop", 0, 0, ((first,), (first,)))
    check(Recipe(((3, 4),), ((3, 4),), (first, loop), 0, Loop(), "sgd"))


def test_a_wrong_formula_is_found(monkeypatch):
    monkeypatch.setitem(OPS, "reduce", lambda call, x: x.sum(call["axes"], call["keepdim"]) * 1.01)
    steps = tuple(Step("unary", i, 0, 0, (0, 0, 0)) for i in range(2))
    with pytest.raises(AssertionError, match="as it was lowered"):
        check(Recipe(((3, 4),), ((3, 4),), steps, 0, Loop(2, 2), "sgd"))
