"""Calls that PyTorch computes and cannot trace; mistakes that keep eager PyTorch's errors."""

import copy
import functools
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import popsim_torch as poptorch

# Warnings of torch: rules of forward-mode differentiation.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:`torch.jit.trace"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
]


class Calls(nn.Module):
    """A model that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.fc = nn.Linear(3, 1)
        self.calls = {"function": function}  # (models share it)

    def forward(self, x):
        result = self.calls["function"](self.fc, x)
        return result, poptorch.identity_loss(result.sum(), "none")


def dual_times_number(fc, x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(fc(dual) * 2).tangent


def test_a_gradient_that_pytorch_cannot_trace():
    net = Calls(dual_times_number)
    x = torch.ones(2, 3)
    torch.testing.assert_close(poptorch.inferenceModel(net)(x)[0], net(x)[0].detach())
    model = poptorch.trainingModel(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match="cannot trace the gradient of the call at") as caught:
        model(x)
    message = str(caught.value)
    assert f"{__file__}:" in message
    assert "poptorch.CPU" in message
    assert "report a bug" not in message
    net.calls["function"] = lambda fc, x: fc(x)
    before = net.fc.weight.detach().clone()
    model(x)
    assert not torch.equal(net.fc.weight, before)


@pytest.mark.parametrize(
    ("mistake", "kind", "text"),
    [
        (lambda _, x: torch.ops.aten.unknown(x), AttributeError, "unknown"),
        (lambda _, x: nn.Module()(x), NotImplementedError, "forward"),
        (lambda _, x: x.unknown(), AttributeError, "unknown"),
        (lambda _, x: {}[x.dim()], KeyError, "2"),
    ],
    ids=["operator", "layer", "method", "key"],
)
def test_mistakes_keep_their_errors(mistake, kind, text):
    model = poptorch.inferenceModel(Calls(mistake))
    with pytest.raises(kind, match=text) as caught:
        model(torch.ones(2, 3))
    assert not isinstance(caught.value, poptorch.Error)


def copied_host_tensor(_, x):
    table = torch.zeros(3, device="cpu")
    table[0] = x.sum()
    return copy.copy(table) + x


@pytest.mark.parametrize(
    ("mistake", "advice"),
    [
        (copied_host_tensor, "x.view_as"),
        (lambda _, x: torch.FloatTensor(x), "x.float"),
        (lambda _, x: 1 + torch.FloatTensor(x), "x.float"),
        (lambda _, x: x + x.untyped_storage().nbytes(), "data_ptr"),
    ],
    ids=["copied memory", "a class", "a class in an expression", "memory"],
)
def test_advice(mistake, advice):
    net = Calls(mistake)
    net(torch.ones(2, 3))  # eager PyTorch computes it
    with pytest.raises(poptorch.Error, match=advice) as caught:
        poptorch.inferenceModel(net)(torch.ones(2, 3))
    assert f"{__file__}:" in str(caught.value)


def test_a_class_of_another_dtype_keeps_the_error():
    model = poptorch.inferenceModel(Calls(lambda _, x: torch.HalfTensor(x)))
    with pytest.raises(TypeError, match="expected TensorOptions"):
        model(torch.ones(2, 3))


def function_of_pytorch(path, statement):
    """Return a function whose code is in a file of PyTorch."""
    file = str(Path(torch.__file__).parent / path)
    names = {"__name__": "torch.part"}
    exec(compile(f"def fails(*_):\n    {statement}", file, "exec"), names)
    return names["fails"]


@pytest.mark.parametrize(
    ("path", "statement", "kind"),
    [
        ("_subclasses/fake_tensor.py", "raise KeyError('a table')", poptorch.Error),
        ("fx/proxy.py", "assert False", poptorch.Error),
        ("_meta_registrations.py", "raise NotImplementedError", poptorch.Error),
        ("_meta_registrations.py", "raise RuntimeError('a shape')", RuntimeError),
        ("nn/functional.py", "raise NotImplementedError('a mode')", NotImplementedError),
        ("autograd/graph.py", "raise RuntimeError('x INTERNAL ASSERT FAILED y')", poptorch.Error),
    ],
)
def test_failures_of_pytorch_itself(path, statement, kind):
    model = poptorch.inferenceModel(Calls(function_of_pytorch(path, statement)))
    with pytest.raises(kind) as caught:
        model(torch.ones(2, 3))
    assert isinstance(caught.value, poptorch.Error) == (kind is poptorch.Error)
    assert not model.isCompiled()


def test_a_sparse_tensor_that_forward_makes():
    def sparse(_, x):
        return torch.sparse_coo_tensor(torch.tensor([[0], [1]]), x[0, :1], (2, 2)).to_dense()

    with pytest.raises(poptorch.Error, match="dense tensors only") as caught:
        poptorch.inferenceModel(Calls(sparse))(torch.ones(2, 3))
    assert "Facebook" not in str(caught.value)


def test_tensors_that_a_cache_keeps():
    table = functools.lru_cache(lambda n: torch.arange(n, dtype=torch.float32))
    net = Calls(lambda _, x: x + table(3))
    expected = torch.ones(2, 3) + torch.arange(3)
    torch.testing.assert_close(poptorch.inferenceModel(net)(torch.ones(2, 3))[0], expected)
    message = f"at {__file__}:.* made during an earlier trace .*lru_cache.*device='cpu'"
    with pytest.raises(poptorch.Error, match=message):
        poptorch.inferenceModel(net)(torch.ones(2, 3))
    with pytest.raises(poptorch.Error, match=message):
        net(torch.ones(2, 3))  # (eager PyTorch)
    host = functools.lru_cache(lambda n: torch.arange(n, dtype=torch.float32, device="cpu"))
    net = Calls(lambda _, x: x + host(3))
    for _ in range(2):
        torch.testing.assert_close(poptorch.inferenceModel(net)(torch.ones(2, 3))[0], expected)
    torch.testing.assert_close(net(torch.ones(2, 3))[0], expected)


def test_a_gradient_that_divides_by_a_size_of_zero():
    net = Calls(lambda fc, x: nn.functional.group_norm(fc(x)[:, :, None][:, :, :0], 1))
    net.fc.weight.requires_grad_(True)
    x = torch.ones(2, 3)
    training = poptorch.trainingModel(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match="ZeroDivisionError") as caught:
        training(x)
    assert "test_untraceable_calls.py:" in str(caught.value)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda _, x: x.clone().apply_(lambda one: one + 1),
        lambda _, x: x.clone().map_(x, lambda one, other: one + other),
        lambda _, x: x.clone().map2_(x, x, lambda one, *_: one),
    ],
)
def test_python_functions_of_elements(mistake):
    with pytest.raises(poptorch.Error, match="for each element") as caught:
        poptorch.inferenceModel(Calls(mistake))(torch.ones(2, 3))
    assert "test_untraceable_calls.py:" in str(caught.value)


def test_a_complex_tensor_at_a_mask():
    net = Calls(lambda _, x: x.masked_fill(x > 1, torch.tensor(2 + 0j)))
    with pytest.raises(poptorch.Error, match=r"value\.real") as caught:
        poptorch.inferenceModel(net)(torch.ones(2, 3))
    assert "test_untraceable_calls.py:" in str(caught.value)


SAVES = {
    "a tensor": lambda fc, x: torch.save(x, io.BytesIO()),
    "a result in a dict": lambda fc, x: torch.save({"a": [x * 2]}, io.BytesIO()),
    "weights": lambda fc, x: torch.save(fc.state_dict(), io.BytesIO()),
    "a module": lambda fc, x: torch.save(fc, io.BytesIO()),
    "pickle": lambda fc, x: pickle.dumps(x, protocol=2),
    "pickle in Python": lambda fc, x: pickle._dumps(fc.weight),
}


@pytest.mark.parametrize("name", SAVES)
def test_tensors_that_forward_saves_are_refused(name):
    with pytest.raises(poptorch.Error, match="saves a tensor of the device") as caught:
        poptorch.inferenceModel(Calls(SAVES[name]))(torch.ones(2, 3))
    assert f"{__file__}:" in str(caught.value)


def test_tensors_of_the_host_are_saved_and_others_copied():
    host = torch.ones(2)

    def forward(fc, x):
        torch.save(host, io.BytesIO())
        same = copy.copy(x)
        same.mul_(2)
        return fc(copy.copy(x)) + copy.deepcopy(x)[:, :1] + copy.copy(fc.bias)

    net = Calls(forward)
    ours, eager = torch.ones(2, 3), torch.ones(2, 3)
    result = poptorch.inferenceModel(net)(ours)[0]
    torch.testing.assert_close(result, net(eager)[0].detach())
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize(
    "function",
    [
        lambda fc, x: torch.jit.trace(fc, (x,))(x),
        lambda fc, x: torch.testing.assert_close(x, x + 1),
    ],
)
def test_calls_that_compare_values_are_refused(function):
    with pytest.raises(poptorch.Error, match="compares or saves the values") as caught:
        poptorch.inferenceModel(Calls(function))(torch.ones(2, 3))
    assert f"{__file__}:" in str(caught.value)


def test_calls_of_the_script_compiler_that_need_no_values():
    net = Calls(lambda fc, x: torch.jit.trace(fc, (x,), check_trace=False)(torch.jit.script(fc)(x)))
    net.fc = nn.Linear(3, 3)
    x = torch.ones(2, 3)
    torch.testing.assert_close(poptorch.inferenceModel(net)(x)[0], net(x)[0].detach())
