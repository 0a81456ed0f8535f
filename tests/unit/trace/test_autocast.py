"""torch.autocast chooses no dtypes on the device."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options
from tests.unit.annotations.models import Model, X, inference


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda", "ipu"])
def test_autocast_chooses_no_types(device, dtype):
    def function(model, x):
        with torch.autocast(device, dtype=dtype):
            y = model.fc(x)
            with torch.autocast(device, enabled=False):
                return torch.softmax(y, -1), y @ y.t()

    def plain(model, x):
        y = model.fc(x)
        return torch.softmax(y, -1), y @ y.t()

    ours, expected = inference(function)(X), inference(plain)(X)
    assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True))


@pytest.mark.parametrize("device", ["cpu", "ipu"])
def test_autocast_as_a_decorator_and_around_a_call(device):
    expected = inference(lambda m, x: m.fc(x))(X)
    decorated = torch.autocast(device, dtype=torch.bfloat16)(lambda m, x: m.fc(x))
    assert torch.equal(inference(decorated)(X), expected)
    model = inference(lambda m, x: m.fc(x))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(model(X), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the context works again
        assert nn.Linear(3, 2)(X).dtype == torch.bfloat16


def test_autocast_around_a_call_leaves_kernels_of_pytorch_alone():
    x = torch.randn(4, 3)
    model = inference(lambda m, x: torch.addbmm(x[:2], x.view(2, 2, 3), x.view(2, 3, 2) @ x[:2]))
    expected = model(x)
    assert any(op.kind == "aten" for op in model.compiled.program.graph.ops)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x), expected)


def test_autocast_in_training():
    def function(model, x):
        with torch.autocast("ipu", dtype=torch.float16):
            return poptorch.identity_loss(model.fc(x).square().sum(), "none")

    torch.manual_seed(1)
    module = Model(function)
    options = make_options()
    options.anchorTensor("gradient", "Gradient___fc.weight")
    model = poptorch.trainingModel(module, options, poptorch.optim.SGD(module.parameters(), lr=0))
    loss = model(X)
    weight = module.fc.weight.detach().clone().requires_grad_()
    expected = nn.functional.linear(X, weight, module.fc.bias.detach()).square().sum()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(model.getAnchoredTensor("gradient"), weight.grad)
