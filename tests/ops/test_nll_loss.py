"""The ops nll_loss, nll_loss_grad and cross_entropy_grad, against float64 PyTorch."""

import pytest
import torch

from popsim_torch.errors import Error
from tests.ops.one_op import LAYOUTS, dtype_name, run_op

TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
REDUCTIONS = ["none", "mean", "sum"]
LABELS = torch.tensor([2, 0, 36, 5, 5, 7, 1])
IGNORED = 5


class Case:
    def __init__(self, dtype, reduction, weighted, layout=LAYOUTS["contiguous"]):
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(7, 37, generator=generator, dtype=torch.float64)
        self.y = layout(logits.log_softmax(1).to(dtype))
        self.labels = LABELS
        self.weights = torch.rand(37, generator=generator).to(dtype) if weighted else None
        self.reduction = reduction
        wide = None if self.weights is None else self.weights.double()
        number = REDUCTIONS.index(reduction)
        self.loss, self.total = torch.ops.aten.nll_loss_forward(
            self.y.double(), LABELS, wide, number, IGNORED
        )
        self.gradient = torch.rand(self.loss.shape, generator=generator).to(dtype)
        self.for_y = torch.ops.aten.nll_loss_backward(
            self.gradient.double(), self.y.double(), LABELS, wide, number, IGNORED, self.total
        )
        self.for_x = torch.ops.aten._log_softmax_backward_data(
            self.for_y, self.y.double(), 1, torch.float64
        )
        self.attributes = {"reduction": reduction, "ignore_index": IGNORED}

    def run_gradient(self, kind, *more):
        dtype = self.y.dtype
        total = self.total.to(dtype).reshape(())
        return run_op(
            kind,
            [self.gradient, total, self.labels, self.weights, *more],
            [(dtype, (7, 37))],
            classes=37,
            dtype=dtype_name(dtype),
            **self.attributes,
        )[0]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("labels", [torch.int32, torch.int64], ids=dtype_name)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=dtype_name)
def test_against_float64(dtype, reduction, weighted, labels, layout):
    case = Case(dtype, reduction, weighted, layout)
    case.labels = layout(LABELS.to(labels))
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    loss, total = run_op(
        "nll_loss",
        [case.y, case.labels, case.weights],
        [(dtype, case.loss.shape), (dtype, ())],
        **case.attributes,
    )
    torch.testing.assert_close(loss.double(), case.loss, **close)
    if reduction != "none":
        torch.testing.assert_close(total.double(), case.total, **close)
    for_y = case.run_gradient("nll_loss_grad")
    torch.testing.assert_close(for_y.double(), case.for_y, **close)
    for_x = case.run_gradient("cross_entropy_grad", case.y)
    torch.testing.assert_close(for_x.double(), case.for_x, **close)


def test_all_ignored():
    case = Case(torch.float32, "mean", False)
    case.labels = torch.full((7,), IGNORED)
    case.total = torch.zeros(())
    (loss,) = run_op(
        "nll_loss", [case.y, case.labels], [(torch.float32, ()), None], **case.attributes
    )
    assert loss.isnan()
    assert torch.equal(case.run_gradient("nll_loss_grad"), torch.zeros(7, 37))
    assert torch.equal(case.run_gradient("cross_entropy_grad", case.y), torch.zeros(7, 37))


@pytest.mark.parametrize("label", [-1, 37, 1 << 40])
def test_labels_out_of_range(label):
    case = Case(torch.float32, "sum", True)
    case.labels = LABELS.clone()
    case.labels[3] = label
    message = f"Target {label} is out of bounds"
    with pytest.raises(Error, match=message):
        run_op("nll_loss", [case.y, case.labels], [(torch.float32, ()), None], **case.attributes)
    with pytest.raises(Error, match=message):
        case.run_gradient("nll_loss_grad")
    with pytest.raises(Error, match=message):
        case.run_gradient("cross_entropy_grad", case.y)
