"""Bags of rows of a table, against eager PyTorch in float64, forward and backward."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import InternalError
from tests.ops.one_op import run_op
from tests.options import make_options

ROWS, BAGS = 30, 12
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}


def whole(limit, *shape):
    return torch.randint(limit, shape, generator=torch.Generator().manual_seed(2))


class Model(nn.Module):
    def __init__(self, *, weighted=False, dtype=torch.float32, width=37, **settings):
        super().__init__()
        torch.manual_seed(1)
        self.bag = nn.EmbeddingBag(ROWS, width, **settings).to(dtype)
        self.weights = nn.Parameter(torch.randn(BAGS * 4).to(dtype)) if weighted else None

    def forward(self, indices, offsets):
        y = self.bag(indices, offsets, per_sample_weights=self.weights)
        factors = torch.arange(float(y.shape[1])).cos().to(y.dtype)
        return y, poptorch.identity_loss((y * factors).float().sum(), "none")


def check(module, indices, offsets, dtype=torch.float32):
    options = make_options()
    names = [name for name, _ in module.named_parameters()]
    for name in names:
        options.anchorTensor(name, f"Gradient___{name}")
    eager = copy.deepcopy(module).double()
    model = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.0))
    y, _ = model(indices, offsets)
    expected, loss = eager(indices, offsets)
    loss.backward()
    tolerances = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    torch.testing.assert_close(y.double(), expected.detach(), **tolerances)
    for name in names:
        gradient = model.getAnchoredTensor(name).double()
        wanted = eager.get_parameter(name).grad
        torch.testing.assert_close(gradient.reshape(wanted.shape), wanted, **tolerances)
    program = str(model.program())
    assert "embedding_bag(" in program and "embedding_bag_grad(" in program
    assert "aten::_embedding_bag" not in program


# One bag is empty; bags have different sizes.
OFFSETS = torch.tensor([0, 1, 5, 5, 9, 12, 20, 21, 22, 30, 31, 40])
INDICES = whole(ROWS, BAGS * 4)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", [37, 64, 130])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_training(mode, padding, width, dtype):
    module = Model(mode=mode, padding_idx=padding, width=width, dtype=dtype)
    check(module, INDICES, OFFSETS, dtype)


@pytest.mark.parametrize("padding", [None, 3])
def test_weights_of_samples(padding):
    module = Model(mode="sum", padding_idx=padding, weighted=True)
    check(module, INDICES, OFFSETS)
    assert module.weights is not None


def test_the_end_of_the_last_bag():
    end = torch.tensor([BAGS * 4])
    module = Model(mode="mean", include_last_offset=True)
    check(module, INDICES, torch.cat([OFFSETS, end]))


def test_positions_of_32_bits():
    check(Model(mode="sum"), INDICES.int(), OFFSETS.int())


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_gradients_scaled_by_frequency_are_left_to_pytorch(mode):
    module = Model(mode=mode, scale_grad_by_freq=True)
    options = make_options()
    options.anchorTensor("gradient", "Gradient___bag.weight")
    eager = copy.deepcopy(module)
    model = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.0))
    model(INDICES, OFFSETS)
    eager(INDICES, OFFSETS)[1].backward()
    torch.testing.assert_close(model.getAnchoredTensor("gradient"), eager.bag.weight.grad)


@pytest.mark.parametrize(
    ("index", "offsets", "message"),
    [
        (ROWS, OFFSETS, "index 30 is out of range: the table has 30 rows"),
        (-1, OFFSETS, "index -1 is out of range"),
        (0, OFFSETS + 1, "the first offset is 1, but must be 0"),
        (0, OFFSETS.flip(0), "offset 31 is not between 40 and 48"),
        (0, OFFSETS * 2, r"offset 60 is not between 44 and 48"),
    ],
)
def test_numbers_out_of_range(index, offsets, message):
    model = poptorch.inferenceModel(Model(mode="sum").bag, make_options())
    model(INDICES, OFFSETS)
    indices = INDICES.clone()
    indices[7] = index
    with pytest.raises(poptorch.Error, match=message):
        model(indices, offsets)
    torch.testing.assert_close(model(INDICES, OFFSETS), Model(mode="sum").bag(INDICES, OFFSETS))


@pytest.mark.parametrize(
    ("kind", "shapes", "attributes", "message"),
    [
        ("embedding_bag", [(4, 3, 2), (5,), (2,)], {"mode": "sum"}, "has 2 axes"),
        ("embedding_bag", [(4, 3), (5,), (2,), (4,)], {"mode": "sum"}, r"shape"),
        (
            "embedding_bag",
            [(4, 3), (5,), (0,)],
            {"mode": "sum", "include_last_offset": True},
            "there is an offset",
        ),
        ("embedding_bag_grad", [(2, 3), (5,), (4,)], {"mode": "sum", "rows": 4}, "an offset for"),
        ("embedding_bag_grad", [(2, 3), (5,), (2,)], {"mode": "max", "rows": 4}, "an input 3"),
        ("embedding_bag_weights_grad", [(2, 3), (4, 2), (5,), (2,)], {}, "the same length"),
    ],
)
def test_wrong_shapes(kind, shapes, attributes, message):
    is_number = {"embedding_bag": (1, 2), "embedding_bag_grad": (1, 2)}.get(kind, (2, 3))
    inputs = [
        torch.zeros(shape, dtype=torch.int64) if i in is_number else torch.zeros(shape)
        for i, shape in enumerate(shapes)
    ]
    with pytest.raises(InternalError, match=message):
        run_op(kind, inputs, [(torch.float32, (2, 3))], **attributes)
