"""Calls of the host that cannot be a part of a program."""

import pytest
import torch

import popsim_torch as poptorch


def returning(result):
    return lambda net, x: poptorch.CPU(lambda x: result, "code")(x)


@pytest.mark.parametrize(
    "result, what",
    [
        (None, "returns 'NoneType'"),
        (3.5, "returns 'float'"),
        ({"a": torch.ones(1)}, "returns 'dict'"),
        ([], "returns 'list' without any"),
        ((), "returns 'tuple' without any"),
        ([torch.ones(1), [torch.ones(1)]], "returns 'list' in a list"),
        ((torch.ones(1), None), "returns 'NoneType' in a tuple"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo on cpu as result 0"),
        ([torch.ones(2), torch.ones(2, device="meta")], "on meta as result 1"),
        (torch.zeros(2, dtype=torch.uint16), "uint16"),
    ],
    ids=str,
)
def test_results(refused, result, what):
    text = str(refused(returning(result), poptorch.Error, "poptorch.CPU 'code', called at "))
    assert what in text
    assert f"{__file__}:" in text


def test_one_inside_of_another(refused):
    def mistake(net, x):
        inner = poptorch.CPU(torch.neg, "inner")
        return poptorch.CPU(lambda x: inner(x), "outer")(x)

    refused(mistake, poptorch.Error, "'inner' is called inside of the CPU operation 'outer'")


def test_two_objects_with_one_id(refused):
    def mistake(net, x):
        return poptorch.CPU(torch.neg, "one")(poptorch.CPU(torch.neg, "one")(x))

    refused(mistake, poptorch.Error, "another object with this ID")


@pytest.mark.parametrize(
    "change, came",
    [
        (lambda x: (x[:3],), r"float32 \[3, 4\], but was called with float32 \[6, 4\]"),
        (lambda x: (x.int(),), r"int32 \[6, 4\], but was called with float32 \[6, 4\]"),
        (lambda x: (x, x), r"float32 \[6, 4\], float32 \[6, 4\], but was called"),
    ],
)
def test_other_shapes_in_another_call(refused, change, came):
    def mistake(net, x):
        cpu = poptorch.CPU(lambda x, *more: x, "one")
        return cpu(x), cpu(*change(x))

    refused(mistake, poptorch.Error, f"is called at .* with {came}")


def test_reading_a_result_in_forward(refused):
    def mistake(net, x):
        return bool(poptorch.CPU(torch.sum, "sum")(torch.ones(2, 2)))

    refused(mistake, poptorch.Error, "aten::item is only supported in eager mode")


def test_a_transform_of_torch_func(refused):
    def mistake(net, x):
        return torch.vmap(poptorch.CPU(torch.neg, "code"))(x)

    refused(mistake, poptorch.Error, "inside of a transform of torch.func")


def test_a_gradient_of_the_gradient(h):
    def mistake(net, x):
        y = poptorch.CPU(torch.sin, "code")(net.fc(x))
        (first,) = torch.autograd.grad(y.sum(), net.fc.weight, create_graph=True)
        return poptorch.identity_loss(first.square().sum(), "none")

    h.refuse_training(
        h.Net(mistake), h.make_options(), poptorch.Error, "gradient of a gradient .* poptorch.CPU"
    )


def test_what_autograd_refuses_in_the_callable(h):
    """As in eager PyTorch, NumPy refuses a tensor that needs a gradient."""

    def mistake(net, x):
        y = poptorch.CPU(lambda x: torch.from_numpy(x.numpy()), "code")(net.fc(x))
        return poptorch.identity_loss(y.sum(), "none")

    h.refuse_training(h.Net(mistake), h.make_options(), RuntimeError, r"Use tensor.detach\(\)")


def test_stages_that_decrease(h):
    """The host's code belongs to the stage that calls it."""

    def mistake(net, x):
        poptorch.Block.start("a", ipu_id=1)
        y = net.fc(x)
        poptorch.Block.start("b", ipu_id=0)
        return poptorch.identity_loss(poptorch.CPU(torch.neg, "code")(y), "sum")

    match = r"stages must not decrease .*'CPU:0' .*on stage 0"
    h.refuse_training(h.Net(mistake), h.make_options(1, 6), poptorch.Error, match)


def test_a_tensor_of_the_device_as_a_result(refused):
    def mistake(net, x):
        return poptorch.CPU(lambda _: x, "code")(x)

    refused(mistake, poptorch.Error, "on ipu:0 as result 0. It must return dense tensors")


def test_a_tensor_of_another_trace(h):
    kept = []

    def mistake(net, x):
        kept.append(x * 2)
        return poptorch.CPU(torch.neg, "code")(kept[0])

    x = torch.randn(6, 4)
    assert torch.equal(poptorch.inferenceModel(h.Net(mistake), h.make_options())(x), -2 * x)
    with pytest.raises(poptorch.Error, match="made during an earlier trace"):
        poptorch.inferenceModel(h.Net(mistake), h.make_options())(x)
