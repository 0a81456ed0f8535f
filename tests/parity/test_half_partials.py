"""Models whose products add up in float16, and those that the option does not concern."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import OutputMode
from popsim_torch.errors import Error
from tests.ops import half_partials
from tests.parity.compare import Loop, Pair, quiet_options
from tests.parity.models import CASES
from tests.parity.tolerances import TRAINED, Tolerance

UPDATES = 4
# A sum of n passes is rounded n times instead of once.
LOOSER = Tolerance(*(2 * value for value in vars(TRAINED[torch.float16]).values()))


class HalfLoop(Loop):
    """A loop whose products have half partials."""

    def options(self) -> poptorch.Options:
        options = super().options()
        options.Precision.setPartialsType(torch.half)
        return options


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return poptorch.optim.SGD(model.parameters(), lr=0.05)


def inputs_of(case, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [x.to(dtype) if x.is_floating_point() else x for x in case.inputs(count)]


def options_for(dtype: torch.dtype) -> poptorch.Options:
    options = quiet_options()
    options.Precision.setPartialsType(dtype)
    return options


def kinds_with(program: str, attribute: str) -> list[str]:
    """Return the kinds of ops with an attribute, sorted."""
    lines = (line.split("  #")[0] for line in program.splitlines())
    return sorted({x.split(" = ")[-1].split("(")[0] for x in lines if attribute in x})


def program_of(model: poptorch.PoplarExecutor) -> str:
    return model.program(host=True)


class Wrapped(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args):
        return self._function(*args)


def infer(function, *args, options=None):
    """Return what a function gives on the device, and its program."""
    model = poptorch.inferenceModel(Wrapped(function), options or options_for(torch.half))
    return model(*args), program_of(model)


@pytest.mark.parametrize("loop", [HalfLoop(), HalfLoop(2, 3)], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_updates_stay_near_eager(case, loop):
    model = case.make(smooth=True).half()
    pair = Pair(model, sgd, tolerance=LOOSER, loop=loop)
    for _ in range(UPDATES // loop.device_iterations):
        pair.step(*inputs_of(case, 4 * loop.micro_batches, torch.float16))
    pair.finish()


class Wide(nn.Module):
    """Every kind of op with partial sums, long enough for them to differ."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 40, 3, padding=1)
        self.second = nn.Conv2d(40, 8, 3, stride=2)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.recurrent = nn.GRU(48, 40, batch_first=True)
        self.linear = nn.Linear(40, 5)

    def forward(self, x, labels):
        x = torch.tanh(self.second(torch.tanh(self.convolution(x))))
        x = self.up(x).flatten(2).unflatten(2, (3, 48)).flatten(1, 2)
        x, _ = self.recurrent(x)
        output = self.linear(torch.matmul(x, x.mT) @ x)[:, -1]
        return output, nn.functional.cross_entropy(output, labels)


def wide_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 3, 14, 14).to(dtype), torch.tensor([0, 3, 1])


def train(model: nn.Module, options: poptorch.Options, inputs) -> tuple[list[torch.Tensor], str]:
    """Return outputs, losses and weights of some updates of a copy, and its program."""
    model = copy.deepcopy(model)
    training = poptorch.trainingModel(model, options, sgd(model))
    results = [tensor for _ in range(UPDATES) for tensor in training(*inputs)]
    return [*results, *model.state_dict().values()], program_of(training)


def test_every_product_of_a_float16_model_has_them():
    torch.manual_seed(0)
    model, inputs = Wide().half(), wide_inputs(torch.float16)
    exact, plain = train(model, options_for(torch.float), inputs)
    ours, program = train(model, options_for(torch.half), inputs)
    assert kinds_with(plain, "partials='half'") == []
    kinds = [
        *("convolution", "convolution_grad_input", "convolution_grad_weight"),
        *("matmul", "recurrent", "recurrent_grad"),
    ]
    assert kinds_with(program, "partials='half'") == kinds
    assert program.replace(", partials='half'", "").replace(" {partials='half'}", "") == plain
    assert all(line.count("partials='half'") for line in program.splitlines() if "matmul(" in line)
    assert not all(map(torch.equal, ours, exact))
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, other, **TRAINED[torch.float16].of(other.float()))


def test_float32_models_stay_what_they_are():
    model, inputs = Wide(), wide_inputs(torch.float32)
    exact, plain = train(model, options_for(torch.float), inputs)
    ours, program = train(model, options_for(torch.half), inputs)
    assert program == plain
    assert all(map(torch.equal, ours, exact))


def test_only_the_float16_layers_of_a_mixed_model_have_them():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(40, 40).half(), nn.Linear(40, 3)

        def forward(self, x):
            return self.second(self.first(x).float())

    model = poptorch.inferenceModel(Mixed(), options_for(torch.half))
    model(torch.randn(2, 40).half())
    products = [line for line in program_of(model).splitlines() if "matmul(" in line]
    assert ["partials='half'" in line for line in products] == [True, False]


MATMUL = ["matmul", "recurrent", "recurrent_grad"]
CONVOLUTION = ["convolution", "convolution_grad_input", "convolution_grad_weight"]


@pytest.mark.parametrize(
    ("key", "value", "kinds"),
    [
        ("partialsTypeMatMuls", "half", MATMUL),
        ("matmulOptions", {"partialsType": "half"}, MATMUL),
        ("convolutionOptions", {"partialsType": "half"}, CONVOLUTION),
    ],
)
def test_settings_of_the_back_end_choose_a_kind_of_product(key, value, kinds):
    options = quiet_options()
    options._Popart.set(key, value)
    _, program = train(Wide().half(), options, wide_inputs(torch.float16))
    assert kinds_with(program, "partials='half'") == kinds


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ([("partialsTypeMatMuls", "float")], CONVOLUTION),
        ([("convolutionOptions", {"partialsType": "float"})], MATMUL),
        ([("matmulOptions", {"partialsType": "float"})], CONVOLUTION),
        # The options of all products of a kind go before its type.
        (
            [("matmulOptions", {"partialsType": "float"}), ("partialsTypeMatMuls", "half")],
            CONVOLUTION,
        ),
        # What a setting does not mention stays as it is.
        ([("convolutionOptions", {"availableMemoryProportion": "0.1"})], [*CONVOLUTION, *MATMUL]),
        (
            [
                ("convolutionOptions", {"partialsType": "float"}),
                ("convolutionOptions", {"availableMemoryProportion": "0.1"}),
            ],
            MATMUL,
        ),
    ],
)
def test_settings_of_the_back_end_change_the_common_one(settings, kinds):
    options = quiet_options()
    options.Precision.setPartialsType(torch.half)
    for key, value in settings:
        options._Popart.set(key, value)
    _, program = train(Wide().half(), options, wide_inputs(torch.float16))
    assert kinds_with(program, "partials='half'") == kinds


def test_common_setting_changes_those_of_the_back_end():
    options = quiet_options()
    options._Popart.set("partialsTypeMatMuls", "float")
    options._Popart.set("convolutionOptions", {"partialsType": "float"})
    options.Precision.setPartialsType(torch.half)
    _, program = train(Wide().half(), options, wide_inputs(torch.float16))
    assert kinds_with(program, "partials='half'") == [*CONVOLUTION, *MATMUL]


def test_anchors_change_no_bit():
    torch.manual_seed(0)
    model, inputs = Wide().half(), wide_inputs(torch.float16)
    plain, _ = train(model, options_for(torch.half), inputs)
    twin = copy.deepcopy(model)
    probe = poptorch.trainingModel(twin, options_for(torch.half), sgd(twin))
    probe(*inputs)
    options = options_for(torch.half)
    for i, name in enumerate(probe.getTensorNames()):
        options.anchorTensor(str(i), name, OutputMode.All)
    observed, _ = train(model, options, inputs)
    assert all(map(torch.equal, plain, observed))


def test_stages_change_no_bit():
    class Staged(nn.Module):
        def __init__(self, cut: bool) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(60, 70), nn.Linear(70, 5)
            self._cut = cut

        def forward(self, x, labels):
            x = torch.tanh(self.first(x))
            if self._cut:
                poptorch.Block.start("second", ipu_id=1)
            x = self.second(x)
            return x, nn.functional.cross_entropy(x, labels)

    results = []
    x, labels = torch.randn(12, 60).half(), torch.arange(12) % 5
    for cut in (False, True):
        torch.manual_seed(0)
        options = HalfLoop(1, 4).options()
        outputs, _ = train(Staged(cut).half(), options, (x, labels))
        results.append(outputs)
    assert all(map(torch.equal, *results))


def h(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


VECTOR_PRODUCTS = {
    "mv": (torch.mv, (h(7, 50), h(50)), lambda a, b: (a, b[:, None])),
    "matmul": (torch.matmul, (h(3, 7, 50), h(50)), lambda a, b: (a.flatten(0, 1), b[:, None])),
    "vector first": (torch.matmul, (h(50), h(50, 7)), lambda a, b: (a[None], b)),
    "transposed": (lambda a, b: a.T @ b, (h(50, 7), h(50)), lambda a, b: (a.T, b[:, None])),
    "every other": (lambda a, b: a @ b[::2], (h(7, 50), h(100)), lambda a, b: (a, b[::2, None])),
    "dot": (torch.dot, (h(50), h(50)), lambda a, b: (a[None], b[:, None])),
    "vdot": (torch.vdot, (h(50), h(50)), lambda a, b: (a[None], b[:, None])),
}


@pytest.mark.parametrize(
    ("function", "args", "matrices"), VECTOR_PRODUCTS.values(), ids=VECTOR_PRODUCTS
)
def test_products_with_vectors(function, args, matrices):
    ours, program = infer(function, *args)
    expected = half_partials.product(*matrices(*args))
    assert torch.equal(ours, expected.reshape(ours.shape))
    assert kinds_with(program, "partials='half'") == ["matmul"]
    rounded, _ = infer(function, *args, options=options_for(torch.float))
    exact = function(*(a.double() for a in args))
    sizes = function(*(a.double().abs() for a in args))
    # Sums of 50 numbers in float32, rounded once.
    assert ((rounded - exact).abs() <= 2**-11 * exact.abs() + 50 * 2**-24 * sizes).all()


@pytest.mark.parametrize("bias_shape", [(7,), (1,), ()], ids=str)
def test_a_vector_plus_a_product_with_a_vector(bias_shape):
    bias, a, b = h(*bias_shape), h(7, 50), h(50)
    ours, program = infer(lambda c, a, b: torch.addmv(c, a, b, alpha=0.5, beta=2), bias, a, b)
    exact = 0.5 * half_partials.product(a, b[:, None])[:, 0].float() + 2 * bias.float()
    assert torch.equal(ours, exact.half())
    assert kinds_with(program, "partials='half'") == ["matmul"]


WITHOUT = {
    "addbmm": (torch.addbmm, (h(4, 5), h(3, 4, 6), h(3, 6, 5))),
    "_trilinear": (nn.functional.bilinear, (h(4, 6), h(4, 6), h(2, 6, 6))),
    "conv_tbc": (torch.conv_tbc, (h(5, 4, 6), h(2, 6, 3), h(3))),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_operators_without_them_are_refused(name):
    function, args = WITHOUT[name]
    with pytest.raises(Error, match=f"aten::{name}.*no implementation with half partials"):
        infer(function, *args)
    # Without the option, and in float32, they run.
    expected = function(*(a.float() for a in args))
    ours, _ = infer(function, *args, options=options_for(torch.float))
    torch.testing.assert_close(ours.float(), expected, rtol=2e-3, atol=2e-2)
    ours, _ = infer(function, *(a.float() for a in args))
    torch.testing.assert_close(ours, expected)


def test_overflow_of_a_partial_sum_shows():
    a = torch.full((1, 64), 64.0, dtype=torch.float16)
    b = torch.cat([a[:, :32], -a[:, 32:]], 1).mT.contiguous()
    assert infer(torch.matmul, a, b)[0].item() == torch.inf
    assert infer(torch.matmul, a, b, options=options_for(torch.float))[0].item() == 0.0
