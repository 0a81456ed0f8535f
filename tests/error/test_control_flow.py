"""Mistakes in loops and branches."""

import pytest
import torch

import popsim_torch as poptorch


def loop(body, inputs=None, count=3):
    """Return a forward with a loop whose body is given net and arguments."""

    def forward(net, x):
        values = [x] if inputs is None else inputs(x)
        return poptorch.for_loop(count, lambda *args: body(net, *args), values)

    return forward


def branch(first, second=None, condition=lambda x: x.sum() > 0):
    def forward(_, x):
        return poptorch.cond(condition(x), first, [x], second or first, [x])

    return forward


def while_loop(condition, body):
    def forward(_, x):
        return torch.while_loop(condition, body, (torch.zeros((), dtype=torch.int32), x))

    return forward


class Own(Exception):
    """An exception of the user's."""


def raises(*_):
    raise Own("from the body")


def keeps(net, x):
    def body(y):
        net.kept = y * 2
        return y

    (y,) = poptorch.for_loop(2, body, [x])
    return y + net.kept


def keeps_in_a_list(_, x):
    kept = []
    poptorch.for_loop(2, lambda y: (kept.append(y), y)[1], [x])
    return kept[0] * 2


def second_derivative(net, x):
    with torch.enable_grad():
        q = net.fc(x)
        (y,) = poptorch.for_loop(2, torch.sin, [q])
        (gradient,) = torch.autograd.grad(y.sum(), q, create_graph=True)
        return torch.autograd.grad(gradient.sum(), q)


def in_a_transform(_, x):
    return torch.vmap(lambda row: poptorch.for_loop(2, torch.sin, [row])[0])(x)


LISTS = {
    "loop": (lambda _, x: poptorch.for_loop(3, torch.sin, x), "Object is not list"),
    "then": (
        lambda _, x: poptorch.cond(x.sum() > 0, torch.sin, x, torch.cos, [x]),
        "Object is not list: then_inps",
    ),
    "else": (
        lambda _, x: poptorch.cond(x.sum() > 0, torch.sin, [x], torch.cos, x),
        "Object is not list: else_inps",
    ),
    "element": (
        loop(lambda _, a, b: (a, b), lambda x: [x, 3]),
        "at index 1 is not torch.tensor",
    ),
    "negative": (loop(lambda _, y: y, count=-1), "count must be a Python int, 0 or more"),
    "true": (loop(lambda _, y: y, count=True), "count must be a Python int"),
    "tensor": (loop(lambda _, y: y, count=torch.tensor(3)), "count must be a Python int"),
    "huge": (loop(lambda _, y: y, count=2**63), "less than 2\\*\\*63"),
}

HERE = r" at .*test_control_flow.py:\d+"
MISTAKES = {
    "shape": (loop(lambda _, y: y[0]), rf"for_loop\(\){HERE}: result 0 .*\(4,\).*as its argum"),
    "type": (loop(lambda _, y: y.half()), rf"for_loop\(\){HERE}: result 0 .*float16.*float32"),
    "number": (loop(lambda _, y: (y, y)), rf"for_loop\(\){HERE}: .* 2 tensors and must return 1"),
    "nothing": (loop(lambda *_: None), rf"for_loop\(\){HERE}: .*returned a NoneType"),
    "dict": (loop(lambda _, y: {"y": y}), "returned a dict"),
    "float": (loop(lambda *_: [1.0]), "returned a float"),
    "value": (loop(lambda _, y: y * y.sum().item()), "aten::item is only supported in eager mode"),
    "condition": (loop(lambda _, y: y if y.sum() > 0 else -y), "is only supported in eager mode"),
    "outside": (keeps, rf"forward{HERE} uses a tensor that was made in the body"),
    "list": (keeps_in_a_list, "uses a tensor that was made in the body"),
    "branch number": (
        branch(lambda y: (y, y), torch.sin),
        rf"cond\(\){HERE}: .* as the first body's",
    ),
    "branch shape": (
        branch(lambda y: y[0], torch.sin),
        rf"cond\(\){HERE}: result 0 .*the first body's",
    ),
    "float flag": (branch(torch.sin, None, torch.sum), "one element, got torch.float32"),
    "flags": (branch(torch.sin, None, lambda x: x > 0), r"one element, got torch.bool of shape \("),
    "no flag": (branch(torch.sin, None, lambda _: "yes"), "one element, got str"),
    "while flag": (
        while_loop(lambda i, y: y > 0, lambda i, y: (i + 1, y)),
        rf"while_loop\(\){HERE}: the condition must be a bool tensor",
    ),
    "while shape": (
        while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y[0])),
        rf"while_loop\(\){HERE}: result 2 of the body",
    ),
    "twice": (second_derivative, "differentiates a gradient of a loop or branch again"),
    "transform": (in_a_transform, rf"for_loop\(\){HERE} is called by a function that torch.func"),
}


@pytest.mark.parametrize("name", LISTS)
def test_wrong_arguments(refused, name):
    mistake, match = LISTS[name]
    error = refused(mistake, poptorch.Error, match)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_bodies(refused, name):
    mistake, match = MISTAKES[name]
    refused(mistake, poptorch.Error, match)


def test_an_exception_from_a_body(refused):
    refused(loop(raises), Own, "from the body")


def test_the_gradient_of_a_loop_without_a_number_of_iterations(h):
    def forward(net, x):
        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, net.fc(y).sum() + y))(net, x)

    h.refuse_training(
        h.Net(forward), h.make_options(), poptorch.Error, r"while_loop\(\) at .*only supported in"
    )


def test_more_iterations_than_values_can_be_kept_for(h):
    def forward(net, x):
        (y,) = poptorch.for_loop(2**62, torch.sin, [net.fc(x)])
        return y, poptorch.identity_loss(y, "sum")

    text = h.refuse_training(h.Net(forward), h.make_options(), poptorch.Error, "are too many")
    assert "torch.no_grad" in text


@pytest.mark.parametrize("count", [None, 0])
def test_an_anchor_in_a_loop_without_a_number_of_values(h, count):
    def forward(_, x):
        if count is None:
            body = lambda i, y: (i + 1, torch.sin(y))  # noqa: E731
            return while_loop(lambda i, y: i < 3, body)(None, x)[1]
        return poptorch.for_loop(count, torch.sin, [x])[0]

    options = h.make_options()
    options.anchorTensor("sin", "Sin:0")
    model = poptorch.inferenceModel(h.Net(forward), options)
    with pytest.raises(poptorch.Error, match="'Sin:0' is in the body of a loop that makes no"):
        model(torch.randn(2, 4))


def test_an_operator_that_the_device_does_not_know(h):
    def forward(_, x):
        return poptorch.for_loop(2, lambda y: y.to_sparse().to_dense() + y, [x])

    model = poptorch.inferenceModel(h.Net(forward), h.make_options())
    with pytest.raises(poptorch.Error, match=r"aten::_?to_sparse.*test_control_flow.py:\d+"):
        model(torch.randn(4, 4))


def test_a_floating_point_exception_names_the_op_in_the_body(h):
    options = h.make_options()
    options.Precision.enableFloatingPointExceptions(True)
    net = h.Net(loop(lambda _, y: torch.log(y)))
    model = poptorch.inferenceModel(net, options)
    with pytest.raises(poptorch.Error, match=r"'Log:0'.*test_control_flow.py:\d+.*NaN"):
        model(torch.full((2, 4), 2.0))
    x = torch.full((2, 4), 1e30)
    torch.testing.assert_close(model(x)[0], x.log().log().log())


def test_outside_of_a_model():
    """A known difference: a loop outside a compiled model runs its body once."""
    (y,) = poptorch.for_loop(5, lambda a: a + 1, [torch.zeros(2)])
    assert torch.equal(y, torch.ones(2))
    (y,) = poptorch.cond(torch.tensor(False), torch.sin, [y], lambda a, k: a * k, [y, 3])
    assert torch.equal(y, torch.full((2,), 3.0))
    with pytest.raises(ValueError, match="Object is not list"):
        poptorch.for_loop(5, torch.sin, y)
    with pytest.raises(poptorch.Error, match="it returned a NoneType"):
        poptorch.for_loop(5, lambda a: None, [y])
