"""Graphs that hypothesis makes up, forward and backward, against eager PyTorch.

A graph is a list of steps; a step is an operator, the numbers of the tensors it takes and a few
numbers more. Every list of numbers means something: a step makes its operands fit. So hypothesis
can shrink a graph that fails to a few steps.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import OutputMode
from tests.parity.compare import Loop, assert_close
from tests.parity.rounding import OtherRounding
from tests.parity.tolerances import ONE_PASS, Tolerance

LEARNING_RATE = 0.1
SHAPES = [(3, 4), (4,), (2, 3, 4), (4, 3), (1, 4), (3, 1), (2, 2), (5,), (), (1, 2, 1, 3)]
MAX_ELEMENTS = 200
MAX_RANK = 4
# Away from what is often exactly zero: rounding must not choose the branch.
SHIFT = 0.137
TOLERANCE = ONE_PASS[torch.float32]
# What eager PyTorch has to keep in every rounding. The device's functions may be a few units in the
# last place off where eager's are one.
_MARGIN = 4
_OF_EAGER = Tolerance(
    TOLERANCE.rtol / _MARGIN, TOLERANCE.of_largest / _MARGIN, TOLERANCE.atol / _MARGIN
)
NUM_ROUNDINGS = 4

Numbers = tuple[int, int, int]


# --- Steps: (a, b, numbers) -> new tensor ----------------------------------------------------

UNARY = [
    torch.tanh,
    torch.sigmoid,
    torch.sin,
    torch.cos,
    torch.neg,
    torch.erf,
    F.gelu,
    F.silu,
    F.softplus,
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: torch.exp(torch.tanh(x)),
    lambda x: torch.sqrt(x * x + 0.5),
    lambda x: torch.log(x * x + 0.5),
    lambda x: torch.log1p(x * x),
    lambda x: torch.rsqrt(x * x + 0.5),
    lambda x: torch.reciprocal(x * x + 0.5),
    lambda x: torch.relu(x + SHIFT),
    lambda x: torch.abs(x + SHIFT),
    lambda x: F.leaky_relu(x + SHIFT, 0.2),
    lambda x: F.hardtanh(x + SHIFT),
    lambda x: torch.clamp(x, min=-SHIFT, max=1.0 + SHIFT),
    lambda x: F.elu(x + SHIFT),
    lambda x: torch.tanh(x) ** 3,
    lambda x: x.square() * 0.5,
    lambda x: torch.expm1(torch.tanh(x)),
    lambda x: torch.pow(2.0, torch.tanh(x)),
    lambda x: torch.atan(x) - 1,
    lambda x: 1.5 - x,
    lambda x: x / 3,
    lambda x: 2 / (x * x + 1),
    lambda x: x.detach() + x * 0.5,
    lambda x: x.half().to(x.dtype),
    lambda x: torch.floor(x + SHIFT) * 0.1 + x,
    lambda x: x * (x > SHIFT),
    lambda x: x.masked_fill(x < -SHIFT, 0.25),
    lambda x: torch.nan_to_num(x),
]
BINARY = [
    torch.add,
    torch.sub,
    torch.mul,
    lambda a, b: torch.add(a, b, alpha=0.5),
    lambda a, b: a / (b * b + 0.5),
    lambda a, b: torch.maximum(a, b + SHIFT),
    lambda a, b: torch.minimum(a, b + SHIFT),
    lambda a, b: torch.atan2(a, b * b + 0.5),
    lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b: torch.addcmul(a, a, b, value=0.5),
    lambda a, b: torch.addcdiv(a, b, b * b + 1),
    lambda a, b: torch.where(a > b + SHIFT, a, b),
    lambda a, b: torch.where(a > SHIFT, b, 0.5),
    lambda a, b: torch.hypot(a, b.abs() + 0.5),
    lambda a, b: torch.pow(a * a + 0.5, torch.tanh(b)),
    lambda a, b: a + b - a * b,
]
REDUCTIONS = [
    torch.sum,
    torch.mean,
    torch.amax,
    torch.logsumexp,
    lambda x, dim, keepdim: torch.amin(x, dim, keepdim),
    lambda x, dim, keepdim: torch.var(x, dim, correction=0, keepdim=keepdim),
    lambda x, dim, keepdim: torch.max(x, dim, keepdim).values,
    lambda x, dim, keepdim: torch.linalg.vector_norm(x + SHIFT, 2, dim, keepdim),
    lambda x, dim, keepdim: torch.prod(torch.tanh(x) + 1.5, dim, keepdim),
    lambda x, dim, keepdim: x.sum(dim=tuple(range(x.dim())), keepdim=keepdim),
    lambda x, dim, keepdim: x.mean(),
]
ALONG = [
    torch.softmax,
    torch.log_softmax,
    torch.cumsum,
    lambda x, dim: torch.flip(x, [dim]),
    lambda x, dim: torch.roll(x, 1, dim),
    lambda x, dim: torch.sort(x, dim).values,
    lambda x, dim: F.normalize(x + SHIFT, dim=dim),
    lambda x, dim: x - x.mean(dim, keepdim=True),
    lambda x, dim: torch.cat([x, x * 2], dim),
    lambda x, dim: torch.stack([x, x.sin()], dim),
    lambda x, dim: (
        torch.cat([t * (i + 1) for i, t in enumerate(x.unbind(dim))], 0) if x.dim() > 1 else x
    ),
    lambda x, dim: torch.repeat_interleave(x, 2, dim),
    lambda x, dim: F.layer_norm(x, x.shape[-1:]),
    lambda x, dim: x.gather(dim, torch.zeros(x.shape, dtype=torch.int64)),
    lambda x, dim: torch.cat(x.chunk(2, dim)[::-1], dim),
]
# View of a tensor, or something as cheap.
VIEWS = [
    lambda x, i, j, k: x.transpose(i % x.dim(), j % x.dim()),
    lambda x, i, j, k: x.permute(*reversed(range(x.dim()))),
    lambda x, i, j, k: x.reshape(-1),
    lambda x, i, j, k: x.flatten(i % x.dim()),
    lambda x, i, j, k: x.unsqueeze(i % (x.dim() + 1)),
    lambda x, i, j, k: x.squeeze(),
    lambda x, i, j, k: x.select(i % x.dim(), j % x.shape[i % x.dim()]),
    lambda x, i, j, k: x.narrow(i % x.dim(), 0, 1 + j % x.shape[i % x.dim()]),
    lambda x, i, j, k: x[j % x.shape[0] :],
    lambda x, i, j, k: x[..., :: 1 + j % 2],
    lambda x, i, j, k: x[: 1 + i % x.shape[0], None],
    lambda x, i, j, k: x.unsqueeze(0).expand(2, *x.shape),
    lambda x, i, j, k: x.reshape(x.shape[-1], -1),
    lambda x, i, j, k: x.movedim(i % x.dim(), j % x.dim()),
    lambda x, i, j, k: x.split(1 + i % 2, -1)[-1],
    lambda x, i, j, k: x.diagonal() if x.dim() > 1 else x.view(1, -1),
    lambda x, i, j, k: x.contiguous(),
]
COPIES = [
    lambda x, i, j, k: x.unfold(-1, 1 + i % x.shape[-1], 1).clone(),
    lambda x, i, j, k: F.pad(x, (i % 3, j % 3)),
    lambda x, i, j, k: x.repeat(2, *([1] * (x.dim() - 1))),
    lambda x, i, j, k: torch.tril(x.reshape(x.shape[0], -1), i % 3 - 1),
    lambda x, i, j, k: x.index_select(0, torch.tensor([i % x.shape[0], j % x.shape[0]])),
    lambda x, i, j, k: x[[i % x.shape[0], 0]],
    lambda x, i, j, k: torch.tensordot(x, torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype), 1),
    lambda x, i, j, k: x + torch.arange(x.shape[-1]),
    lambda x, i, j, k: torch.zeros_like(x) + x.sum(),
    lambda x, i, j, k: F.one_hot(torch.arange(x.shape[-1]), x.shape[-1]) * x.mean(),
]


def _in_place_on_view(y: torch.Tensor, b: torch.Tensor, numbers: Numbers) -> None:
    """Change part of a tensor that nothing else reads."""
    i, j, k = numbers
    part = y
    if y.dim() and k % 4:
        part = VIEWS[k % 10](y, i, j, k) if k % 10 not in (2, 3) else y.transpose(0, -1)
    change = [
        lambda: part.mul_(1.5),
        lambda: part.add_(b.mean()),
        lambda: part.zero_(),
        lambda: part.fill_(0.5),
        lambda: part.copy_(b.sum().expand_as(part)),
        lambda: part.sub_(part.detach() * 0.5),
        lambda: part.clamp_(-SHIFT, 1.0),
        lambda: part.masked_fill_(part > SHIFT, 0.3),
        lambda: part.tanh_(),
        lambda: part.__setitem__(..., b.mean() * 2),
        lambda: part.__setitem__(part > SHIFT, 0.75) if part.dim() else None,
        lambda: part.add_(part),
    ]
    change[(i + 3 * j) % len(change)]()


def _matmul(a: torch.Tensor, b: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    if a.dim() == 0 or b.dim() == 0:
        return a * b
    if a.shape[-1] == b.shape[0] and b.dim() <= 2:
        return torch.matmul(a, b) if numbers[0] % 2 else F.linear(a, b.t() if b.dim() == 2 else b)
    a = a.reshape(-1, a.shape[-1])
    if a.shape[-1] == b.shape[-1]:
        b = b.reshape(-1, b.shape[-1])
        products = [lambda: a @ b.t(), lambda: torch.einsum("ik,jk->ij", a, b)]
        return products[numbers[0] % 2]()
    return torch.bmm(a[None].expand(2, -1, -1), a.t()[None].expand(2, -1, -1))


def _small(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of limited size and rank."""
    while x.dim() > MAX_RANK:
        x = x.sum(0)
    while x.numel() > MAX_ELEMENTS:
        x = x.mean(-1)
    return x


@dataclass(frozen=True)
class Step:
    """A step of a graph: what it does, to which tensors of those there are, and how."""

    kind: str
    choice: int
    a: int  # counted from the newest tensor, as b is
    b: int
    numbers: Numbers

    def apply(self, tensors: list[torch.Tensor], first_changeable: int) -> None:
        """Append the step's result to the tensors."""
        a, b = (tensors[-1 - i % len(tensors)] for i in (self.a, self.b))
        i, j, k = self.numbers
        if self.kind == "unary":
            result = UNARY[self.choice % len(UNARY)](a)
        elif self.kind == "binary":
            if not _fit(a, b):
                b = b.mean()
            result = BINARY[self.choice % len(BINARY)](a, b)
        elif self.kind == "matmul":
            result = _matmul(a, b, self.numbers)
        elif self.kind == "in place":
            result = a * 1.0 if i % 2 else a.clone()
            _in_place_on_view(result, b, self.numbers)
        elif self.kind == "in place, shared":
            # Others see the change: views of it, and steps to come.
            candidates = tensors[first_changeable:] or [a * 2]
            result = candidates[-1 - self.a % len(candidates)]
            result = result if j % 2 or not result.dim() else result[i % result.shape[0]]
            result.mul_(0.5) if k % 2 else result.add_(b.mean())
        elif a.dim() == 0:
            result = a.reshape(1)
        elif self.kind == "reduce":
            rule = REDUCTIONS[self.choice % len(REDUCTIONS)]
            result = rule(a, dim=i % a.dim(), keepdim=bool(j % 2))
        elif self.kind == "along":
            result = ALONG[self.choice % len(ALONG)](a, i % a.dim())
        elif self.kind == "view":
            result = VIEWS[self.choice % len(VIEWS)](a, i, j, k)
        else:
            result = COPIES[self.choice % len(COPIES)](a, i, j, k)
        tensors.append(_small(result))


def _fit(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        shape = torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        return False
    return math.prod(shape) <= MAX_ELEMENTS


@dataclass(frozen=True)
class Recipe:
    """A graph: its tensors' shapes, its steps, how the loss is formed, and how often it runs."""

    parameters: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    reduction: str
    seed: int
    loop: Loop

    def make_inputs(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        count = self.loop.micro_batches
        shapes = [(shape[0] * count, *shape[1:]) for shape in self.inputs]
        return [torch.randn(shape, generator=generator) for shape in shapes]


class Graph(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(recipe.seed)
        self.recipe = recipe
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator)) for shape in recipe.parameters
        )

    def forward(self, *inputs: torch.Tensor):
        tensors = [*(x.tanh() for x in inputs), *self.weights]
        first_changeable = len(tensors)
        for step in self.recipe.steps:
            step.apply(tensors, first_changeable)
        results = tensors[-3:]
        if self.recipe.reduction == "none":
            total = sum((x * x).mean() + x.sum() for x in results)
            return (*results, poptorch.identity_loss(total, "none"))
        return (*results, poptorch.identity_loss(results[-1] * 2, self.recipe.reduction))


KINDS = {
    "unary": 3,
    "binary": 4,
    "matmul": 2,
    "reduce": 2,
    "along": 2,
    "view": 3,
    "copy": 1,
    "in place": 2,
    "in place, shared": 1,
}
small_numbers = st.integers(0, 12)
steps = st.builds(
    Step,
    st.sampled_from([kind for kind, weight in KINDS.items() for _ in range(weight)]),
    st.integers(0, 40),
    st.integers(0, 15),
    st.integers(0, 15),
    st.tuples(small_numbers, small_numbers, small_numbers),
)
shapes = st.sampled_from(SHAPES)
recipes = st.builds(
    Recipe,
    st.lists(shapes, min_size=2, max_size=3).map(tuple),
    st.lists(shapes.filter(bool), min_size=1, max_size=2).map(tuple),
    st.lists(steps, min_size=3, max_size=10).map(tuple),
    st.sampled_from(["none", "sum", "mean"]),
    st.integers(0, 1000),
    st.sampled_from([Loop(), Loop(2, 1), Loop(1, 2), Loop(2, 2)]),
)


# What PyTorch says of changes in place that it cannot differentiate, and of a loss without weights.
REFUSALS = (
    "modified by an inplace operation",
    "modified inplace",
    "leaf Variable",
    "refers to a single memory location",
    "does not require grad",
)


@dataclass
class Calls:
    """Results and gradients, an entry per micro-batch, and the weights in the end."""

    results: list[list[torch.Tensor]] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> Iterator[torch.Tensor]:
        for results, gradients in zip(self.results, self.gradients, strict=True):
            yield from results
            yield from gradients.values()
        yield from self.weights.values()


def _eager(graph: Graph, inputs: list[torch.Tensor], loop: Loop) -> Calls:
    """Run a call's updates; rejects the graph if PyTorch refuses it."""
    calls = Calls()
    parts = zip(*(x.chunk(loop.micro_batches) for x in inputs), strict=True)
    for part in parts:
        graph.zero_grad()
        try:
            results = graph(*(x.clone() for x in part))
            results[-1].backward()
        except RuntimeError as error:
            if not any(text in str(error) for text in REFUSALS):
                raise
            raise UnsatisfiedAssumption from error
        calls.results.append([result.detach().clone() for result in results])
        gradients = {n: p.grad for n, p in graph.named_parameters() if p.grad is not None}
        calls.gradients.append(gradients)
        if len(calls.gradients) % loop.accumulation == 0:
            with torch.no_grad():
                for name, weight in graph.named_parameters():
                    if name in gradients:
                        step = sum(g[name] for g in calls.gradients[-loop.accumulation :])
                        weight -= LEARNING_RATE * step / loop.accumulation
    calls.weights = {name: weight.detach() for name, weight in graph.named_parameters()}
    return calls


def _is_close(a: torch.Tensor, exact: torch.Tensor) -> bool:
    if not a.isfinite().all() or (a.numel() and a.abs().max() > 1e4):
        return False
    return torch.allclose(a.double(), exact, **_OF_EAGER.of(exact))


def _require_close(calls: Calls, exact: Calls) -> None:
    # What ``assume`` does, which is for tests of hypothesis alone.
    if not all(map(_is_close, calls.tensors(), exact.tensors())):
        raise UnsatisfiedAssumption


def _eager_and_exact(model: Graph, inputs: list[torch.Tensor], loop: Loop) -> tuple[Calls, Calls]:
    """Run a call's updates in float32 and in float64.

    Rejects graphs whose results are a matter of rounding: cancellation, a gradient of nothing but
    errors, a comparison of numbers that should be equal. Eager PyTorch must come closer to the
    exact result than the device has to, however it rounds.
    """
    exact = _eager(copy.deepcopy(model).double(), [x.double() for x in inputs], loop)
    expected = _eager(copy.deepcopy(model), inputs, loop)
    _require_close(expected, exact)
    for seed in range(NUM_ROUNDINGS):
        with OtherRounding(seed):
            calls = _eager(copy.deepcopy(model), inputs, loop)
        _require_close(calls, exact)
    return expected, exact


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    """Return what the device gives for the values of all micro-batches."""
    if len(values) == 1:
        return values[0]
    return torch.cat(values) if values[0].dim() else torch.stack(values)


def check(recipe: Recipe) -> None:
    model = Graph(recipe)
    inputs = recipe.make_inputs()
    expected, exact = _eager_and_exact(model, inputs, recipe.loop)
    options = recipe.loop.options()
    options.outputMode(OutputMode.All)
    names = expected.gradients[0].keys()
    for name in names:
        options.anchorTensor(name, f"Gradient___{name}")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    device = poptorch.trainingModel(model, options, optimizer)
    ours = device(*inputs)
    for i, result in enumerate(ours):
        wanted = _joined([results[i] for results in exact.results])
        assert_close(result, wanted, TOLERANCE, f"result {i}")
    for name in names:
        wanted = _joined([gradients[name] for gradients in exact.gradients])
        ours = device.getAnchoredTensor(name)
        assert_close(ours, wanted, TOLERANCE, f"gradient of {name}")
    for name, weight in model.named_parameters():
        assert_close(weight, exact.weights[name], TOLERANCE, name)
    for x, wanted in zip(inputs, recipe.make_inputs(), strict=True):
        assert torch.equal(x, wanted)


COMMON = {
    "deadline": None,
    "database": None,
    "report_multiple_bugs": False,
    "phases": (Phase.generate, Phase.shrink),
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
}


@settings(max_examples=40, derandomize=True, **COMMON)
@given(recipes)
def test_random_graphs(recipe):
    check(recipe)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1000, print_blob=True, **COMMON)
@given(recipes)
def test_many_random_graphs(recipe):
    check(recipe)


# A layer norm of rows that differ by little more than its epsilon: in its gradient, rounding errors
# of what is before it are 300 times larger.
AMPLIFIES = Recipe(
    parameters=((2, 3, 4), (1, 2, 1, 3), ()),
    inputs=((2, 3, 4),),
    steps=(
        Step("unary", 11, 2, 11, (9, 4, 10)),
        Step("matmul", 9, 3, 6, (6, 0, 3)),
        Step("binary", 33, 4, 14, (6, 6, 12)),
        Step("matmul", 36, 3, 12, (1, 2, 12)),
        Step("along", 12, 10, 15, (3, 6, 3)),
        Step("reduce", 26, 8, 6, (3, 1, 5)),
        Step("view", 8, 5, 2, (3, 11, 9)),
        Step("view", 29, 11, 7, (11, 10, 4)),
        Step("binary", 35, 7, 3, (9, 9, 12)),
    ),
    reduction="sum",
    seed=186,
    loop=Loop(),
)


def test_a_graph_that_amplifies_rounding_is_not_judged():
    with pytest.raises(UnsatisfiedAssumption):
        check(AMPLIFIES)
