"""Attention as PyTorch's modules and functions write it, against eager PyTorch: one op each way."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from popsim_torch.passes import fuse_attention
from tests.parity.compare import Loop, Pair, assert_close, quiet_options
from tests.parity.tolerances import ONE_PASS, TRAINED
from tests.sweeps import one_by_one

QUERIES, KEYS, WIDTH, HEADS = 110, 130, 40, 2
FUSED = ("= attention(", "= attention_grad(")
DTYPES = [torch.float32, torch.float16]


@pytest.fixture(params=[True, False], ids=["kept", "computed again"])
def probabilities(request, monkeypatch) -> None:
    """Probabilities that the gradient reads, or computes once more."""
    monkeypatch.setattr(fuse_attention, "_MAX_KEPT", 1 << 20 if request.param else 0)


def with_loss(out: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = out.mean(1)
    return logits, F.cross_entropy(logits, labels)


class Cross(nn.Module):
    """nn.MultiheadAttention over another sequence.

    Args:
        mask: ``float``, ``bool`` or None.
        padding: Whether some keys are hidden, others in each sample.
        weights: Whether the module is asked for the mean probabilities, which nobody reads.
    """

    def __init__(self, mask: str | None, *, padding: bool, weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.padding = padding
        self.weights = weights
        values = {"float": torch.randn(QUERIES, KEYS), "bool": torch.rand(QUERIES, KEYS) > 0.7}
        self.register_buffer("mask", values.get(mask or ""))

    def forward(self, x, y, seen, labels):
        hidden = torch.arange(KEYS, device=x.device) >= seen[:, None] if self.padding else None
        if hidden is not None and self.mask is not None and self.mask.is_floating_point():
            # PyTorch wants masks of one type.
            hidden = torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, -torch.inf)
        out, _ = self.attention(
            x,
            y,
            y,
            attn_mask=self.mask,
            key_padding_mask=hidden,
            need_weights=self.weights,
        )
        return with_loss(out, labels)


class Encoder(nn.Module):
    """Two encoder layers, on one stage or one each."""

    def __init__(self, *, causal: bool, stages: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 16, 0.0, "gelu", batch_first=True)
            for _ in range(2)
        )
        self.causal = causal
        self.stages = stages

    def forward(self, x, y, seen, labels):
        mask = None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(KEYS).to(y.device, y.dtype)
        for index, layer in enumerate(self.layers):
            if self.stages:
                poptorch.Block.start(f"layer{index}", ipu_id=index)
            y = layer(y, src_mask=mask, is_causal=self.causal)
        return with_loss(y, labels)


def make_inputs(samples: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(samples, QUERIES, WIDTH).to(dtype),
        torch.randn(samples, KEYS, WIDTH).to(dtype),
        torch.randint(KEYS // 2, KEYS, (samples,)),
        torch.randint(0, WIDTH, (samples,)),
    )


def check_training(
    model: nn.Module, dtype: torch.dtype, loop: Loop, num_layers: int = 1, rebuilt: int = 0
) -> None:
    def sgd(module: nn.Module) -> torch.optim.Optimizer:
        return poptorch.optim.SGD(module.parameters(), lr=0.05)

    pair = Pair(model.to(dtype), sgd, tolerance=TRAINED[dtype], loop=loop)
    for _ in range(2):
        pair.step(*make_inputs(2 * loop.micro_batches, dtype))
    pair.finish()
    program = pair.device.program(host=True)
    assert [program.count(kind) for kind in FUSED] == [num_layers + rebuilt, num_layers]


@pytest.mark.parametrize(
    ("given", "mask", "dtype"),
    one_by_one([(True, True), (False, True), (True, False)], ["float", None, "bool"], DTYPES),
)
def test_cross_attention(dtype, mask, given):
    padding, weights = given
    torch.manual_seed(2)
    check_training(Cross(mask, padding=padding, weights=weights), dtype, Loop())


@pytest.mark.usefixtures("probabilities")
@pytest.mark.parametrize(("causal", "stages"), [(False, False), (True, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encoder_layers(dtype, causal, stages):
    torch.manual_seed(2)
    loop = Loop(device_iterations=2, accumulation=3)
    # A pipeline computes what its first stage did again in the backward pass.
    model = Encoder(causal=causal, stages=stages)
    check_training(model, dtype, loop, num_layers=2, rebuilt=int(stages))


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inference(dtype, causal):
    class Model(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    torch.manual_seed(2)
    q = torch.randn(3, 2, QUERIES, 33)
    k = torch.randn(3, 2, KEYS, 33)
    v = torch.randn(3, 2, KEYS, 70)
    operands = [t.to(dtype) for t in (q, k, v)]
    model = poptorch.inferenceModel(Model(), quiet_options())
    out = model(*operands)
    expected = Model()(*(t.double() for t in operands))
    assert_close(out, expected.to(dtype), ONE_PASS[dtype])
    assert FUSED[0] in model.program(host=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_causal_attention(dtype):
    mask = (torch.randn(7, 7) + 3 * torch.eye(7)).to(dtype)
    if dtype == torch.bool:
        mask = mask & (torch.rand(7, 7) > 0.4) | torch.eye(7, dtype=torch.bool)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, mask):
            x = self.fc(x)
            out = F.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=True)
            return out, poptorch.identity_loss(out.square().sum(), "none")

    ours = Masked()
    eager = copy.deepcopy(ours)
    x = torch.randn(2, 2, 7, 8)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    expected, loss = eager(x, mask)
    loss.backward()
    optimizer.step()
    training = poptorch.trainingModel(
        ours, quiet_options(), poptorch.optim.SGD(ours.parameters(), lr=0.1)
    )
    out, _ = training(x, mask)
    assert_close(out, expected.detach(), ONE_PASS[torch.float32], "out")
    training.copyWeightsToHost()
    assert_close(ours.fc.weight, eager.fc.weight, TRAINED[torch.float32], "weight")
    with pytest.raises(RuntimeError, match="attn_mask should not be set"):  # as in eager PyTorch
        poptorch.inferenceModel(ours, quiet_options())(x[0], mask)
