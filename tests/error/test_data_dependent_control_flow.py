"""Forward reads the value of a tensor, which does not exist while it is traced."""

import pytest
import torch

import popsim_torch as poptorch

ITEM = "aten::item is only supported in eager mode"


def branch(_, x):
    if x.sum() > 0:
        pass


def loop(_, x):
    while x.sum() > 0:
        pass


@pytest.mark.parametrize(
    "mistake",
    [
        branch,
        loop,
        lambda _, x: x.sum().item() and None,
        lambda _, x: float(x.sum()) and None,
        lambda _, x: int(x.sum()) and None,
        lambda _, x: bool(x.sum()) and None,
        lambda _, x: x.tolist() and None,
        lambda _, x: (not x.sum()) and None,
        lambda _, x: [0, 1][x.sum().long()] and None,
        lambda _, x: (x.sum() > 0 and x.mean() > 0) and None,
        lambda _, x: torch.is_nonzero(x.sum()) and None,
        lambda _, x: range(x.sum().long()) and None,
        lambda _, x: torch.allclose(x, x) and None,
        lambda _, x: torch.equal(x, x) and None,
        lambda _, x: (x.sum() in [1, 2]) and None,
        lambda _, x: max(x.sum(), x.mean()) * 0,
        lambda self, x: self.fc.weight.sum().item() and None,
        lambda self, x: self.offset[0].item() and None,
    ],
    ids=[
        "if",
        "while",
        "item",
        "float",
        "int",
        "bool",
        "tolist",
        "not",
        "index",
        "and",
        "is_nonzero",
        "range",
        "allclose",
        "equal",
        "in",
        "max",
        "a parameter",
        "a buffer",
    ],
)
def test_reading_a_value(refused, mistake):
    error = refused(mistake, poptorch.Error, ITEM)
    advice = ("torch.where", "Use the tensor itself instead", "value of a tensor")
    assert any(words in str(error) for words in advice)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda _, x: x[x > 0] * 0,
        lambda _, x: x.nonzero() * 0,
        lambda _, x: torch.nonzero(x, as_tuple=True)[0] * 0,
        lambda _, x: x.unique() * 0,
        lambda _, x: torch.masked_select(x, x > 0) * 0,
        lambda _, x: torch.where(x > 0)[0] * 0,
        lambda _, x: torch.repeat_interleave(x, x[:, 0].long(), 0) * 0,
    ],
    ids=["mask", "nonzero", "as_tuple", "unique", "masked_select", "where", "repeat_interleave"],
)
def test_a_shape_that_depends_on_values(refused, mistake):
    error = refused(mistake, poptorch.Error, "depends on values|value of a tensor")
    assert "traced" in str(error)


def test_values_of_host_tensors_can_be_read(h):
    class Reads(h.Net):
        def __init__(self):
            super().__init__()
            self.table = torch.tensor([3.0])

        def forward(self, x):
            if self.table[0] > 2 and float(self.table) == 3.0:
                x = x + self.table.item()
            return x

    model = poptorch.inferenceModel(Reads(), h.make_options())
    assert model(torch.zeros(2)).tolist() == [3.0, 3.0]


def test_shapes_can_be_read(h):
    class Reads(h.Net):
        def forward(self, x):
            return x * x.shape[0] + len(x) + x.size(1) + x.numel() if x.dim() == 2 else x

    model = poptorch.inferenceModel(Reads(), h.make_options())
    assert model(torch.zeros(2, 4))[0, 0] == 2 + 4 + 8


def test_masked_assignment_is_fine(h):
    class Masks(h.Net):
        def forward(self, x):
            x = x.clone()
            x[x > 0] = 7.0
            return x

    model = poptorch.inferenceModel(Masks(), h.make_options())
    assert model(torch.tensor([1.0, -1.0])).tolist() == [7.0, -1.0]


READS = {
    "a number": lambda x: float(x.sum()),
    "an if": lambda x: 1.0 if x.sum() > 0 else 2.0,
    "NumPy": lambda x: x.numpy().mean(),
}


@pytest.mark.parametrize("name", READS)
def test_an_error_that_forward_catches_is_warned_of(name, caplog):
    def catches(x):
        try:
            factor = READS[name](x)
        except Exception:
            factor = 5.0
        return x * factor

    class Net(torch.nn.Module):
        def forward(self, x):
            return catches(x)

    torch.testing.assert_close(poptorch.inferenceModel(Net())(torch.ones(2)), torch.full((2,), 5.0))
    (record,) = [one for one in caplog.records if "has caught an error" in one.getMessage()]
    assert "test_data_dependent_control_flow.py:" in record.getMessage()
