"""Operators and functions that users define with PyTorch's own means run as they stand."""

import copy
from pathlib import Path

import pytest
import torch
from torch.autograd.function import once_differentiable
from torch.utils.cpp_extension import include_paths

import popsim_torch as poptorch
from tests.custom_ops import library
from tests.options import make_options


def define(library, name, repeats):
    """An operator that repeats its rows, with code without data and a gradient."""

    def forward(x):
        return x.repeat(repeats, 1)

    def fake(x):
        return x.new_empty(repeats * x.shape[0], x.shape[1])

    def backward(ctx, grad):
        return grad.reshape(repeats, -1, grad.shape[1]).sum(0)

    operator = torch.library.custom_op(
        f"{library}::{name}", forward, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operator.register_fake(fake)
    operator.register_autograd(backward)
    return operator


class Repeat(torch.nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.fc = torch.nn.Linear(3, 4)
        self.operator = operator

    def forward(self, x):
        y = self.operator(self.fc(x))
        return y, poptorch.identity_loss(y.square(), reduction="mean")


def test_training():
    torch.manual_seed(0)
    model = Repeat(define("popsim_tests", "rows", 3))
    x = torch.randn(2, 3)
    y, loss = model(x)
    loss.backward()
    expected = model.fc.weight - 0.5 * model.fc.weight.grad
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5)
    device = poptorch.trainingModel(model, optimizer=optimizer)
    results = device(x)
    torch.testing.assert_close(results[0], y)
    torch.testing.assert_close(results[1], loss)
    device.copyWeightsToHost()
    torch.testing.assert_close(model.fc.weight, expected)


def test_defined_anew():
    x = torch.randn(2, 3)
    for repeats in (2, 5):
        model = Repeat(define("popsim_tests", "rows_anew", repeats))
        results = poptorch.inferenceModel(model)(x)
        torch.testing.assert_close(results, model(x))


# --- torch.autograd.Function: what its backward says is the gradient, right or not ---


class SeveralInputsAndOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, factor):
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        positive = (x > 0).int()
        ctx.mark_non_differentiable(positive)
        return x * weight * factor, x + weight, positive

    @staticmethod
    def backward(ctx, of_product, of_sum, _):
        x, weight = ctx.saved_tensors
        return (
            7 * (of_product * weight * ctx.factor + of_sum),
            3 * (of_product * x * ctx.factor + of_sum),
            None,
        )


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return 5 * gradient


class NoGradientForOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return 2 * x, 3 * weight

    @staticmethod
    def backward(ctx, _, of_weight):
        return None, of_weight


class SetupContext(torch.autograd.Function):
    @staticmethod
    def forward(x, weight):
        return x @ weight, weight.sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, of_product, of_sum):
        x, weight = ctx.saved_tensors
        assert of_sum is None
        return of_product @ weight.T, 2 * (x.T @ of_product)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 10 * gradient


class OtherArguments(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, settings, *rest):
        ctx.num_others = 1 + len(rest)
        return x * settings["factor"]

    @staticmethod
    def backward(ctx, gradient):
        return (2 * gradient, *[None] * ctx.num_others)


class GradientInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(inner.sin().sum(), inner)
        return slope

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return -3 * x.sin() * gradient


FUNCTIONS = {
    "several": lambda x, w: sum(SeveralInputsAndOutputs.apply(x, w, 2.0)),
    "once differentiable": lambda x, w: OnceDifferentiable.apply(x),
    "None as a gradient": lambda x, w: sum(NoGradientForOne.apply(x, w)),
    "setup_context": lambda x, w: SetupContext.apply(x, w)[0],
    "in place": lambda x, w: InPlace.apply(x.clone()),
    "other arguments": lambda x, w: OtherArguments.apply(x, {"factor": 3.0}, "text", None),
    "a gradient in forward": lambda x, w: GradientInForward.apply(x),
}


@torch.library.custom_op("popsim_tests::pair", mutates_args=())
def pair(
    x: torch.Tensor, others: list[torch.Tensor], word: str, times: int, flag: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Several kinds of arguments and results."""
    assert word == "word" and all(other.dtype == x.dtype for other in others)
    return x * times if flag else x.clone(), sum(others)


@pair.register_fake
def _(x, others, word, times, flag):
    return torch.empty_like(x), torch.empty_like(others[0])


def keep_numbers(ctx, inputs, output):
    ctx.times, ctx.num_others = inputs[3], len(inputs[1])


def gradients_of_pair(ctx, of_x, of_sum):
    return of_x * ctx.times, [of_sum * (i + 1) for i in range(ctx.num_others)], None, None, None


pair.register_autograd(gradients_of_pair, setup_context=keep_numbers)


@torch.library.custom_op("popsim_tests::maybe", mutates_args=())
def maybe(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """An argument that may be left out; no gradient."""
    return x.clone() if y is None else x + y


@maybe.register_fake
def _(x, y=None):
    return torch.empty_like(x)


OPERATORS = {
    "lists and others": lambda x, w: sum(pair(x, [w, w * 2], "word", 3, True)),
    "left out": lambda x, w: maybe(x.detach()) * w + maybe(x.detach(), w.detach()),
}
CASES = {**FUNCTIONS, **OPERATORS}


class Called(torch.nn.Module):
    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(3, 3, dtype=dtype))
        self.function = function

    def forward(self, x):
        y = self.function(x * self.weight, self.weight)
        return y, poptorch.identity_loss(y.float().square(), reduction="mean")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(case, dtype):
    model = Called(CASES[case], dtype)
    eager = copy.deepcopy(model)
    x = torch.randn(3, 3).to(dtype)
    y, loss = eager(x)
    loss.backward()
    expected = eager.weight - 0.1 * eager.weight.grad
    tolerance = {"rtol": 4e-3, "atol": 2e-3} if dtype == torch.float16 else {}
    inference = poptorch.inferenceModel(copy.deepcopy(model), make_options())
    torch.testing.assert_close(inference(x), (y, loss), **tolerance)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    device = poptorch.trainingModel(model, make_options(), optimizer)
    torch.testing.assert_close(device(x), (y, loss), **tolerance)
    device.copyWeightsToHost()
    torch.testing.assert_close(model.weight, expected, **tolerance)


@torch.library.custom_op("popsim_tests::add_to", mutates_args={"x"})
def add_to(x: torch.Tensor, number: float) -> None:
    """Change an argument."""
    assert x.dtype in (torch.float32, torch.float16)
    x.add_(number)


@torch.library.custom_op("popsim_tests::swap", mutates_args={"x", "y"})
def swap(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Change two arguments, and return two tensors."""
    old = x.clone()
    x.copy_(y)
    y.copy_(old)
    return x * 2, y * 3


@swap.register_fake
def _(x, y):
    return torch.empty_like(x), torch.empty_like(y)


class Changing(torch.nn.Module):
    """Changes a buffer, a view of an input, and values."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        add_to(self.count, 1.0)
        add_to(x[1:], number=10.0)
        a, b = x * 1, x * 2
        c, d = swap(a, b)
        torch.ops.popsim_tests.add_to(a, 0.5)
        return x, a, b, c, d, self.count + 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_operators_that_change_their_arguments(dtype):
    model = Changing().to(dtype)
    eager = copy.deepcopy(model)
    device = poptorch.inferenceModel(model, make_options())
    for _ in range(3):
        ours, theirs = torch.arange(3.0, dtype=dtype), torch.arange(3.0, dtype=dtype)
        torch.testing.assert_close(device(ours), eager(theirs))
        assert torch.equal(ours, theirs)
    device.copyWeightsToHost()
    assert model.count.tolist() == [3, 3, 3]


def test_a_change_keeps_the_gradient():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            y = x.clone()
            add_to(y, 2.0)
            z = 2 * self.weight
            with torch.no_grad():
                add_to(z, 3.0)
            return poptorch.identity_loss(y * z, "sum")

    model = Model()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, make_options(), optimizer)
    x = torch.tensor([1.0, 2.0, 3.0])
    assert training(x) == ((x + 2) * 5).sum()
    training.copyWeightsToHost()
    torch.testing.assert_close(model.weight.detach(), 1 - 0.1 * 2 * (x + 2))


def test_a_changing_operator_that_is_defined_anew():
    for number in (2.0, 3.0):

        def forward(x, number=number):
            x.mul_(number)

        operator = torch.library.custom_op(
            "popsim_tests::times", forward, mutates_args={"x"}, schema="(Tensor(a!) x) -> ()"
        )

        class Model(torch.nn.Module):
            def forward(self, x, operator=operator):
                y = x.clone()
                operator(y)
                return y

        x = torch.ones(2)
        assert torch.equal(poptorch.inferenceModel(Model(), make_options())(x), number * x)


def test_an_operator_in_python_sees_the_type_that_forward_sees():
    seen = []

    def forward(x):
        seen.append(x.dtype)
        return x * 2

    operator = torch.library.custom_op(
        "popsim_tests::seeing", forward, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operator.register_fake(torch.empty_like)

    class Model(torch.nn.Module):
        def forward(self, x):
            return operator(x)

    x = torch.randn(3).half()
    assert torch.equal(poptorch.inferenceModel(Model(), make_options())(x), 2 * x)
    assert seen == [torch.float16]


def test_an_error_of_an_operator_names_the_op_and_leaves_the_model_usable():
    switch = {"on": True}

    def forward(x):
        if switch["on"]:
            raise ValueError("not today")
        return x * 2

    operator = torch.library.custom_op(
        "popsim_tests::failing", forward, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operator.register_fake(torch.empty_like)

    class Model(torch.nn.Module):
        def forward(self, x):
            return operator(x)

    model = poptorch.inferenceModel(Model(), make_options())
    x = torch.ones(3)
    for _ in range(2):
        with pytest.raises(
            poptorch.Error,
            match=r"'Failing:0' \(aten, .*test_custom_operators\.py:\d+\): ValueError: not today",
        ):
            model(x)
    switch["on"] = False
    assert torch.equal(model(x), 2 * x)


@pytest.mark.slow
def test_an_operator_in_cpp_against_the_headers_of_pytorch():
    include = [f"-isystem{path}" for path in include_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = ["-std=c++20", "-Wno-pedantic", "-Wno-error", abi, *include]
    flags += [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    torch.ops.load_library(library.compiled("torch_library.cpp", "torch_library", *flags))
    torch.library.register_fake("popsim_tests_cpp::scaled")(lambda x, factor: torch.empty_like(x))

    def keep_factor(ctx, inputs, output):
        ctx.factor = inputs[1]

    torch.library.register_autograd(
        "popsim_tests_cpp::scaled",
        lambda ctx, gradient: (5 * ctx.factor * gradient, None),
        setup_context=keep_factor,
    )
    model = Called(lambda x, w: torch.ops.popsim_tests_cpp.scaled(x, 2.0))
    x = torch.randn(3, 3)
    eager = copy.deepcopy(model)
    y, loss = eager(x)
    loss.backward()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    device = poptorch.trainingModel(model, make_options(), optimizer)
    torch.testing.assert_close(device(x), (y, loss))
    device.copyWeightsToHost()
    torch.testing.assert_close(model.weight, eager.weight - 0.1 * eager.weight.grad)
