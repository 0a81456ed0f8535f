"""In which type an anchored tensor comes back."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode
from tests.parity.anchors.common import make_options


class Mixed(nn.Module):
    """Activations of every element type."""

    def forward(self, half, whole, truth):
        doubled = half * 2
        with poptorch.NameScope("index"):
            index = (half + 1).argmax(1)
        with poptorch.NameScope("count"):
            count = whole + whole
        with poptorch.NameScope("truth"):
            opposite = ~truth
        return doubled, index, count, opposite


def test_element_types_of_anchors():
    options = make_options()
    inputs = (
        torch.randn(2, 3).half(),
        torch.tensor([2**20, -7]),
        torch.tensor([True, False]),
    )
    names = ("input", "input/1", "input/2")
    plain = poptorch.inferenceModel(Mixed(), make_options())
    outputs = plain(*inputs)
    names = [n for n in plain.getTensorNames() if not n.endswith("Constant:0")]
    for name in names:
        options.anchorTensor(name, name)
    model = poptorch.inferenceModel(Mixed(), options)
    model(*inputs)
    anchors = {name: model.getAnchoredTensor(name) for name in names}
    assert anchors["input"].dtype == torch.float16
    assert anchors["Mul:0"].dtype == torch.float16
    assert anchors["input/1"].dtype == torch.int32
    assert anchors["count/Add:0"].dtype == torch.int32
    assert anchors["index/ArgMax:0"].dtype == torch.int32
    assert anchors["input/2"].dtype == torch.bool
    assert torch.equal(anchors["Mul:0"], inputs[0] * 2)
    assert anchors["input/1"].tolist() == [2**20, -7]
    assert anchors["count/Add:0"].tolist() == [2**21, -14]
    assert torch.equal(anchors["index/ArgMax:0"].long(), inputs[0].argmax(1))
    assert anchors["input/2"].tolist() == [True, False]
    assert [out.dtype for out in outputs] == [
        torch.float16,
        torch.int32,
        torch.int32,
        torch.bool,
    ]


def test_half_gradients_and_weights_stay_half():
    torch.manual_seed(0)
    net = nn.Linear(4, 3).half()

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = net

        def forward(self, x):
            return poptorch.identity_loss(self.layer(x), "mean")

    wrapper = Wrapper()
    options = make_options(2, 2)
    for name in ("layer.weight", "Gradient___layer.weight", "layer/Gemm:0"):
        for mode in (OutputMode.All, OutputMode.Sum, OutputMode.Final):
            options.anchorTensor(f"{name} {mode.name}", name, mode)
    model = poptorch.trainingModel(
        wrapper, options, poptorch.optim.SGD(wrapper.parameters(), lr=0.5)
    )
    x = torch.randn(8, 4).half()
    model(x)
    for name in ("layer.weight", "Gradient___layer.weight", "layer/Gemm:0"):
        for mode in ("All", "Sum", "Final"):
            assert model.getAnchoredTensor(f"{name} {mode}").dtype == torch.float16
    gradient = model.getAnchoredTensor("Gradient___layer.weight All").view(4, 3, 4)
    expected = x.view(4, 2, 4).float().sum(1, keepdim=True).expand(4, 3, 4) / 6
    torch.testing.assert_close(gradient.float(), expected, rtol=5e-3, atol=5e-3)


def test_a_sum_of_half_values_is_rounded_once():
    class Identity(nn.Module):
        def forward(self, x):
            return x * 1

    options = make_options(8)
    options.anchorTensor("total", "Mul:0", OutputMode.Sum)
    model = poptorch.inferenceModel(Identity(), options)
    x = torch.tensor([2048.0, 1, 1, 1, 1, 1, 1, 2]).half().view(8, 1)
    model(x)
    assert model.getAnchoredTensor("total").tolist() == [[2056.0]]


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
@pytest.mark.parametrize("count", [1, 300])
def test_a_sum_of_integers_counts(dtype, count):
    class Flags(nn.Module):
        def forward(self, x):
            return (x > 0) if dtype == torch.bool else x.to(dtype)

    options = make_options(count)
    options.outputMode(OutputMode.Sum)
    name = "Greater:0" if dtype == torch.bool else "Cast:0" if dtype != torch.int32 else "input"
    options.anchorTensor("total", name, OutputMode.Sum)
    options.anchorTensor("last", name, OutputMode.Final)
    model = poptorch.inferenceModel(Flags(), options)
    low = 0 if dtype in (torch.bool, torch.uint8) else -100
    x = torch.randint(low, 100, (count, 50), dtype=torch.int32)
    out = model(x)
    expected = (x > 0 if dtype == torch.bool else x).sum(0, keepdim=True, dtype=torch.int32)
    for total in (out, model.getAnchoredTensor("total")):
        assert total.dtype == torch.int32
        assert torch.equal(total, expected)
    last = model.getAnchoredTensor("last")
    assert last.dtype == (torch.int32 if dtype == torch.int64 else dtype)
