"""torch.autocast in forward, as a decorator, and around the call of a compiled model."""

import pytest
import torch
from torch import nn

from popsim_torch.private_torch.autocasts import listed_operators
from popsim_torch.trace.autocast_policies import Policy, policies_of
from tests.unit.annotations.models import X, inference


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("device", ["cuda", "ipu"])
def test_a_region_and_one_without_autocast_inside(device, dtype):
    def function(model, x):
        with torch.autocast(device, dtype=dtype):
            y = model.fc(x)
            with torch.autocast(device, enabled=False):
                return y, model.fc(x), y @ y.t()

    half, plain, product = inference(function)(X)
    assert (half.dtype, plain.dtype, product.dtype) == (
        *(torch.float16, torch.float32),
        torch.float16,
    )
    torch.testing.assert_close(half.float(), plain, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("device", ["cpu", "ipu"])
def test_bfloat16_is_float32(device):
    def function(model, x):
        with torch.autocast(device, dtype=torch.bfloat16):
            return model.fc(x)

    assert torch.equal(inference(function)(X), inference(lambda m, x: m.fc(x))(X))


@pytest.mark.parametrize("device", ["cpu", "ipu"])
def test_a_decorator(device):
    decorated = torch.autocast(device, dtype=torch.float16)(lambda m, x: m.fc(x))
    assert inference(decorated)(X).dtype == torch.float16
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the context of the host works again
        assert nn.Linear(3, 2)(X).dtype == torch.bfloat16


@pytest.mark.parametrize(("dtype", "warns"), [(torch.float16, True), (torch.bfloat16, False)])
def test_around_a_call_it_has_no_effect_and_says_so(dtype, warns, caplog):
    expected = inference(lambda m, x: m.fc(x))(X)
    model = inference(lambda m, x: m.fc(x))
    with caplog.at_level("WARNING", "poptorch::python"), torch.autocast("cpu", dtype=dtype):
        assert torch.equal(model(X), expected)
    assert ("has no effect on it: the model keeps its dtypes" in caplog.text) == warns


def test_around_a_call_it_leaves_kernels_of_pytorch_alone():
    x = torch.randn(4, 3)
    model = inference(lambda m, x: torch.addbmm(x[:2], x.view(2, 2, 3), x.view(2, 3, 2) @ x[:2]))
    expected = model(x)
    assert any(op.kind == "aten" for op in model.compiled.program.graph.ops)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("device", ["cpu", "cuda", "ipu"])
def test_all_operators_of_pytorchs_lists_have_a_policy(device):
    lists = "cpu" if device == "cpu" else "cuda"
    assert set(policies_of(device)) == set(listed_operators(lists))


def test_the_policies_are_those_of_pytorchs_kernels():
    x, y = torch.randn(4, 4), torch.randn(4, 4).half()
    with torch.autocast("cpu", dtype=torch.float16):
        found = {
            "linear": nn.functional.linear(x, x),
            "mm": x @ x,
            "prelu": nn.functional.prelu(x, x[0]),
            "mse_loss": nn.functional.mse_loss(y, y),
            "trace": torch.trace(y),
            "prod": torch.prod(y),
        }
        assert torch.cat([x, y]).dtype == torch.float32
    policies = policies_of("cpu")
    assert policies["cat"] == Policy.PROMOTE
    for name, result in found.items():
        lower = result.dtype == torch.float16
        assert policies[name] == (Policy.LOWER if lower else Policy.FLOAT32), name
