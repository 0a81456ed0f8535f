"""Floating-point exceptions: which results end a run, and runs without them."""

import math

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

INF, NAN = math.inf, math.nan
X = torch.tensor([1.0, 0.0, -1.0])
INVALID, DIVISION, OVERFLOW = "invalid operation", "division by zero", "overflow"


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, *args):
        return self._function(*args)


def checked(function, *, on=True):
    options = make_options()
    options.Precision.enableFloatingPointExceptions(on)
    return poptorch.inferenceModel(Applied(function), options)


FAILURES = {
    "inf - inf": (lambda x: x - x, torch.tensor([0.0, INF]), INVALID),
    "0 / 0": (lambda x: x / x, X, INVALID),
    "inf / inf": (lambda x: x / x, torch.tensor([INF]), INVALID),
    "0 * inf": (lambda x: x * 0.0, torch.tensor([INF]), INVALID),
    "0 * inf in a product": (lambda x: x @ torch.zeros(1, 1), torch.tensor([[INF]]), INVALID),
    "sqrt(-1)": (torch.sqrt, X, INVALID),
    "log(-1)": (torch.log, X, INVALID),
    "softmax of nothing": (lambda x: (x - INF).softmax(0), X, INVALID),
    "sum of inf and -inf": (torch.sum, torch.tensor([INF, -INF]), INVALID),
    "NaN > 0": (lambda x: x > 0, torch.tensor([NAN]), INVALID),
    "NaN == 0": (lambda x: x == 0, torch.tensor([NAN]), INVALID),
    "NaN < whole number": (lambda x: x < torch.arange(1), torch.tensor([NAN]), INVALID),
    "1 / 0": (lambda x: 1 / x, X, DIVISION),
    "x / number 0": (lambda x: x / 0, torch.ones(2), DIVISION),
    "1 / 0 in float16": (lambda x: 1 / x, X.half(), DIVISION),
    "log(0)": (torch.log, X.abs(), DIVISION),
    "rsqrt(0)": (torch.rsqrt, X.abs(), DIVISION),
    "0 ** -1": (lambda x: x**-1, X, DIVISION),
    "0 ** -1.5": (lambda x: x**-1.5, X.abs(), DIVISION),
    "x / whole number 0": (lambda x: x / torch.zeros(1, dtype=torch.int), torch.ones(2), DIVISION),
    "float32": (lambda x: x * 3e38, 2 * X, OVERFLOW),
    "1 / tiny": (lambda x: 1 / x, torch.tensor([1e-40]), OVERFLOW),
    "exp": (torch.exp, torch.tensor([100.0]), OVERFLOW),
    "float16": (lambda x: x * 2, torch.tensor([40000.0]).half(), OVERFLOW),
    "to float16": (lambda x: x.half(), torch.tensor([70000.0]), OVERFLOW),
    "matmul in float16": (lambda x: x @ x, torch.full((2, 2), 200.0).half(), OVERFLOW),
    "sum in float16": (lambda x: x.sum(), torch.full((2,), 40000.0).half(), OVERFLOW),
    "beside an infinity": (lambda x: x * 3e38, torch.tensor([INF, 2.0]), OVERFLOW),
}
SOUND = {
    "exp(-inf)": (lambda x: torch.exp(-x), torch.tensor([INF, 1.0])),
    "1 / inf": (lambda x: 1 / x, torch.tensor([INF, 1.0])),
    "inf + 1": (lambda x: x + 1, torch.tensor([INF, 1.0])),
    "NaN from outside": (lambda x: x * 2, torch.tensor([NAN, 1.0])),
    "x != x": (lambda x: x != x, torch.tensor([NAN, 1.0])),
    "isnan": (torch.isnan, torch.tensor([NAN, 1.0])),
    "isfinite": (torch.isfinite, torch.tensor([NAN, 1.0, INF])),
    "isfinite of tensors": (
        lambda x: torch.where(x.isfinite(), x, torch.zeros_like(x)),
        torch.tensor([NAN, 1.0, -INF]),
    ),
    "a mask": (lambda x: x.masked_fill(x < 0, -INF).softmax(0), X),
    "an added mask": (lambda x: x + torch.tensor([0.0, 0.0, -INF]), X),
    "a mask made of numbers": (lambda x: x + torch.full((3, 3), -INF).triu(1), torch.zeros(3, 3)),
    "max pool": (lambda x: nn.functional.max_pool1d(x[None, None], 2, 1, 1), X),
    "a sigmoid of much": (lambda x: nn.functional.silu(torch.sigmoid(x)), -1000 * X),
    "guarded division": (lambda x: torch.where(x == 0, 0.0, 1 / torch.where(x == 0, 1.0, x)), X),
    "float16 at its end": (lambda x: x * 1, torch.tensor([65504.0]).half()),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_names_kind_op_and_line(name):
    function, x, kind = FAILURES[name]
    match = rf"while running '.*test_number_watch.py:\d+\): floating-point exception, .*{kind}"
    model = checked(function)
    for _ in range(2):
        with pytest.raises(poptorch.Error, match=match):
            model(x)


@pytest.mark.parametrize("name", ["inf - inf", "NaN > 0", "1 / 0", "float16"])
def test_off_nothing_fails(name):
    function, x, _ = FAILURES[name]
    expected = function(x)
    torch.testing.assert_close(checked(function, on=False)(x), expected, equal_nan=True)


@pytest.mark.parametrize("name", SOUND)
def test_what_is_no_failure(name):
    function, x = SOUND[name]
    torch.testing.assert_close(checked(function)(x), function(x), equal_nan=True)


def test_the_first_op_that_fails_is_named():
    def function(x):
        hidden = torch.log(x)
        return torch.exp(hidden * 0 + 1) / hidden

    with pytest.raises(poptorch.Error, match=r"'Log:0' \(float32 \(3\)\) has an infinity at \(1\)"):
        checked(function)(X.abs())


def test_constants_are_checked_when_the_model_is_compiled():
    model = checked(lambda x: x + torch.log(torch.zeros(3)))
    with pytest.raises(poptorch.Error, match=DIVISION):
        model.compile(X)
    assert not model.isCompiled()


class Net(nn.Module):
    def __init__(self, dtype=torch.float32, second_ipu=0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self._second_ipu = second_ipu
        self.to(dtype)

    def forward(self, x, y):
        poptorch.Block.start(ipu_id=0)
        hidden = self.drop(self.norm(torch.relu(self.first(x))))
        poptorch.Block.start(ipu_id=self._second_ipu)
        out = self.second(hidden)
        return out, nn.functional.cross_entropy(out, y)


def trained(on, dtype, second_ipu):
    options = make_options(2, 4, seed=3)
    options.Precision.enableFloatingPointExceptions(on)
    net = Net(dtype, second_ipu)
    optimizer = poptorch.optim.Adam(net.parameters(), lr=0.01)
    model = poptorch.trainingModel(net, options, optimizer)
    torch.manual_seed(1)
    x, y = torch.randn(32, 4).to(dtype), torch.randint(0, 3, (32,))
    outs = [out for _ in range(2) for out in model(x, y)]
    return outs + list(net.state_dict().values())


@pytest.mark.parametrize("second_ipu", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_checks_change_no_bit(dtype, second_ipu):
    pairs = zip(trained(True, dtype, second_ipu), trained(False, dtype, second_ipu), strict=True)
    assert all(torch.equal(on, off) for on, off in pairs)


def trainer():
    net = Net()
    nn.init.ones_(net.first.weight)
    options = make_options()
    options.Precision.enableFloatingPointExceptions(True)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
    return net, poptorch.trainingModel(net, options, optimizer)


def test_training_goes_on_behind_a_failure():
    net, model = trainer()
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    model(x, y)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(poptorch.Error, match=r"'first/.*overflow"):
        model(torch.full((6, 4), 3e38), y)
    after = net.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in ("first.weight", "second.bias"))
    assert model(x, y)[1].isfinite()


def test_a_failing_gradient_is_named():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

        def forward(self):
            return poptorch.identity_loss(torch.sqrt(self.weight), "sum")

    options = make_options()
    options.Precision.enableFloatingPointExceptions(True)
    root = Root()
    model = poptorch.trainingModel(root, options, torch.optim.SGD(root.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match=r"test_number_watch.py:\d+\): .*division by zero"):
        model()


def test_a_profile_is_checked_too():
    with pytest.raises(poptorch.Error, match=DIVISION):
        checked(lambda x: 1 / x).profile(X)
