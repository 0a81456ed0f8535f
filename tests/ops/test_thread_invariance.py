"""Every op of the table computes the same bits on any number of threads.

A program is compiled under one number and run under another. An op whose schema and shape rule do
not lead to one (``derived.py``) needs a sample in ``op_samples.py`` that several threads have work
with.
"""

import re
from collections.abc import Callable

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.ir import walk_all
from popsim_torch.optim.planning import plan_updates
from popsim_torch.passes.op_table import op_table
from tests.ops.dense_samples import MATMULS
from tests.ops.derived import derived_sample
from tests.ops.num_threads import threads
from tests.ops.one_op import dtype_name
from tests.ops.op_samples import SAMPLES
from tests.ops.update_device import CASES, Device

# Threads when the program is compiled, and when it runs.
NUMBERS = [(1, 1), (1, 2), (1, 3), (1, 5), (2, 1), (2, 2), (3, 3), (5, 5)]
Results = list[torch.Tensor]


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def assert_invariant(compile_program: Callable[[], Callable[[], Results]], numbers=NUMBERS) -> None:
    """Compare the results of a program with those of one thread, bit by bit."""
    expected: Results = []
    for when_compiled, when_run in numbers:
        with threads(when_compiled):
            run = compile_program()
        with threads(when_run):
            actual = run()
        expected = expected or actual
        for i, (one, other) in enumerate(zip(expected, actual, strict=True)):
            assert torch.equal(bits(one), bits(other)), (
                f"result {i} differs, compiled under {when_compiled} threads, run under {when_run}"
            )


@pytest.mark.parametrize(
    ("sample", "dtype"),
    [
        pytest.param(sample, dtype, id=f"{sample.kind}-{sample.name}-{dtype_name(dtype)}")
        for sample in SAMPLES
        for dtype in sample.dtypes
    ],
)
def test_ops(sample, dtype):
    assert_invariant(lambda: sample.compile(dtype).run)


@pytest.mark.usefixtures("used_tile_units")
@pytest.mark.parametrize("tile_units", ["emulated"], indirect=True)
@pytest.mark.parametrize("sample", MATMULS[:2], ids=lambda sample: sample.name)
def test_products_on_matrix_units(sample):
    assert_invariant(lambda: sample.compile(torch.float32).run)


# --- Weight updates -----------------------------------------------------------

LARGE = {"a": (401, 97), "b": (11,), "c": (160, 1001)}
CLIPPED = {"clipped": lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, max_grad_norm=0.5)}
OPTIMIZERS = {**{name: case.ours for name, case in CASES.items()}, **CLIPPED}
UPDATES = {
    "accumulate": ["SGD momentum", "Adam"],
    "adam_update": ["Adam", "AdamW"],
    "gradient_norm": ["clipped"],
    "lamb_update": ["LAMB"],
    "rmsprop_update": ["RMSprop centered"],
    "sgd_combined_accumulate": ["SGD combined"],
    "sgd_combined_update": ["SGD combined nesterov"],
    "sgd_momentum_update": ["SGD nesterov", "clipped"],
    "sgd_update": ["SGD"],
}


def compile_update(name: str, kind: str, dtype: torch.dtype) -> Callable[[], Results]:
    generator = torch.Generator().manual_seed(3)
    shapes = LARGE.items()
    values = {key: torch.randn(shape, generator=generator).to(dtype) for key, shape in shapes}
    weights = {key: torch.nn.Parameter(value) for key, value in values.items()}
    plan = plan_updates(OPTIMIZERS[name](weights.values()), weights, gradient_accumulation=2)
    device = Device(plan, weights, 2, grouped=True)
    assert kind in device.kinds()
    gradients = [torch.randn(2, *shape, generator=generator).to(dtype) for _, shape in shapes]

    def run() -> Results:
        device.run(*gradients)
        device.run(*gradients)
        return [device.read(name) for name in (*weights, *plan.states())]

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in UPDATES.items() for n in names])
def test_updates(kind, name, dtype):
    assert_invariant(lambda: compile_update(name, kind, dtype))


# --- The long tail ------------------------------------------------------------

# Operators of PyTorch that add up, in the order of its own threads.
OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "prod": lambda x: (1 + x / 10000).prod(),
    "std": lambda x: x.std(),
    "norm": lambda x: torch.linalg.vector_norm(x, 3),
    "prod of rows": lambda x: (1 + x / 10000).prod(1),
    "cdist": lambda x: torch.cdist(x[:200], x[200:400]),
    "grid_sample": lambda x: torch.nn.functional.grid_sample(
        x[None, None], x[None, :, :500].sin().unflatten(2, (250, 2)), align_corners=False
    ),
    "atan2": lambda x: torch.atan2(x, x + 1),
    "sort": lambda x: x.sort(1).values,
    "erfinv": lambda x: torch.erfinv(x.clamp(-0.9, 0.9)),
    "digamma": torch.digamma,
    "det": lambda x: torch.linalg.det(0.1 * x[:200, :200]),
    "inverse": lambda x: torch.linalg.inv(x[:200, :200]),
}


class LongTail(torch.nn.Module):
    """One of the operators, on what is printed first."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(poptorch.ipu_print_tensor(x, "x", summarise_threshold=9))


def kinds_of(executor: poptorch.PoplarExecutor) -> set[str]:
    return {op.kind for _, op in walk_all(executor.compiled.program.graph)}


@pytest.mark.parametrize("function", OPERATORS.values(), ids=OPERATORS)
def test_operators_of_pytorch(function, capfd):
    x = torch.randn(700, 501, generator=torch.Generator().manual_seed(4))

    def compile_model() -> Callable[[], Results]:
        model = poptorch.inferenceModel(LongTail(function))
        model.compile(x)
        assert {"aten", "print", "anchor"} <= kinds_of(model)
        return lambda: [model(x)]

    torch.testing.assert_close(compile_model()(), [function(x)], rtol=1e-3, atol=1e-3)
    capfd.readouterr()
    assert_invariant(compile_model)
    texts = re.findall(r"x: \(.*?\n\)\n", capfd.readouterr().err, re.DOTALL)
    assert len(texts) == len(NUMBERS), texts
    assert len(set(texts)) == 1


ATEN = torch.ops.aten


def image(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(2, 7, 50, 501)


def volume(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(1, 7, 10, 10, 501)


def grid_gradient(x: torch.Tensor) -> torch.Tensor:
    grid = image(x)[:, :2, :, :250].permute(0, 2, 3, 1)
    modes = (0, 0, False)
    return ATEN.grid_sampler_2d_backward(image(x)[..., :250], image(x), grid, *modes, [True] * 2)[0]


# Operators of PyTorch whose threads compute whole results: they share their work.
SHARED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "_pdist_forward": lambda x: ATEN._pdist_forward(x, 3.0),
    "adaptive_max_pool2d": lambda x: ATEN.adaptive_max_pool2d(image(x), [21, 33])[0],
    "avg_pool3d": lambda x: ATEN.avg_pool3d(volume(x), [2, 3, 3]),
    "avg_pool3d_backward": lambda x: ATEN.avg_pool3d_backward(
        volume(x)[:, :, :5, :3, :167], volume(x), [2, 3, 3], [2, 3, 3], [0] * 3, False, True, None
    ),
    "col2im": lambda x: ATEN.col2im(
        x.reshape(1, 700, 501), [4, 502], [2, 2], [1] * 2, [0] * 2, [3, 1]
    ),
    "digamma": lambda x: torch.digamma(x.abs() + 0.1),
    "grid_sampler_2d": lambda x: ATEN.grid_sampler_2d(
        image(x), image(x)[:, :2].permute(0, 2, 3, 1), 0, 0, False
    ),
    "grid_sampler_2d_backward": grid_gradient,
    "max_pool3d": lambda x: ATEN.max_pool3d_with_indices(volume(x), [2, 3, 3])[0],
    "mode": lambda x: ATEN.mode(x.round(), 1)[0],
    "polygamma": lambda x: torch.polygamma(2, x.abs() + 0.1),
    "reflection_pad2d_backward": lambda x: ATEN.reflection_pad2d_backward(
        image(x), image(x)[..., 1:-1, 1:-1], [1] * 4
    ),
    "replication_pad2d_backward": lambda x: ATEN.replication_pad2d_backward(
        image(x), image(x)[..., 1:-1, 1:-1], [1] * 4
    ),
    "triu": torch.triu,
}


@pytest.mark.parametrize("function", SHARED.values(), ids=SHARED)
def test_operators_that_share_work(function):
    x = torch.randn(700, 501, generator=torch.Generator().manual_seed(4))

    def compile_model() -> Callable[[], Results]:
        model = poptorch.inferenceModel(LongTail(function))
        model.compile(x)
        assert "aten" in kinds_of(model)
        return lambda: [model(x)]

    torch.testing.assert_close(compile_model()(), [function(x)], rtol=1e-3, atol=1e-3)
    assert_invariant(compile_model, [(1, 1), (2, 2), (3, 3), (5, 5)])


# --- Loops and branches --------------------------------------------------------


class Repeated(torch.nn.Module):
    """Products in a branch in a loop."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        def step(y: torch.Tensor) -> torch.Tensor:
            product = torch.softmax(y @ x, 1)
            return poptorch.cond(y.sum() > 0, torch.sin, [product], torch.cos, [product])[0]

        return poptorch.for_loop(3, step, [x])


def test_loops_and_branches():
    x = torch.randn(300, 300, generator=torch.Generator().manual_seed(4))

    def compile_model() -> Callable[[], Results]:
        model = poptorch.inferenceModel(Repeated())
        model.compile(x)
        assert {"loop", "branch", "yield"} <= kinds_of(model)
        return lambda: list(model(x))

    assert_invariant(compile_model)


def test_loops_of_functions():
    x = torch.randn(300, 300, generator=torch.Generator().manual_seed(4))

    def compile_function() -> Callable[[], Results]:
        queue = poptorch.OutfeedQueue()

        def body(y: torch.Tensor) -> torch.Tensor:
            product = torch.softmax(y @ x, 1)
            queue.enqueue(product)
            return product

        @poptorch.function
        def program() -> torch.Tensor:
            return poptorch.while_loop(
                lambda y: y.max() > 0.05, body, inputs=x, maximum_iterations=3
            )

        program()
        graphs = [one.compiled.program.graph for one in program.programs]
        kinds = {op.kind for graph in graphs for _, op in walk_all(graph)}
        assert {"enqueue", "repeat_while"} <= kinds
        queue.dequeue()
        return lambda: [program(), queue.dequeue()]

    assert_invariant(compile_function)


# --- Nothing is left out ------------------------------------------------------


# Those that have tests above, and host_call: threads are the business of the code that it calls.
# tests/parity/test_replicas.py runs all_reduce with several numbers of threads.
TESTED = {sample.kind for sample in SAMPLES} | UPDATES.keys()
TESTED |= {"anchor", "aten", "branch", "enqueue", "host_call", "loop", "print", "repeat_while"}
TESTED |= {"all_reduce", "yield"}


def test_every_op_of_the_table_has_a_sample():
    """That of an op without one here follows from its entry."""
    assert set(op_table()) >= TESTED
    for kind in sorted(set(op_table()) - TESTED):
        sample = derived_sample(op_table()[kind])
        for dtype in sample.dtypes:
            assert_invariant(lambda sample=sample, dtype=dtype: sample.compile(dtype).run)


# --- Models -------------------------------------------------------------------


class Net(torch.nn.Module):
    """Layers and a loss."""

    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*layers)
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.layers(x), labels)


class Last(torch.nn.Module):
    """The last step of a sequence, or of an LSTM's output."""

    def forward(self, x) -> torch.Tensor:
        return (x[0] if isinstance(x, tuple) else x)[:, -1]


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "MLP": (
        lambda: Net(
            *(torch.nn.Linear(300, 260), torch.nn.ReLU()),
            *(torch.nn.Linear(260, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10)),
        ),
        (300, 300),
    ),
    "CNN": (
        lambda: Net(
            *(torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU()),
            *(torch.nn.Conv2d(32, 48, 3, stride=2), torch.nn.BatchNorm2d(48), torch.nn.ReLU()),
            *(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(48, 10)),
        ),
        (9, 3, 32, 32),
    ),
    "LSTM": (
        lambda: Net(torch.nn.LSTM(64, 96, batch_first=True), Last(), torch.nn.Linear(96, 10)),
        (24, 20, 64),
    ),
    "attention": (
        lambda: Net(
            torch.nn.TransformerEncoderLayer(64, 2, 128, dropout=0.1, batch_first=True),
            Last(),
            torch.nn.Linear(64, 10),
        ),
        (5, 80, 64),
    ),
}


@pytest.mark.parametrize(("make", "shape"), MODELS.values(), ids=MODELS)
def test_models(make, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    labels = torch.arange(shape[0]) % 10

    def compile_model() -> Callable[[], Results]:
        torch.manual_seed(6)
        net = make()
        options = poptorch.Options().randomSeed(7)
        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        model = poptorch.trainingModel(net, options, optimizer)
        model.compile(x, labels)

        def run() -> Results:
            losses = [model(x, labels), model(x, labels)]
            return [*losses, *(value.clone() for value in net.state_dict().values())]

        return run

    assert_invariant(compile_model, [(1, 1), (2, 2), (3, 3), (5, 5)])
