"""``as_strided`` of views: its strides refer to the memory that a view is a part of."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

# Each gets ten numbers.
VIEWS = {
    "select of a stack": lambda x: torch.stack([x, x + 100], -1)[..., 0].as_strided((2, 2), (1, 2)),
    "every second": lambda x: (x * 1)[::2].as_strided((2, 2), (1, 2)),
    "every second, offset": lambda x: (x * 1)[::2].as_strided((2, 2), (1, 2), 3),
    "begin cut off": lambda x: (x * 1)[2:].as_strided((2, 2), (1, 2)),
    "transposed": lambda x: (x * 1).reshape(2, 5).T.as_strided((2, 2), (1, 2)),
    "expanded": lambda x: (x * 1)[3:4].expand(4).as_strided((2, 2), (1, 2)),
    "part of a chunk": lambda x: (x * 1).chunk(2)[1].as_strided((2, 2), (1, 2)),
    "twice": lambda x: (x * 1)[::3].as_strided((4,), (2,)).as_strided((2, 2), (1, 2), 1),
    "copy of a part": lambda x: (x * 1)[2:].clone().as_strided((2, 2), (1, 2), 1),
    "part that is further": lambda x: (x * 1)[4::2].as_strided((2, 2), (1, 2), 5),
    "into a copy of a part": lambda x: torch.as_strided_scatter(
        (x * 1)[2:].clone(), x[:4].view(2, 2), (2, 2), (1, 3), 2
    ),
    "parameter": lambda x: x[::2].as_strided((2, 2), (1, 2)),
}


class Viewed(nn.Module):
    def __init__(self, function, changes):
        super().__init__()
        self.w = nn.Parameter(torch.arange(10.0))
        self._function = function
        self._changes = changes

    def forward(self):
        x = self.w
        if self._changes:
            x = x.clone()
            x[1:4] += 50
        out = self._function(x)
        weights = torch.arange(1.0, 1 + out.numel()).reshape(out.shape)
        return out, poptorch.identity_loss((out * weights).sum(), "none")


@pytest.mark.parametrize("changes", [False, True], ids=["", "after a change"])
@pytest.mark.parametrize("name", VIEWS)
def test_values_and_gradients(name, changes):
    module = Viewed(VIEWS[name], changes)
    expected, loss = module()
    loss.backward()
    options = make_options()
    options.anchorTensor("gradient", "Gradient___w")
    optimizer = poptorch.optim.SGD(module.parameters(), lr=0.0)
    model = poptorch.trainingModel(module, options, optimizer)
    out, _ = model()
    assert torch.equal(out, expected.detach())
    assert torch.equal(model.getAnchoredTensor("gradient"), module.w.grad)


@pytest.mark.parametrize("name", VIEWS)
def test_inference(name):
    module = Viewed(VIEWS[name], changes=True)
    out, _ = poptorch.inferenceModel(module, make_options())()
    assert torch.equal(out, module()[0].detach())


def changed_view(x):
    view = x[2:5]
    seen = view.as_strided((3,), (2,), 0)
    view.mul_(2)
    return seen


def changed_owner(x):
    seen = x[2:5].as_strided((3,), (2,), 4)
    x.mul_(2)
    return seen


def changed_itself(x):
    return x[2:5].as_strided((3,), (2,), 0).mul_(2)


@pytest.mark.parametrize("function", [changed_view, changed_owner, changed_itself])
def test_changes_of_memory_that_is_shown_beside_a_view(function):
    def of_a_copy(x):
        return function(x * 1)

    model = poptorch.trainingModel(Viewed(of_a_copy, changes=False), make_options())
    with pytest.raises(poptorch.Error, match=r"'mul_' at \S+ changes .* Call as_strided of"):
        model()
    module = Viewed(of_a_copy, changes=False)
    out, _ = poptorch.inferenceModel(module, make_options())()
    assert torch.equal(out, module()[0].detach())


def test_such_a_change_after_a_copy():
    def changed_copy(x):
        y = x * 1
        seen = y[2:5].as_strided((3,), (2,), 0) * 3
        y = y.clone()
        y.mul_(2)
        return seen + y[:3]

    module = Viewed(changed_copy, changes=False)
    expected, loss = module()
    loss.backward()
    options = make_options()
    options.anchorTensor("gradient", "Gradient___w")
    model = poptorch.trainingModel(module, options, poptorch.optim.SGD(module.parameters(), lr=0.0))
    out, _ = model()
    assert torch.equal(out, expected.detach())
    assert torch.equal(model.getAnchoredTensor("gradient"), module.w.grad)
