"""Fusing the ops of attention and of its gradient."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from popsim_torch.ir import Graph, Op, Phase, Tensor, TensorKind
from popsim_torch.passes import fuse_attention as module
from popsim_torch.passes import pipeline
from popsim_torch.passes.fuse_attention import fuse_attention
from tests.sweeps import one_by_one
from tests.unit.passes.sketch import verify_sketch

F32 = torch.float32
BATCH, ROWS, COLUMNS, DEPTH = 6, 86, 96, 32
SCORES = (BATCH, ROWS, COLUMNS)
LAST = {"axis": 2, "log": False, "dtype": "float32"}


class Program:
    """Attention in ops: scores, scaled by a half and masked, softmax, product; its gradient."""

    def __init__(self, rows: int = ROWS, *, stage: int = 0, backward_stage: int = 0) -> None:
        self.graph = Graph()
        self.rows = rows
        shape = (BATCH, rows, COLUMNS)
        place = {"phase": Phase.FORWARD}
        self.q = self.input(rows, DEPTH)
        self.k = self.input(DEPTH, COLUMNS)
        self.v = self.input(COLUMNS, DEPTH)
        self.mask = self.graph.add_tensor(TensorKind.INPUT, torch.bool, (rows, COLUMNS))
        self.scores, self.logits, self.weights = (self.value(*shape[1:]) for _ in range(3))
        self.out = self.value(rows, DEPTH)
        add = self.graph.add_op
        self.forward = [
            add("matmul", [self.q, self.k], [self.scores], {}, **place),
            add(
                "map",
                [self.mask, self.scores],
                [self.logits],
                {"code": ["mul 1 2", "where 0 3 4"], "constants": [-1e9, 0.5], "results": [5]},
                **place,
                stage=stage,
            ),
            add("softmax", [self.logits], [self.weights], LAST, **place, stage=stage),
            add("matmul", [self.weights, self.v], [self.out], {}, **place, stage=stage),
        ]
        self.anchor(self.out, Phase.FORWARD, stage)
        place = {"phase": Phase.BACKWARD, "stage": backward_stage}
        self.gradient = self.input(rows, DEPTH)
        self.for_weights, self.for_logits, self.for_scores = (
            self.value(*shape[1:]) for _ in range(3)
        )
        self.for_q, self.for_k, self.for_v = (
            self.value(*t.shape[1:]) for t in (self.q, self.k, self.v)
        )
        transposed = self.transposed
        self.backward = [
            add("matmul", [transposed(self.weights), self.gradient], [self.for_v], {}, **place),
            add("matmul", [self.gradient, transposed(self.v)], [self.for_weights], {}, **place),
            add("softmax_grad", [self.for_weights, self.weights], [self.for_logits], LAST, **place),
            add(
                "map",
                [self.for_logits],
                [self.for_scores],
                {"code": ["mul 0 1"], "constants": [0.5], "results": [2]},
                **place,
            ),
            add("matmul", [transposed(self.q), self.for_scores], [self.for_k], {}, **place),
            add("matmul", [self.for_scores, transposed(self.k)], [self.for_q], {}, **place),
        ]
        for result in (self.for_q, self.for_k, self.for_v):
            self.anchor(result, Phase.BACKWARD, backward_stage)

    def input(self, rows: int, columns: int) -> Tensor:
        return self.graph.add_tensor(TensorKind.INPUT, F32, (BATCH, rows, columns))

    def value(self, rows: int, columns: int) -> Tensor:
        return self.graph.add_tensor(TensorKind.VALUE, F32, (BATCH, rows, columns))

    def transposed(self, tensor: Tensor) -> Tensor:
        batch, rows, columns = tensor.shape
        return self.graph.add_view(tensor, (batch, columns, rows), (rows * columns, 1, columns), 0)

    def anchor(self, tensor: Tensor, phase: Phase, stage: int = 0) -> None:
        self.graph.add_op("anchor", [tensor], [], {}, phase=phase, stage=stage)

    def drop(self, op: Op, *results: Tensor) -> None:
        """Take out an op and the anchors of its results."""
        ids = {tensor.id for tensor in results}
        self.graph.ops = [
            o
            for o in self.graph.ops
            if o is not op and not (o.kind == "anchor" and ids & {*o.inputs})
        ]

    def kinds(self) -> list[str]:
        return [op.kind for op in self.graph.ops if op.kind != "anchor"]


@pytest.fixture(autouse=True)
def no_kept_probabilities(monkeypatch) -> None:
    monkeypatch.setattr(module, "_MAX_KEPT", 0)


def test_forward_and_backward_become_one_op_each() -> None:
    program = Program()
    assert fuse_attention(program.graph) == 8
    verify_sketch(program.graph)
    forward, backward = (op for op in program.graph.ops if op.kind != "anchor")
    p = program
    assert forward.kind == "attention"
    assert forward.inputs == [p.q.id, p.k.id, p.v.id, -1, p.mask.id]
    assert forward.outputs == [p.out.id, -1]
    assert forward.attributes == {
        "code": ["mul 0 2", "where 1 3 4"],
        "constants": [-1e9, 0.5],
        "result": 5,
        "shape": list(SCORES),
        "safe": False,
    }
    assert backward.kind == "attention_grad"
    assert backward.inputs[:5] == [-1, p.q.id, p.k.id, -1, p.gradient.id]
    assert backward.inputs[8:] == [p.gradient.id, p.mask.id]
    assert backward.outputs == [p.for_q.id, p.for_k.id, p.for_v.id]
    assert backward.attributes["grad_code"] == ["mul 0 1"]
    assert backward.attributes["num_others"] == 1
    assert fuse_attention(program.graph) == 0


def test_few_probabilities_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(module, "_MAX_KEPT", BATCH * ROWS * COLUMNS)
    program = Program()
    assert fuse_attention(program.graph) == 8
    verify_sketch(program.graph)
    forward, backward = (op for op in program.graph.ops if op.kind != "anchor")
    assert forward.outputs == [program.out.id, program.weights.id]
    assert backward.inputs[:4] == [program.weights.id, -1, -1, -1]
    assert backward.inputs[8:] == [program.gradient.id]
    assert backward.attributes["code"] == []


def test_inference() -> None:
    program = Program()
    for op in program.backward:
        program.drop(op, program.for_q, program.for_k, program.for_v)
    assert fuse_attention(program.graph) == 3
    assert program.kinds() == ["attention"]


@pytest.mark.parametrize(("index", "name"), [(5, "for_q"), (4, "for_k"), (0, "for_v")])
def test_a_gradient_that_nobody_reads(index, name) -> None:
    program = Program()
    unread = getattr(program, name)
    program.drop(program.backward[index], unread)
    assert fuse_attention(program.graph) == 7
    verify_sketch(program.graph)
    assert program.kinds() == ["attention", "attention_grad"]
    (backward,) = (op for op in program.graph.ops if op.kind == "attention_grad")
    assert backward.outputs.count(-1) == 1
    assert unread.id not in backward.outputs


def test_the_gradient_of_the_values_alone() -> None:
    program = Program()
    for op in program.backward[1:]:
        program.drop(op, program.for_q, program.for_k)
    assert fuse_attention(program.graph) == 3
    verify_sketch(program.graph)
    (backward,) = (op for op in program.graph.ops if op.kind == "attention_grad")
    assert backward.outputs == [-1, -1, program.for_v.id]
    assert backward.inputs[4:8] == [-1] * 4


@pytest.mark.parametrize(
    "name", ["scores", "logits", "weights", "for_weights", "for_logits", "for_scores"]
)
def test_an_inner_tensor_with_another_reader_stays(name) -> None:
    program = Program()
    before = program.kinds()
    phase = Phase.BACKWARD if name.startswith("for_") else Phase.FORWARD
    program.anchor(getattr(program, name), phase)
    assert fuse_attention(program.graph) == 0
    assert program.kinds() == before


@pytest.mark.parametrize("name", ["scores", "logits", "weights", "for_logits", "for_scores"])
def test_an_inner_tensor_that_is_kept_stays(name) -> None:
    """An anchor in the mode Final turns its tensor into a variable."""
    program = Program()
    getattr(program, name).kind = TensorKind.VARIABLE
    assert fuse_attention(program.graph) == 0


def test_stages_are_not_joined() -> None:
    assert fuse_attention(Program(stage=1).graph) == 0


def test_the_gradient_may_be_on_another_stage() -> None:
    program = Program(backward_stage=1)
    assert fuse_attention(program.graph) == 8
    assert [op.stage for op in program.graph.ops if op.kind != "anchor"] == [0, 1]


@pytest.mark.parametrize(
    ("op", "change"),
    [
        (2, {"log": True}),
        (2, {"axis": 1}),
        (0, {"alpha": 2.0}),
        (3, {"activation": "relu"}),
    ],
    ids=str,
)
def test_other_ops_stay(op, change) -> None:
    program = Program()
    program.forward[op].attributes.update(change)
    assert fuse_attention(program.graph) == 0


def test_small_matrices_stay() -> None:
    """Products of a batch add up in another order than single products."""
    assert fuse_attention(Program(rows=85).graph) == 0
    assert fuse_attention(Program(rows=86).graph) == 8


def test_the_library_says_which_matrices_are_small(monkeypatch) -> None:
    work = ROWS * COLUMNS * DEPTH
    monkeypatch.setattr(module, "min_cut_work", lambda: work + 1)
    assert fuse_attention(Program().graph) == 0
    monkeypatch.setattr(module, "min_cut_work", lambda: work)
    assert fuse_attention(Program().graph) > 0


def test_operands_that_change_stay() -> None:
    program = Program()
    program.q.kind = TensorKind.VARIABLE
    program.graph.add_op("copy", [program.gradient], [program.q], {}, phase=Phase.BACKWARD)
    assert fuse_attention(program.graph) == 0


def test_a_repeated_operand_stays() -> None:
    program = Program()
    one = program.graph.add_tensor(TensorKind.INPUT, F32, (DEPTH, COLUMNS))
    repeated = program.graph.add_view(one, (BATCH, DEPTH, COLUMNS), (0, COLUMNS, 1), 0)
    program.forward[0].inputs[1] = repeated.id
    assert fuse_attention(program.graph) == 0


# --- In models ---


class Attention(nn.Module):
    """Projections and attention of a layer.

    Args:
        kind: The way the attention is written.
        mask: A float mask or a boolean one, True where a key is visible.
        dropout: The dropout rate after the softmax.
    """

    def __init__(self, kind: str, mask: torch.Tensor | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(66, 66) for _ in range(4))
        self.softmax = nn.Softmax(dim=-1)
        self.kind = kind
        self.dropout = dropout
        self.register_buffer("mask", mask)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.kind != "by hand":
            causal = self.kind == "causal"
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=self.mask, is_causal=causal, dropout_p=self.dropout
            )
        scores = q @ k.transpose(-1, -2) * 33**-0.5
        if self.mask is not None and self.mask.dtype == torch.bool:
            scores = scores.masked_fill(~self.mask, -torch.inf)
        elif self.mask is not None:
            scores = scores + self.mask
        return self.softmax(scores) @ v

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (
            layer(source).unflatten(-1, (2, 33)).transpose(1, 2)
            for layer, source in ((self.q, x), (self.k, y), (self.v, y))
        )
        out = self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return out, poptorch.identity_loss((out * x).float().square(), "mean")


KINDS = ["plain", "causal", "by hand"]
MASKS = {
    "none": lambda: None,
    "bool": lambda: torch.rand(77, 131) > 0.3,
    "float": lambda: torch.randn(2, 1, 77, 131),
    "keys": lambda: (torch.arange(131) < torch.tensor([[100], [131]]))[:, None, None],
}
CASES = [(kind, mask) for kind in KINDS for mask in MASKS if kind != "causal" or mask == "none"]


def make_model(kind: str, mask: str, dtype: torch.dtype, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    values = MASKS[mask]()
    if values is not None and values.is_floating_point():
        values = values.to(dtype)
    return Attention(kind, values, dropout).to(dtype)


def train(net: nn.Module, *anchors: str, batch: int = 2) -> tuple[dict[str, torch.Tensor], str]:
    """Return the weights after three updates, and the program."""
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    for name in anchors:
        options.anchorTensor(name, name)
    dtype = next(net.parameters()).dtype
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(batch, n, 66, generator=generator).to(dtype) for n in (77, 131))
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(3):
        model(x, y)
    program = model.program(host=True)
    model.copyWeightsToHost()
    return {name: p.detach().clone() for name, p in net.named_parameters()}, program


@pytest.mark.parametrize(
    ("case", "dtype", "kept"), one_by_one(CASES, [torch.float32, torch.float16], [False, True])
)
def test_fusing_changes_no_bit(case, dtype, kept, monkeypatch) -> None:
    kind, mask = case
    monkeypatch.setattr(module, "_MAX_KEPT", 1 << 20 if kept else 0)
    fused, program = train(make_model(kind, mask, dtype))
    assert "= attention(" in program
    assert "= attention_grad(" in program
    assert "softmax(" not in program
    others = tuple(run for run in pipeline.HOST_PASSES if run is not fuse_attention)
    monkeypatch.setattr(pipeline, "HOST_PASSES", others)
    separate, program = train(make_model(kind, mask, dtype))
    assert "= attention" not in program
    assert "softmax_grad(" in program
    assert all(torch.equal(fused[name], separate[name]) for name in fused)
    assert all(torch.isfinite(value).all() for value in fused.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("anchor", ["softmax/Softmax:0", "Gradient___softmax/Softmax:0"])
def test_an_anchor_changes_no_bit(anchor, dtype) -> None:
    fused, program = train(make_model("by hand", "float", dtype))
    assert "= attention(" in program
    separate, program = train(make_model("by hand", "float", dtype), anchor)
    assert "= attention(" not in program
    assert all(torch.equal(fused[name], separate[name]) for name in fused)


def test_dropout_stays() -> None:
    _, program = train(make_model("plain", "none", F32, dropout=0.5))
    assert "= softmax(" in program
    assert "= attention(" not in program
