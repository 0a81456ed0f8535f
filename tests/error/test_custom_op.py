"""Mistakes in calls of ``custom_op`` and in operators: errors say where and what."""

import pytest
import torch

import popsim_torch as poptorch
from tests.custom_ops import library
from tests.custom_ops.library import DOMAIN, OneCall
from tests.options import make_options

X = torch.ones(4)


@pytest.fixture(autouse=True, scope="module")
def loaded_library():
    library.loaded()


def call(**changes):
    arguments = {
        "inputs": [X],
        "name": "Cube",
        "domain": DOMAIN,
        "domain_version": 1,
        "example_outputs": [X],
        **changes,
    }
    return poptorch.custom_op(**arguments)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"inputs": X}, ValueError, "inputs must be a list or tuple of tensors, got Tensor"),
        ({"inputs": [X, 3]}, ValueError, r"inputs\[1\] must be a tensor, got int"),
        ({"example_outputs": None}, ValueError, "example_outputs must be a list .* got NoneType"),
        ({"example_outputs": [None]}, ValueError, r"example_outputs\[0\] must be a tensor"),
        ({"example_outputs": []}, ValueError, "example_outputs is empty"),
        ({"name": 3}, TypeError, "name must be a str, got int"),
        ({"domain": None}, TypeError, "domain must be a str"),
        ({"name": "K\u00fcbe"}, ValueError, "name must be ASCII"),
        ({"domain_version": "1"}, TypeError, "domain_version must be an int from 0 on, got '1'"),
        ({"domain_version": -1}, TypeError, "domain_version must be an int from 0 on"),
        ({"attributes": {"a": object()}}, ValueError, "the attribute 'a' must be"),
    ],
)
def test_arguments_are_checked_outside_of_models_too(changes, kind, message):
    with pytest.raises(kind, match=message) as caught:
        call(**changes)
    assert isinstance(caught.value, poptorch.Error)


class Switched(OneCall):
    """A model that calls the operator ``Faulty`` with a fault that the test can switch off."""

    def __init__(self, fault):
        super().__init__("Faulty", {"fault": fault})

    def mend(self):
        self.attributes["fault"] = ""


def check_usable(executor, net):
    net.mend()
    executor.destroy()
    again = poptorch.inferenceModel(net, make_options())
    assert again(X)[0].tolist() == [0] * 4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no outputs", "the shape rule of Faulty declares no output"),
        ("no type", "declares a dtype or a rank that does not exist"),
        ("a negative size", r"declares the shape \[?\(?-2"),
        (
            "another shape",
            r"gives torch\.float32 \(2, 9\) .* example_outputs are torch\.float32 \(4,",
        ),
        ("another type", r"gives torch\.int32 \(4,\) for these inputs"),
        (
            "throws in its shape rule",
            "shape rule of popsim_tests::Faulty version 1 failed: no shape",
        ),
    ],
)
def test_a_wrong_shape_rule_is_found_when_the_model_is_compiled(fault, message):
    net = Switched(fault)
    executor = poptorch.inferenceModel(net, make_options())
    with pytest.raises(poptorch.Error, match=rf"custom_op at .*library\.py:\d+: .*{message}"):
        executor.compile(X)
    check_usable(executor, net)


def test_wrong_element_types_are_found_when_the_model_is_compiled():
    with pytest.raises(poptorch.Error, match=r"library\.py:\d+: .*it takes float32 or float16"):
        library.run("Cube", torch.arange(4))
    with pytest.raises(poptorch.Error, match="it takes one input"):
        library.run("Cube", X, X)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("throws", "out of luck"),
        ("throws a number", r"an exception that is not a std::exception"),
        ("another element type", "a tensor of float32 is not one of int32"),
        ("no such input", "no input 5"),
        ("throws on a thread", "a part failed"),
    ],
)
def test_an_exception_of_a_kernel_names_the_op_and_the_line(fault, message):
    net = Switched(fault)
    executor = poptorch.inferenceModel(net, make_options())
    for _ in range(2):
        with pytest.raises(
            poptorch.Error,
            match=rf"'Faulty:0' \(custom, .*library\.py:\d+\): the kernel of .* failed: {message}",
        ):
            executor(X)
    check_usable(executor, net)


class Trained(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.call = {"name": name}  # An executor traces a shallow copy of the model.

    def forward(self, x):
        y = x * self.weight
        (y,) = poptorch.custom_op([y], self.call["name"], DOMAIN, 1, [y])
        return poptorch.identity_loss(y, "sum")


def test_a_gradient_that_there_is_not_is_an_error_when_the_model_is_compiled():
    net = Trained("CubeWithoutGradient")
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
    training = poptorch.trainingModel(net, make_options(), optimizer)
    with pytest.raises(
        poptorch.Error,
        match=r"custom_op at .*test_custom_op\.py:\d+: .*::CubeWithoutGradient version 1 has no "
        r"gradient, but the loss depends on parameters through it\. Register",
    ):
        training(X)
    net.call["name"] = "Cube"
    assert training(X) == 4


def test_the_gradient_of_a_gradient_is_an_error():
    class Twice(Trained):
        def forward(self, x):
            y = x * self.weight
            (z,) = poptorch.custom_op([y], "Cube", DOMAIN, 1, [y])
            (slope,) = torch.autograd.grad(z.sum(), y, create_graph=True)
            return poptorch.identity_loss(slope, "sum")

    net = Twice("Cube")
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(poptorch.Error, match=r"gradient of a gradient is not supported .*::Cube"):
        poptorch.trainingModel(net, make_options(), optimizer)(X)
