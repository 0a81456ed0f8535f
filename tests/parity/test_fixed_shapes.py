"""Calls that PyTorch computes with shapes that depend on values, or for which it has no shapes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from tests.parity.compare import quiet_options
from tests.parity.functions import compare_with_eager, in_both


def written(write):
    """Return a function that changes a tensor in place with ``write(tensor, trained, x)``."""

    def function(model, x):
        target = x.repeat(1, 2) * 2
        write(target, model.fc(x), x)
        return target

    return function


def row(target, y, x):
    target[x[:, 0] > 0.3] = y.sum(0).repeat(3)[:8]


def number(target, y, x):
    target[x.repeat(1, 2) > 0.5] = y.sum()


def one_axis_more(target, y, x):
    target[(x[:, 1] > 0.3,)] = y.sum(0).repeat(3)[None, :8]


WRITES = {
    "a row": written(row),
    "a number": written(number),
    "one axis more": written(one_axis_more),
    "index_put_": written(lambda t, y, x: t.index_put_((x[:, 0] > 0.3,), y.mean())),
    "index_put": lambda m, x: torch.index_put(x, (x > 0.5,), m.fc(x).mean()),
    "index_fill": lambda m, x: x.index_fill(1, m.sizes, m.fc(x).mean()),
    "index_fill_": written(lambda t, y, x: t.index_fill_(1, torch.tensor([0, 3]), y.mean())),
    "index_fill of a number": lambda m, x: x[0, 0].index_fill(0, m.sizes[:1] - 1, m.fc(x).mean()),
    "a known mask": lambda m, x: x.T.index_put((m.mask,), m.fc(x).T),
}


@in_both(WRITES)
def test_the_gradient_of_what_is_written(function, kind):
    compare_with_eager(function, kind)


def test_as_many_values_as_the_mask_has_need_a_known_mask():
    with pytest.raises(poptorch.Error, match=r"depends on values"):
        compare_with_eager(lambda m, x: x.T.index_put((x[0] > 0.5,), m.fc(x).T), "training")


COVARIANCES = {
    "counts": lambda m, x: torch.cov(m.fc(x).T, fweights=m.sizes),
    "weights": lambda m, x: torch.cov(m.fc(x).T, aweights=x[:, 0]),
    "both": lambda m, x: m.fc(x).T.cov(correction=0, fweights=m.sizes, aweights=x[:, 0]),
    "one variable": lambda m, x: torch.cov(x[0], aweights=x[1]),
}


@in_both(COVARIANCES)
def test_weighted_covariance(function, kind):
    compare_with_eager(function, kind)


def test_weights_of_a_covariance_have_the_shape_of_the_observations():
    with pytest.raises(RuntimeError, match=r"same numel as there are observations"):
        compare_with_eager(lambda m, x: torch.cov(x, aweights=x[:, 0]), "inference")


def least_squares(driver):
    def function(model, x):
        matrix = torch.cat([x.T, torch.eye(4, 1)], 1) + torch.eye(4, 3)
        return torch.linalg.lstsq(matrix * model.fc(x).mean(), x.T, driver=driver)[:2]

    return function


@in_both({"default": least_squares(None), "gels": least_squares("gels")})
def test_least_squares(function, kind):
    compare_with_eager(function, kind)


def test_least_squares_of_any_rank_have_no_fixed_shapes():
    with pytest.raises(poptorch.Error, match=r"linalg_lstsq.* depends on values"):
        compare_with_eager(least_squares("gelsd"), "inference")


WITHOUT_SHAPE_RULE = {
    "geqrf": lambda m, x: torch.geqrf(x),
    "histogram": lambda m, x: torch.histogram(x, 5, range=(0.0, 1.0)),
    "histogramdd": lambda m, x: torch.histogramdd(x, [2, 3, 2, 2], range=[0.0, 1.0] * 4)[0],
    "fractional max pool": lambda m, x: F.fractional_max_pool3d(
        m.fc(x)[:, :, None, None, None].expand(2, 3, 4, 4, 4) * x[0],
        2,
        output_size=2,
        _random_samples=torch.full((2, 3, 3), 0.5),
    ),
}


@in_both(WITHOUT_SHAPE_RULE)
def test_operators_without_a_shape_rule(function, kind):
    compare_with_eager(function, kind)


def compare_with_integers(function, kind, integers):
    """Compare ``function(model, x, integers)``; the device gets the integers in ``x``."""
    x = torch.rand(len(integers), 4)
    x[:, 0] = torch.tensor(integers)
    compare_with_eager(lambda m, x: function(m, x, x[:, 0].long()), kind, x)


REPEATED = {
    "rows": lambda m, x, r: m.fc(x).repeat_interleave(r, 0, output_size=4),
    "function": lambda m, x, r: torch.repeat_interleave(m.fc(x), r, dim=0, output_size=4),
    "none of the first": lambda m, x, r: m.fc(x).repeat_interleave(r - 1, 0, output_size=2),
    "columns": lambda m, x, r: m.fc(x)[:, :2].repeat_interleave(r, -1, output_size=4),
    "without dim": lambda m, x, r: m.fc(x)[0, :2].repeat_interleave(r, output_size=4),
    "one count": lambda m, x, r: m.fc(x).repeat_interleave(r[1], 0, output_size=6),
    "indices": lambda m, x, r: m.fc(x)[torch.repeat_interleave(r, output_size=4)],
    "nothing": lambda m, x, r: m.fc(x).repeat_interleave(r * 0, 0, output_size=0),
    "int32": lambda m, x, r: m.fc(x).repeat_interleave(r.int(), 0, output_size=4),
}


@in_both(REPEATED)
def test_repeat_interleave_with_the_size_of_its_result(function, kind):
    compare_with_integers(function, kind, [1, 3])


@pytest.mark.parametrize("counts", [[1, 2], [-1, 5]], ids=str)
def test_repeats_that_do_not_fit_fail_the_run(counts):
    with pytest.raises(
        poptorch.Error, match=r"no repeat may be negative.* output_size, which is 4"
    ):
        compare_with_integers(REPEATED["rows"], "inference", counts)


def test_repeats_of_another_size_are_refused():
    with pytest.raises(RuntimeError, match="must have the same size as input"):
        compare_with_integers(
            lambda m, x, r: x.repeat_interleave(r, 1, output_size=4), "inference", [1, 3]
        )


def test_one_hot_needs_the_number_of_classes():
    with pytest.raises(poptorch.Error, match=r"F.one_hot at .*num_classes=10"):
        compare_with_integers(lambda m, x, y: F.one_hot(y), "inference", [0, 2])


CROSS_ENTROPIES = {
    "two arguments": lambda m, x, y: torch.ops.aten.cross_entropy_loss(m.fc(x), y),
    "keywords": lambda m, x, y: torch.ops.aten.cross_entropy_loss(
        m.fc(x), y, reduction=2, ignore_index=1
    ),
    "smoothing": lambda m, x, y: torch.ops.aten.cross_entropy_loss(m.fc(x), y, label_smoothing=0.1),
    "overload": lambda m, x, y: torch.ops.aten.cross_entropy_loss.default(m.fc(x), y),
}


@in_both(CROSS_ENTROPIES)
def test_cross_entropy_as_an_operator(function, kind):
    compare_with_integers(function, kind, [0, 2])


def test_a_changed_polygamma():
    compare_with_eager(lambda m, x: (x + 1).polygamma_(2), "inference")


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=str)
def test_multilabel_loss_of_one_sample(shape, reduction):
    labels = torch.tensor([1, 0, -1, 2, -1, 0])[: torch.Size(shape).numel()]
    compare_with_eager(
        lambda m, x: F.multilabel_margin_loss(
            m.fc(x)[0] if len(shape) == 1 else m.fc(x), labels.reshape(shape), reduction=reduction
        ),
        "training",
    )


@pytest.mark.parametrize("norm", ["native_batch_norm", "_native_batch_norm_legit"])
def test_batch_norm_in_eval_mode_has_no_statistics_of_the_batch(norm):
    class Norm(nn.Module):
        def forward(self, x, ones):
            return getattr(torch, norm)(x, ones, ones, ones * 2, ones, False, 0.5, 1e-3)

    given = torch.rand(2, 3, 4), torch.ones(3)
    results = poptorch.inferenceModel(Norm(), quiet_options())(*given)
    for ours, eager in zip(results, Norm()(*given), strict=True):
        torch.testing.assert_close(ours, eager)


def test_weights_without_values():
    class Circular(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)
            self.nothing = nn.Parameter(torch.zeros(0, 3, 3))

        def forward(self, x):
            padded = F.pad(self.nothing, (1, 1), mode="circular")
            return poptorch.identity_loss(self.fc(x).sum() + padded.sum(), "none"), padded

    model = Circular()
    x = torch.rand(2, 3)
    expected = model(x)[0].detach()
    loss, padded = poptorch.trainingModel(model, quiet_options())(x)
    assert padded.shape == (0, 3, 5)
    torch.testing.assert_close(loss, expected)


OF_NOTHING = {
    "largest": lambda _, x: torch.linalg.vector_norm(x[:0], torch.inf, -1),
    "smallest": lambda _, x: torch.linalg.vector_norm(x[:0], -torch.inf, (-1,), keepdim=True),
    "norm": lambda _, x: torch.norm(x[:0], torch.inf, -1),
    "named order": lambda _, x: torch.norm(x[:0], p=torch.inf, dim=1, keepdim=True),
    "method": lambda _, x: x[:0].norm(-torch.inf, -1),
    "linalg.norm": lambda _, x: torch.linalg.norm(x[:0], ord=torch.inf, dim=-1),
}


@in_both(OF_NOTHING)
def test_no_norms(function, kind):
    compare_with_eager(function, kind)


MORE_BINS = {
    "uint8": lambda _, x: torch.bincount((40 * x).flatten().byte(), minlength=300).float(),
    "int16": lambda _, x: (40 * x).flatten().short().bincount(minlength=40000).float(),
    "weights": lambda _, x: torch.bincount((40 * x[0]).byte(), x[1].detach(), minlength=300),
}


@in_both(MORE_BINS)
def test_more_bins_than_the_type_has_numbers(function, kind):
    compare_with_eager(function, kind)


OTHERS = {
    "mean of complex numbers": lambda _, x: torch.complex(x, x + 1).mean(dtype=torch.float32),
    "mean of rows": lambda _, x: torch.complex(x, x + 1).mean(0, dtype=torch.float32),
    "complex number": lambda _, x: x.masked_fill(x > 0.5, 2 + 0j),
    "share_memory_": lambda _, x: x.share_memory_() + 1,
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@in_both(OTHERS)
def test_other_calls(function, kind):
    compare_with_eager(function, kind)
