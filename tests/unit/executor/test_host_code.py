"""Host code that a program calls: its exceptions, and the state of a training run after them."""

import copy
import sys
import traceback

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import OutputMode
from tests.options import make_options
from tests.unit.executor import host_calls
from tests.unit.executor.host_calls import Failing, Net, X, infer

pytestmark = pytest.mark.timeout(120)


class Own(Exception):
    def __init__(self, code, detail):
        super().__init__(code, detail)
        self.code = code


ERRORS = [
    *(ValueError("ours"), KeyError("ours"), Own(7, "ours"), StopIteration("ours")),
    *(poptorch.Error("ours"), RuntimeError("ours"), SystemExit(3), KeyboardInterrupt()),
    GeneratorExit(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_exception_is_raised_as_it_is(error):
    error = copy.copy(error)
    code = Failing(error, 4)  # after the call with zeros
    model = infer(code, d=3)
    for _ in range(2):
        if code.num_calls == 0:
            with pytest.raises(type(error)) as caught:
                model(torch.ones(6))
            assert caught.value is error
            assert code.num_calls == 4
            frame = traceback.extract_tb(error.__traceback__)[-1]
            assert (frame.name, frame.line) == ("__call__", "raise self._error")
            if sys.version_info >= (3, 11):
                (note,) = error.__notes__
                assert "poptorch.CPU 'code', called at" in note
                assert f"{host_calls.__file__}:" in note
        assert torch.equal(model(torch.ones(6)), torch.full((6,), 3.0))
    assert code.num_calls == 10


def test_an_exception_of_the_call_with_zeros():
    error = Own(7, "ours")
    code = Failing(error, 1)
    model = infer(code)
    with pytest.raises(Own) as caught:
        model(X)
    assert caught.value is error
    assert not model.isCompiled()
    assert not poptorch.isRunningOnIpu()
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.equal(model(X), 2 * X + 1)


def test_changing_results_are_refused():
    results = iter([X, X, X.double(), (X, X), torch.ones(3), None, [[X]], X.int(), [X]])
    model = infer(lambda x: next(results))
    assert torch.equal(model(X), X + 1)
    for came in (
        r"float64 \[2\] as result 0 where it returned float32 \[2\]",
        "2 tensors where it returned 1",
        r"float32 \[3\] as result 0 where it returned float32 \[2\]",
        "returns 'NoneType'",
        "returns 'list' in a list",
        r"int32 \[2\] as result 0",
    ):
        with pytest.raises(poptorch.Error, match=rf"^[^\n]*poptorch.CPU 'code', called.*{came}"):
            model(X)
    assert torch.equal(model(X), X + 1)


# --- Training -----------------------------------------------------------------


@pytest.mark.parametrize("stages", [(0, 0), (0, 1)])
@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_failing_device_iteration_is_given_up(stages, combined, in_backward):
    """The run ends as if fewer device iterations had been requested."""
    error = Own(7, "ours")
    switch = {"on": False}
    num_calls = []

    def code(x):
        if x.requires_grad == in_backward:
            num_calls.append(1)
        if switch["on"] and x.requires_grad == in_backward and len(num_calls) == 6:
            raise error
        return x.sin()

    def trained(d):
        net = Net(code, stages)
        options = make_options(d, 4, seed=5).outputMode(OutputMode.All)
        optimizer = poptorch.optim.SGD(
            net.parameters(), lr=0.1, momentum=0.9, use_combined_accum=combined
        )
        model = poptorch.trainingModel(net, options, optimizer)
        return net, model

    torch.manual_seed(1)
    x = torch.randn(2 * 4 * 3, 4)
    more = torch.randn(2 * 4 * 3, 4)

    net, model = trained(2)
    model.compile(x)
    num_calls.clear()
    switch["on"] = True
    with pytest.raises(Own):
        model(x)
    switch["on"] = False
    assert len(num_calls) == 6  # the second micro-batch of the second device iteration

    other, reference = trained(1)
    reference(x[:12])
    for name, value in other.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name
    # Optimizer state and random numbers continue from there.
    losses = model(more)
    expected = torch.cat([reference(more[:12]), reference(more[12:])])
    assert torch.equal(losses, expected)
    for name, value in other.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name


def test_an_exception_in_the_backward_pass_says_so():
    class Refused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            raise Own(7, "ours")

    net = Net(Refused.apply, (0, 0))
    model = poptorch.trainingModel(net, make_options(), poptorch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(Own) as caught:
        model(torch.ones(3, 4))
    if sys.version_info >= (3, 11):
        assert "while its gradient was computed" in caught.value.__notes__[0]
