"""serializedMatMul in a model: values, gradients, memory and mistakes."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import MatMulSerializationMode as Mode
from tests.options import make_options
from tests.parity.compare import assert_close
from tests.parity.tolerances import ONE_PASS

MODES = (Mode.InputChannels, Mode.ReducingDim, Mode.OutputChannels)
EVERY_MODE = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
HALF, FLOAT = torch.float16, torch.float32


class Product(nn.Module):
    """A product with a weight, and a loss."""

    def __init__(self, weight, *arguments, multiply=poptorch.serializedMatMul):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._multiply, self._arguments = multiply, arguments

    def forward(self, x, *_):
        y = self._multiply(x * 1, self.weight, *self._arguments)
        return y, poptorch.identity_loss((y.float() ** 2).sum(), "none")


def trained(model, *args):
    """Return the product, the weight's gradient and the executor."""
    options = make_options()
    options.anchorTensor("gradient", "Gradient___weight")
    optimizer = poptorch.optim.Adam(model.parameters())
    training = poptorch.trainingModel(model, options, optimizer)
    y, _ = training(*args)
    return y, training.getAnchoredTensor("gradient"), training


def eager(x, weight, seen):
    """Return the product in float32, and the gradient of the loss of what the device has seen."""
    weight = weight.detach().float().requires_grad_()
    y = torch.matmul(x.float(), weight)
    (y * 2 * seen.float()).sum().backward()
    return y.detach(), weight.grad


SHAPES = {
    "matrices": ((12, 24), (24, 36)),
    "batch and matrix": ((3, 12, 24), (24, 36)),
    "matrix and batch": ((12, 24), (5, 24, 36)),
    "batches": ((2, 3, 12, 24), (2, 3, 24, 36)),
    "broadcast batches": ((2, 1, 12, 24), (3, 24, 36)),
    "batch of one": ((1, 12, 24), (24, 36)),
    "vector and matrix": ((24,), (24, 36)),
    "matrix and vector": ((12, 24), (24,)),
    "batch and vector": ((2, 12, 24), (24,)),
}
NOTHING_TO_CUT = {
    ("vector and matrix", Mode.InputChannels),
    ("matrix and vector", Mode.OutputChannels),
    ("batch and vector", Mode.OutputChannels),
}


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@EVERY_MODE
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, mode, dtype):
    x_shape, weight_shape = SHAPES[shape]
    x, weight = torch.randn(x_shape).to(dtype), torch.randn(weight_shape).to(dtype)
    factor = 1 if (shape, mode) in NOTHING_TO_CUT else 4
    y, gradient, _ = trained(Product(weight.clone(), mode, factor), x)
    expected, expected_gradient = eager(x, weight, y)
    assert y.dtype == gradient.dtype == dtype and y.shape == expected.shape
    assert_close(y, expected, ONE_PASS[dtype], "product")
    scale = expected_gradient.abs().max()
    assert_close(gradient / scale, expected_gradient / scale, ONE_PASS[dtype], "gradient")


@EVERY_MODE
@pytest.mark.parametrize(("of_x", "of_weight"), [(HALF, FLOAT), (FLOAT, HALF)])
def test_a_parameter_is_read_in_the_type_of_the_activation(of_x, of_weight, mode):
    x, weight = torch.randn(12, 24).to(of_x), torch.randn(24, 36).to(of_weight)
    y, gradient, _ = trained(Product(weight.clone(), mode, 4), x)
    expected, expected_gradient = eager(x, weight, y)
    assert (y.dtype, gradient.dtype) == (of_x, of_weight)
    assert_close(y, expected, ONE_PASS[HALF], "product")
    scale = expected_gradient.abs().max()
    assert_close(gradient / scale, expected_gradient / scale, ONE_PASS[HALF], "gradient")


def test_two_activations_of_different_type_give_float32():
    class Model(nn.Module):
        def forward(self, x, y):
            return poptorch.serializedMatMul(x, y, Mode.ReducingDim, 2)

    x, y = torch.randn(4, 6).half(), torch.randn(6, 8)
    out = poptorch.inferenceModel(Model(), make_options())(x, y)
    assert out.dtype == FLOAT
    assert_close(out, x.float() @ y, ONE_PASS[FLOAT])


@pytest.mark.parametrize("keep", [False, True])
def test_sums_of_slices_keep_their_precision_if_asked_to(keep):
    x = torch.ones(2, 512, dtype=HALF)
    weight = torch.cat([torch.full((1, 3), 2047.0), torch.ones(511, 3)]).half()
    model = Product(weight, Mode.ReducingDim, 512, keep)
    y, _ = poptorch.inferenceModel(model, make_options())(x)
    assert (y == (2558 if keep else 2048)).all()


@pytest.mark.parametrize("keep", [False, True])
def test_gradients_keep_their_precision_if_asked_to(keep):
    """The gradient of the weight is summed over the slices of the rows."""

    class Model(Product):
        def forward(self, x, start):
            y = self._multiply(x, self.weight, *self._arguments)
            return y, poptorch.identity_loss(y.sum(), "none")

    x = torch.cat([torch.full((1, 3), 2047.0), torch.ones(511, 3)]).half()
    model = Model(torch.zeros(3, 2, dtype=HALF), Mode.InputChannels, 512, keep)
    _, gradient, _ = trained(model, x, torch.zeros(1))
    assert (gradient == (2558 if keep else 2048)).all()


def test_half_partials_are_for_products_that_keep_no_precision():
    options = make_options()
    options.Precision.setPartialsType(torch.half)
    weight = torch.randn(64, 8).half()
    attributes = []
    for keep in (False, True):
        model = poptorch.inferenceModel(Product(weight, Mode.ReducingDim, 4, keep), options.clone())
        model.compile(torch.randn(8, 64).half())
        ops = model.compiled.program.graph.ops
        attributes += ["partials" in op.attributes for op in ops if op.kind == "serialized_matmul"]
    assert attributes == [True, False]


def test_half_partials_of_a_float32_weight():
    """Its slices are what a product of its own would be: with the weight in float16."""
    options = make_options()
    options.Precision.setPartialsType(torch.half)
    weight, x = torch.rand(512, 8), torch.rand(16, 512).half()
    ours, expected = (
        poptorch.inferenceModel(Product(weight.clone(), *given, multiply=multiply), options.clone())
        for multiply, given in (
            (poptorch.serializedMatMul, (Mode.OutputChannels, 4)),
            (torch.matmul, ()),
        )
    )
    assert torch.equal(ours(x)[0], expected(x)[0])


def test_a_constant_of_the_host():
    weight = torch.randn(6, 4, dtype=torch.float64)
    model = poptorch.inferenceModel(
        _Function(lambda x: poptorch.serializedMatMul(x, weight, Mode.ReducingDim, 2)),
        make_options(),
    )
    x = torch.randn(3, 6)
    assert_close(model(x), x @ weight.float(), ONE_PASS[FLOAT])


class _Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def test_rounding_at_random():
    options = make_options(seed=1)
    options.Precision.enableStochasticRounding(True)
    weight, x = torch.randn(64, 32).half(), torch.randn(16, 64).half()
    model = Product(weight.clone(), Mode.OutputChannels, 4)
    y, _ = poptorch.inferenceModel(model, options)(x)
    exact = x.double() @ weight.double()
    plain = exact.half()
    assert not torch.equal(y, plain)
    assert (y.double() - exact).abs().max() < 2 * torch.finfo(HALF).eps * exact.abs().max()


# Memory


def arena_bytes(model, x, *, training):
    if training:
        optimizer = poptorch.optim.Adam(model.parameters())
        executor = poptorch.trainingModel(model, make_options(), optimizer)
    else:
        executor = poptorch.inferenceModel(model, make_options())
    executor.compile(x)
    return executor.compiled.executable.plan.arena_bytes


def joined(x, weight, mode, factor):
    """Multiply in slices as a model of its own would."""
    if mode == Mode.InputChannels:
        return torch.cat([part @ weight for part in x.chunk(factor)])
    if mode == Mode.OutputChannels:
        return torch.cat([x @ part for part in weight.chunk(factor, 1)], 1)
    return sum(a @ b for a, b in zip(x.chunk(factor, 1), weight.chunk(factor), strict=True))


@pytest.mark.parametrize("training", [False, True])
@EVERY_MODE
def test_slices_have_no_memory_beside_the_product(mode, training):
    x, weight = torch.randn(64, 256), torch.randn(256, 1024)
    serialized, plain, by_hand = (
        arena_bytes(Product(weight.clone(), *given, multiply=multiply), x, training=training)
        for multiply, given in (
            (poptorch.serializedMatMul, (mode, 4)),
            (torch.matmul, ()),
            (joined, (mode, 4)),
        )
    )
    assert serialized == plain < by_hand


@pytest.mark.parametrize("training", [False, True])
@EVERY_MODE
def test_a_weight_is_converted_slice_by_slice(mode, training):
    """float16 activations, float32 weights: a plain product has the whole weight in float16."""
    x, weight = torch.randn(64, 256).half(), torch.randn(256, 1024)
    serialized, plain = (
        arena_bytes(Product(weight.clone(), *given, multiply=multiply), x, training=training)
        for multiply, given in ((poptorch.serializedMatMul, (mode, 4)), (torch.matmul, ()))
    )
    assert serialized <= plain * (0.8 if training else 0.6)


# Mistakes


def test_disabled_ignores_the_factor():
    x, weight = torch.randn(5, 7), torch.randn(7, 3)
    model = Product(weight.clone(), Mode.Disabled, 99)
    plain = Product(weight.clone(), multiply=torch.matmul)
    outputs = [poptorch.inferenceModel(m, make_options())(x)[0] for m in (model, plain)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("factor", [5, 0, -2])
@EVERY_MODE
def test_the_factor_divides_what_is_cut(mode, factor):
    size = {"InputChannels": 12, "ReducingDim": 24, "OutputChannels": 36}[mode.name]
    model = poptorch.inferenceModel(Product(torch.randn(24, 36), mode, factor), make_options())
    with pytest.raises(poptorch.Error, match=rf"factor {factor} must divide .* size {size}"):
        model(torch.randn(12, 24))


def test_without_a_factor_it_has_to_be_disabled():
    model = poptorch.inferenceModel(Product(torch.randn(4, 4), Mode.ReducingDim), make_options())
    with pytest.raises(poptorch.Error, match=r"MatMulSerializationMode\.Disabled"):
        model(torch.randn(4, 4))


X = torch.randn(4, 4)


@pytest.mark.parametrize(
    "arguments",
    [
        (X, X, "output_channels", 2),
        (X, X, Mode.ReducingDim, 2.0),
        (X, X, Mode.ReducingDim, True),
        (X, X, Mode.ReducingDim, 2, 1),
        ([1.0], X, Mode.ReducingDim, 2),
        (X, None, Mode.ReducingDim, 2),
    ],
)
def test_arguments_of_another_type(arguments):
    with pytest.raises(AssertionError, match=r"serializedMatMul: .* must be a"):
        poptorch.serializedMatMul(*arguments)


def test_shapes_that_do_not_fit_are_errors_of_torch():
    model = poptorch.inferenceModel(Product(torch.randn(5, 4), Mode.ReducingDim, 2), make_options())
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        model(torch.randn(4, 4))


def test_integers():
    class Model(nn.Module):
        def forward(self, x):
            return poptorch.serializedMatMul(x, x, Mode.ReducingDim, 2)

    with pytest.raises(poptorch.Error, match=r"lhs is torch.int32; operands must be float32"):
        poptorch.inferenceModel(Model(), make_options())(torch.ones(4, 4, dtype=torch.int32))


def test_outside_of_a_model_it_is_matmul():
    model = Product(torch.randn(4, 6), Mode.ReducingDim, 3)
    twin = copy.deepcopy(model)
    x = torch.randn(5, 4)
    y, loss = model(x)
    loss.backward()
    expected = x @ twin.weight
    (expected**2).sum().backward()
    assert torch.equal(y, expected)
    assert torch.equal(model.weight.grad, twin.weight.grad)
