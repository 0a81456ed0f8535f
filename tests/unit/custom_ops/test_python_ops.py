"""Operators whose kernels are written in Python."""

import gc

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import _native
from popsim_torch.passes.native_graph import to_native
from tests.custom_ops import library
from tests.custom_ops.library import OneCall
from tests.options import make_options

DOMAIN = "popsim_tests.python"


def register(name, kernel, shapes=None, **functions):
    op = poptorch.register_custom_op(name, domain=DOMAIN)(kernel)
    if shapes is not None:
        op.shapes(shapes)
    for kind, function in functions.items():
        getattr(op, kind)(function)
    return op


def run(name, *inputs, **others):
    return library.run(name, *inputs, domain=DOMAIN, **others)


X = torch.tensor([1.0, 2.0, 3.0])


def test_it_remains_a_function():
    op = register("Function", lambda x, by=1: x + by)
    assert op(X, by=2).tolist() == [3, 4, 5]


def test_several_outputs_of_several_types():
    def kernel(x, k, flags):
        return x * k, k + flags, ~flags

    register("Several", kernel)
    k = torch.tensor([2, 3, 4], dtype=torch.int16)
    flags = torch.tensor([True, False, True])
    found = run("Several", X, k, flags, examples=[X, k, flags])
    assert [t.tolist() for t in found] == [[2, 6, 12], [3, 3, 5], [False, True, False]]
    assert [t.dtype for t in found] == [torch.float32, torch.int16, torch.bool]


def test_numbers_of_64_bits_are_narrowed_on_both_sides():
    seen = []

    def kernel(k):
        seen.append(k.dtype)
        return k.long() + 1, k.double()

    register("Wide", kernel, lambda k: (k.long(), k.double()))
    k = torch.arange(3)
    found = run("Wide", k, examples=[k, torch.empty(3, dtype=torch.float64)])
    assert seen == [torch.int32]
    assert [t.dtype for t in found] == [torch.int32, torch.float32]
    assert [t.tolist() for t in found] == [[1, 2, 3], [0, 1, 2]]


def test_the_kernel_runs_for_every_micro_batch_and_not_while_tracing():
    calls = []

    def kernel(x):
        calls.append(tuple(x.shape))
        return x

    register("Counted", kernel)
    model = poptorch.inferenceModel(OneCall("Counted", domain=DOMAIN), make_options(3))
    model.compile(torch.ones(6, 2))
    assert calls == []
    model(torch.ones(6, 2))
    assert calls == [(2, 2)] * 3


def test_a_kernel_may_keep_and_change_what_it_is_given():
    kept = []

    def kernel(x):
        kept.append(x)
        return x.mul_(2)

    register("Keeping", kernel)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("values", X.clone())

        def forward(self, x):
            (y,) = poptorch.custom_op([self.values], "Keeping", DOMAIN, 1, [self.values])
            return x + y

    model = poptorch.inferenceModel(Model(), make_options())
    for _ in range(2):
        assert model(torch.zeros(3)).tolist() == [2, 4, 6]
    model.destroy()
    assert kept[0].tolist() == [2, 4, 6]


def test_a_kernel_may_use_autograd():
    def gradient(x, y, gradient):
        with torch.enable_grad():
            x.requires_grad_()
            return torch.autograd.grad(torch.sin(x), x, gradient)

    register("Sine", lambda x: torch.sin(x), torch.empty_like, gradient=gradient)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(X.clone())

        def forward(self):
            (y,) = poptorch.custom_op([self.weight], "Sine", DOMAIN, 1, [self.weight])
            return poptorch.identity_loss(y, "sum")

    model = Model()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0)
    training = poptorch.trainingModel(model, make_options(), optimizer)
    torch.testing.assert_close(training(), torch.sin(X).sum())
    training.copyWeightsToHost()
    torch.testing.assert_close(model.weight.detach(), X - torch.cos(X))


def test_kernels_run_on_one_thread():
    threads = []

    def kernel(x):
        threads.append(torch.get_num_threads())
        return x

    register("Threads", kernel)
    run("Threads", X)
    assert threads == [1]


def test_cost():
    register(
        "Costly",
        lambda x: x,
        torch.empty_like,
        gradient=lambda x, y, gradient: gradient,
        cost=lambda x: 5 * x.numel(),
        gradient_cost=lambda x, y, gradient: (7, 1000),
    )
    model = poptorch.inferenceModel(OneCall("Costly", domain=DOMAIN), make_options())
    model.compile(X)
    graph = model.compiled.program.graph
    index = next(i for i, op in enumerate(graph.ops) if op.kind == "custom")
    work = _native.work_of(to_native(graph), index)
    assert sum(part.flops for part in work) == 15


# --- Mistakes ---


def raises():
    raise LookupError("not here")


MISTAKES = {
    "raises": (lambda x: raises(), r"kernel of .*::Raises version 1 failed: LookupError: not here"),
    "another shape": (lambda x: x[:2], r"its result 0 has shape \(2,\) .* instead of \(3,\)"),
    "another type": (lambda x: x.int(), r"torch\.int32 instead of \(3,\) and torch\.float32"),
    "too many": (lambda x: (x, x), r"it returned 2 tensors instead of 1"),
    "no tensor": (lambda x: 3.0, r"must return a tensor, or a list of tensors, got 3\.0"),
    "nothing": (lambda x: None, r"must return a tensor.*got None"),
    "another signature": (lambda: X, r"TypeError: .*takes 0 positional arguments but 1"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_kernel_names_the_op_and_the_line(mistake):
    kernel, message = MISTAKES[mistake]
    switch = {"on": True}
    register("Raises", lambda x: kernel(*[x] * switch["on"]) if switch["on"] else 2 * x)
    if mistake == "another signature":
        register("Raises", lambda *x: kernel(*x) if switch["on"] else 2 * x[0])
    model = poptorch.inferenceModel(OneCall("Raises", domain=DOMAIN), make_options())
    for _ in range(2):
        with pytest.raises(
            poptorch.Error, match=rf"'Raises:0' \(custom, .*library\.py:\d+\).*{message}"
        ):
            model(X)
    switch["on"] = False
    assert model(X)[0].tolist() == [2, 4, 6]


def test_a_mistake_of_the_shape_rule_is_one_when_the_model_is_compiled():
    register("Shapes", lambda x: x, lambda x: raises())
    with pytest.raises(
        poptorch.Error, match=r"library\.py:\d+: the shape rule of .*Shapes.*LookupError: not here"
    ):
        run("Shapes", X)
    register("Shapes", lambda x: x, lambda x: x[:2])
    with pytest.raises(
        poptorch.Error,
        match=r"gives torch\.float32 \(2,\) .* example_outputs are torch\.float32 \(3,",
    ):
        run("Shapes", X)
    register("Shapes", lambda x: x, lambda x: x.to(torch.complex64))
    with pytest.raises(poptorch.Error, match=r"the device has no torch\.complex64"):
        run("Shapes", X)


def test_shapes_that_depend_on_values_are_refused():
    register("Values", lambda x: x[x > 1], lambda x: x[x > 1])
    with pytest.raises(poptorch.Error, match=r"gives torch\.float32 \(0,\)"):
        run("Values", X)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"name": 3, "domain": "a"}, TypeError),
        ({"name": "a", "domain": None}, TypeError),
        ({"name": "", "domain": "a"}, ValueError),
        ({"name": "gro\u00df", "domain": "a"}, ValueError),
        ({"name": "a", "domain": "a", "version": "1"}, TypeError),
    ],
)
def test_what_cannot_be_registered(arguments, kind):
    with pytest.raises(kind, match="register_custom_op: the ") as caught:
        poptorch.register_custom_op(**arguments)
    assert isinstance(caught.value, poptorch.Error)


# --- Together with the rest of the package ---


def test_functions_that_are_set_anew_leave_compiled_models_alone():
    op = register("Anew", lambda x: 2 * x, torch.empty_like, gradient=lambda x, y, g: 2 * g)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(X.clone())

        def forward(self):
            (y,) = poptorch.custom_op([self.weight], "Anew", DOMAIN, 1, [self.weight])
            return poptorch.identity_loss(y, "sum")

    model = Model()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0)
    training = poptorch.trainingModel(model, make_options(), optimizer)
    training.compile()
    op.gradient(lambda x, y, g: 100 * g)
    gc.collect()
    training()
    training.copyWeightsToHost()
    assert torch.equal(model.weight.detach(), X - 2)


def test_stochastic_rounding_leaves_kernels_the_type_that_forward_sees():
    seen = []

    def kernel(x):
        seen.append(x.dtype)
        return x + 1

    register("Seeing", kernel, torch.empty_like)
    options = make_options()
    options.Precision.enableStochasticRounding(True)
    model = poptorch.inferenceModel(OneCall("Seeing", domain=DOMAIN), options)
    assert torch.equal(model(X.half())[0], X.half() + 1)
    assert seen == [torch.float16]


def test_floating_point_checks_look_at_results():
    register("Dividing", lambda x: x / 0)
    options = make_options()
    options.Precision.enableFloatingPointExceptions(True)
    model = poptorch.inferenceModel(OneCall("Dividing", domain=DOMAIN), options)
    with pytest.raises(poptorch.Error, match=r"'Dividing:0' \(custom, .*division by zero"):
        model(X)


def test_gradients_in_forward():
    register("Squared", lambda x: x * x, torch.empty_like, gradient=lambda x, y, g: 2 * x * g)

    def squared(x):
        return poptorch.custom_op([x], "Squared", DOMAIN, 1, [x])[0]

    class Model(torch.nn.Module):
        def forward(self, x):
            with torch.enable_grad():
                inner = x.clone().requires_grad_()
                (slope,) = torch.autograd.grad(squared(inner).sum(), inner)
            return slope, torch.func.grad(lambda y: squared(y).sum())(x)

    for slope in poptorch.inferenceModel(Model(), make_options())(X):
        assert torch.equal(slope, 2 * X)


def test_vmap_is_refused():
    register("Mapped", lambda x: x)

    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.vmap(lambda row: poptorch.custom_op([row], "Mapped", DOMAIN, 1, [row])[0])(
                x
            )

    with pytest.raises(poptorch.Error, match=r"Mapped version 1 is called under torch\.vmap"):
        poptorch.inferenceModel(Model(), make_options())(torch.ones(2, 3))


def test_without_inputs_and_without_axes():
    register("Filled", lambda value: torch.full((2,), value))
    register("Summed", lambda x: (x.sum(), x > 1))

    class Model(torch.nn.Module):
        def forward(self, x):
            (filled,) = poptorch.custom_op([], "Filled", DOMAIN, 1, [x[:2]], {"value": 3.0})
            examples = [torch.tensor(0.0), torch.zeros(3, dtype=torch.bool)]
            return filled, *poptorch.custom_op((x,), "Summed", DOMAIN, 1, examples)

    filled, total, larger = poptorch.inferenceModel(Model(), make_options())(X)
    assert (filled.tolist(), total.item()) == ([3, 3], 6)
    assert larger.tolist() == [False, True, True]
