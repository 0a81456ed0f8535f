"""The ops attention and attention_grad, run on the device, against float64 PyTorch."""

import pytest
import torch

from tests.ops.one_op import LAYOUTS, dtype_name, run_op

# Logits of about ten are rounded to the type: errors of probabilities are ten times as large.
TOLERANCES = {torch.float32: 4e-6, torch.float16: 8e-3, torch.bfloat16: 6e-2}
# Heads, queries, keys, depth, width of the values.
SIZES = [(2, 80, 96, 32, 32), (3, 1, 77, 33, 17), (4, 300, 131, 16, 65), (2, 257, 513, 1, 7)]
MASKS = ["none", "rows and columns", "columns of each head", "all", "initial", "hidden"]


def sample(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Case:
    """Operands, and what the ops are asked for, in their words and in PyTorch's."""

    def __init__(self, sizes, dtype, mask="none", layout=lambda value: value, **attributes):
        batch, rows, columns, depth, width = sizes
        self.scores = (batch, rows, columns)
        self.dtype = dtype
        self.more = attributes
        self.q = layout(sample((batch, rows, depth), dtype, 1))
        self.k = layout(sample((batch, depth, columns), dtype, 2))
        self.v = layout(sample((batch, columns, width), dtype, 3))
        self.gradient = layout(sample((batch, rows, width), dtype, 4))
        self.initial = sample((1, rows, columns), dtype, 5) if mask == "initial" else None
        self.others = []
        self.code = ["mul 0 1"]
        self.constants = [0.5]
        self.safe = mask == "hidden"
        shapes = {
            "rows and columns": (rows, columns),
            "columns of each head": (batch, 1, columns),
            "all": (batch, rows, columns),
        }
        if mask in shapes:
            self.others = [sample(shapes[mask], dtype, 6)]
            self.code = ["mul 0 2", "add 3 1"]
        elif self.safe:
            hidden = torch.rand(rows, columns, generator=torch.Generator().manual_seed(7)) > 0.5
            hidden[0] = True
            self.others = [hidden]
            self.code = ["mul 0 2", "where 1 3 4"]
            self.constants = [0.5, -torch.inf]

    @property
    def attributes(self):
        return {
            "code": self.code,
            "constants": self.constants,
            "result": len(self.others) + len(self.constants) + len(self.code),
            "shape": list(self.scores),
            "safe": self.safe,
            **self.more,
        }

    def probabilities(self, q, k):
        scores = (q @ k + (0 if self.initial is None else self.initial.double())) * 0.5
        if self.safe:
            return torch.ops.aten._safe_softmax(scores.masked_fill(self.others[0], -torch.inf), -1)
        return (scores + (self.others[0].double() if self.others else 0)).softmax(-1)

    def forward(self, *, kept=False):
        outputs = [(self.dtype, (*self.scores[:2], self.v.shape[2])), None]
        if kept:
            outputs[1] = (self.dtype, self.scores)
        inputs = [self.q, self.k, self.v, self.initial, *self.others]
        return run_op("attention", inputs, outputs, **self.attributes)

    def backward(self, *, kept=None, wanted=(True, True, True)):
        shapes = [self.q.shape, self.k.shape, self.v.shape]
        outputs = [
            (self.dtype, shape) if is_wanted else None
            for shape, is_wanted in zip(shapes, wanted, strict=True)
        ]
        first = [None, self.q, self.k, self.initial] if kept is None else [kept, None, None, None]
        others = self.others if kept is None else []
        operands = [
            self.gradient if wanted[0] or wanted[1] else None,
            self.v.transpose(1, 2) if wanted[0] or wanted[1] else None,
            self.k.transpose(1, 2) if wanted[0] else None,
            self.q.transpose(1, 2) if wanted[1] else None,
            self.gradient if wanted[2] else None,
        ]
        # The gradient of what a mask replaces is zero: so are the probabilities.
        return run_op(
            "attention_grad",
            [*first, *operands, *others],
            outputs,
            **self.attributes,
            num_others=len(others),
            grad_code=["mul 0 1"],
            grad_constants=[0.5],
            grad_result=2,
            grad_shape=list(self.scores),
        )

    def expected(self):
        """Return the output and the gradients."""
        q, k, v = (t.double().requires_grad_() for t in (self.q, self.k, self.v))
        out = self.probabilities(q, k) @ v
        return out.detach(), torch.autograd.grad(out, [q, k, v], self.gradient.double())

    def assert_close(self, ours, expected):
        assert len(ours) == len(expected)
        for mine, theirs in zip(ours, expected, strict=True):
            bound = TOLERANCES[self.dtype] * max(1.0, theirs.abs().max().item())
            assert (mine.double() - theirs).abs().max() <= bound


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=dtype_name)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_float64(sizes, dtype, mask):
    case = Case(sizes, dtype, mask)
    out, gradients = case.expected()
    case.assert_close(case.forward(), [out])
    case.assert_close(case.backward(), gradients)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=dtype_name)
def test_layouts(dtype, layout):
    case = Case(SIZES[2], dtype, "none", layout)
    out, gradients = case.expected()
    case.assert_close(case.forward(), [out])
    case.assert_close(case.backward(), gradients)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=dtype_name)
def test_kept_probabilities_change_no_bit(dtype):
    case = Case(SIZES[2], dtype, "rows and columns")
    (out,) = case.forward()
    same, kept = case.forward(kept=True)
    assert torch.equal(out, same)
    case.assert_close([kept], [case.probabilities(case.q.double(), case.k.double())])
    for again, read in zip(case.backward(), case.backward(kept=kept), strict=True):
        assert torch.equal(again, read)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_name)
def test_the_bits_of_the_separate_ops(dtype):
    case = Case((4, 300, 131, 64, 65), dtype, "columns of each head")
    name = dtype_name(dtype)

    def product(a, b):
        return run_op("matmul", [a, b], [(dtype, (a.shape[0], a.shape[1], b.shape[2]))])[0]

    def mapped(inputs, code, constants, result):
        attributes = {"code": code, "constants": constants, "results": [result], "dtypes": [name]}
        return run_op("map", inputs, [(dtype, case.scores)], **attributes)[0]

    axis = {"axis": 2, "log": False, "dtype": name}
    logits = mapped([product(case.q, case.k), *case.others], case.code, case.constants, 4)
    (weights,) = run_op("softmax", [logits], [(dtype, case.scores)], **axis)
    out, kept = case.forward(kept=True)
    assert torch.equal(kept, weights)
    assert torch.equal(out, product(weights, case.v))

    for_weights = product(case.gradient, case.v.transpose(1, 2))
    (for_scores,) = run_op("softmax_grad", [for_weights, weights], [(dtype, case.scores)], **axis)
    for_scores = mapped([for_scores], ["mul 0 1"], [0.5], 2)
    for_q, for_k, for_v = case.backward()
    assert torch.equal(for_q, product(for_scores, case.k.transpose(1, 2)))
    assert torch.equal(for_k, product(case.q.transpose(1, 2), for_scores))
    assert torch.equal(for_v, product(weights.transpose(1, 2), case.gradient))


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True)], ids=str
)
def test_one_gradient_alone(wanted):
    case = Case(SIZES[0], torch.float32, "all")
    everything = case.backward()
    (only,) = case.backward(wanted=wanted)
    assert torch.equal(only, everything[wanted.index(True)])


@pytest.mark.parametrize("place", ["q", "k", "v"])
def test_nan_goes_where_it_belongs(place):
    case = Case(SIZES[0], torch.float32)
    getattr(case, place)[1, 0, 0] = torch.nan
    out, gradients = case.expected()
    (ours,) = case.forward()
    assert torch.equal(ours.isnan(), out.isnan())
    assert [g.isnan().any().item() for g in case.backward()] == [
        g.isnan().any().item() for g in gradients
    ]


def test_the_number_of_threads_changes_no_bit():
    case = Case((5, 300, 280, 64, 64), torch.float32)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            results.append([*case.forward(), *case.backward()])
        finally:
            torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
