"""float16 with operands of other dtypes and with numbers: PyTorch converts these first."""

import operator

import pytest
import torch
from torch import nn

import popsim_torch as poptorch

INF = float("inf")
HALF = torch.tensor([3.0, 0.5, 2.0, -3.0, 7.0, 2050.0, 2048.0, INF, -INF, 0.1, 1000.0]).half()
OTHERS = [
    torch.tensor([2049, 70000, -2049, 40001, 7, 1, 3, -70000, 5, 9, 2051]),
    torch.tensor([2049]),
    torch.tensor(2049),
    torch.tensor(70000.3),
    torch.tensor(1 / 3),
    torch.tensor([True]),
]
NUMBERS = [2049, 2049.3, 1 / 3, 2.0**40, -70000, 1e-5]
ARITHMETIC = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.ge, operator.gt, operator.le]
FUNCTIONS = [torch.fmod, torch.xlogy, torch.atan2, torch.maximum, torch.special.xlog1py]
TERNARY = [torch.addcmul, torch.addcdiv]


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def assert_same(function, *args):
    results = poptorch.inferenceModel(Net(function))(*args)
    for expected, result in zip(function(*args), results, strict=True):
        assert result.dtype == expected.dtype
        assert torch.equal(result.nan_to_num(77.0), expected.nan_to_num(77.0))


@pytest.mark.parametrize("function", ARITHMETIC + COMPARISONS + FUNCTIONS)
def test_tensors_of_other_dtypes_are_rounded_first(function):
    def both_orders(half, *others):
        pairs = [(half, other) for other in others if other.dtype != torch.bool]
        pairs += [(half[:1].reshape(()), others[0]), (half, half.flip(0))]
        return [function(*pair) for pair in pairs] + [function(*pair[::-1]) for pair in pairs]

    assert_same(both_orders, HALF, *OTHERS)


@pytest.mark.parametrize("function", ARITHMETIC + COMPARISONS)
def test_numbers_are_rounded_first(function):
    # Exponents have to be in the range of float16.
    numbers = [one for one in NUMBERS if function is not operator.pow or abs(one) < 65504]

    def both_orders(half):
        results = [function(half, number) for number in numbers]
        return results + [function(number, half) for number in numbers]

    assert_same(both_orders, HALF)
    assert_same(both_orders, HALF[0])


@pytest.mark.parametrize("function", TERNARY)
@pytest.mark.parametrize("other", OTHERS[:5])
def test_three_operands_are_rounded_first(function, other):
    def all_places(half, other):
        places = (half, half, other), (half, other, half), (other, half, half)
        return [function(*place) for place in places]

    assert_same(all_places, HALF, other)


@pytest.mark.parametrize("alpha", [3, 1 / 3, 2049.3])
def test_the_factor_of_an_operand_is_rounded(alpha):
    def scaled(half, other):
        sums = [torch.add(half, one, alpha=alpha) for one in (half, other)]
        sums += [torch.sub(half, one, alpha=alpha) for one in (half, other)]
        return [*sums, torch.rsub(half, other, alpha=alpha)]

    values = torch.linspace(-70.0, 70.0, 64).half()
    assert_same(scaled, values, values.flip(0) * 1.7)
    assert_same(scaled, values, torch.tensor(2049))


def test_the_range_of_float16():
    def limits(half, zero):
        numbers = half.nan_to_num(), half.nan_to_num(posinf=5.0), half.clone().nan_to_num_()
        return [*numbers, torch.nextafter(half, zero), half == 2**40, half > 70000]

    half = torch.tensor([INF, -INF, float("nan"), 1.0, 65504.0]).half()
    assert_same(limits, half, torch.zeros(1).half())


def test_outer_products_with_integers():
    assert_same(lambda i, h: (torch.outer(i, h),), OTHERS[0], HALF)


def test_bools_leave_float16_as_it_is():
    assert_same(lambda h, b: (h * b, h + b, b * h), HALF, OTHERS[-1])


def test_weights_train_with_integer_factors():
    class Trained(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([3.0, 0.5, -2.0]).half())

        def forward(self, factors):
            products = factors * self.weight + 1e-3
            return products, poptorch.identity_loss(products.sum(), reduction="none")

    eager, net = Trained(), Trained()
    factors = torch.tensor([2049, 7, 4099])
    model = poptorch.trainingModel(net, optimizer=torch.optim.SGD(net.parameters(), lr=2.0**-9))
    products, _ = model(factors)
    expected, loss = eager(factors)
    loss.backward()
    torch.optim.SGD(eager.parameters(), lr=2.0**-9).step()
    assert torch.equal(products, expected)
    assert torch.equal(net.weight.detach(), eager.weight.detach())
