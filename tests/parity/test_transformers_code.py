"""Code patterns of the transformers library that make tensors of known values in forward."""

import math

import pytest
import torch
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn import functional as F

import popsim_torch as poptorch
from tests.parity.compare import Pair, assert_close, quiet_options
from tests.parity.tolerances import ONE_PASS, TRAINED

BATCH, LENGTH, WIDTH, HEADS, WORDS, PAD = 2, 6, 16, 4, 20, 1


def make_causal_mask(shape, dtype, device, past_length=0):
    """Minus infinity above the diagonal, as OPT and BART make it."""
    batch, length = shape
    mask = torch.full(
        (length, length), torch.tensor(torch.finfo(dtype).min, device=device), device=device
    )
    condition = torch.arange(mask.size(-1), device=device)
    mask.masked_fill_(condition < (condition + 1).view(mask.size(-1), 1), 0)
    mask = mask.to(dtype)
    if past_length > 0:
        past = torch.zeros(length, past_length, dtype=dtype, device=device)
        mask = torch.cat([past, mask], dim=-1)
    return mask[None, None, :, :].expand(batch, 1, length, length + past_length)


def expand_mask(mask, dtype, length=None):
    """1 for what to look at becomes 0, 0 becomes minus infinity."""
    batch, source = mask.size()
    length = length if length is not None else source
    expanded = mask[:, None, None, :].expand(batch, 1, length, source).to(dtype)
    inverted = 1.0 - expanded
    return inverted.masked_fill(inverted.to(torch.bool), torch.finfo(dtype).min)


class LearnedPositions(nn.Embedding):
    """OPT's: positions count the words that are looked at, with an offset of 2."""

    def __init__(self):
        super().__init__(LENGTH + 2, WIDTH)

    def forward(self, mask):
        mask = mask.long()
        positions = (torch.cumsum(mask, dim=1).type_as(mask) * mask).long() - 1
        return super().forward(positions + 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, mask):
        batch, length, _ = x.size()
        shape = (batch, length, HEADS, WIDTH // HEADS)
        q, k, v = (layer(x).view(*shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = torch.matmul(q * (WIDTH // HEADS) ** -0.5, k.transpose(-1, -2)) + mask
        lowest = torch.tensor(torch.finfo(weights.dtype).min, device=weights.device)
        weights = torch.max(weights, lowest)
        if weights.dtype == torch.float16:
            weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(torch.float16)
        else:
            weights = F.softmax(weights, dim=-1)
        attended = torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, WIDTH)
        return self.out(attended)


class Decoder(nn.Module):
    """One layer of OPT with its head and loss."""

    def __init__(self, given_mask):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.positions = LearnedPositions()
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self._given_mask = given_mask

    def forward(self, words, labels):
        batch, length = words.size()
        if self._given_mask:
            mask = (words != PAD).long()
        else:
            mask = torch.ones(batch, length, device=words.device)
            if mask.shape[1] != length or not torch.all(mask == 1):
                raise ValueError("the mask does not fit")
        x = self.words(words)
        causal = make_causal_mask((batch, length), x.dtype, x.device)
        allowed = expand_mask(mask, x.dtype, length) + causal
        x = x + self.positions(mask)
        x = self.norm(x + self.attention(x, allowed))
        logits = self.head(x).contiguous()
        shifted = logits[..., :-1, :].contiguous().view(-1, WORDS)
        return logits, F.cross_entropy(shifted, labels[..., 1:].contiguous().view(-1))


@pytest.mark.parametrize("given_mask", [False, True], ids=["made mask", "given mask"])
def test_decoder_trains(given_mask):
    words = torch.randint(2, WORDS, (BATCH, LENGTH))
    words[0, -2:] = PAD
    pair = Pair(
        Decoder(given_mask),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        tolerance=TRAINED[torch.float32],
    )
    for _ in range(2):
        pair.step(words, words)
    pair.finish()


def test_decoder_in_half():
    model = Decoder(given_mask=True).eval().half()
    words = torch.randint(2, WORDS, (BATCH, LENGTH))
    with torch.no_grad():
        expected, _ = model(words, words)
    logits, _ = poptorch.inferenceModel(model, quiet_options())(words, words)
    assert_close(logits, expected, ONE_PASS[torch.float16])


class Runs(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def compare(function, *inputs):
    """Compare a function of tensors with eager PyTorch."""
    ours = poptorch.inferenceModel(Runs(function), quiet_options())(*inputs)
    assert_close(ours, function(*inputs).to(ours.dtype), ONE_PASS[torch.float32])


def test_tokens_shifted_to_the_right():
    def shift(words):
        shifted = words.new_zeros(words.shape)
        shifted[:, 1:] = words[:, :-1].clone()
        shifted[:, 0] = 2
        return shifted.masked_fill_(shifted == -100, PAD)

    compare(shift, torch.tensor([[5, -100, 7], [8, 9, -100]]))


def test_linear_biases():
    """ALiBi as BLOOM builds it, of the powers of a tensor."""

    def biases(mask):
        closest = 2 ** math.floor(math.log2(HEADS))
        base = torch.tensor(
            2 ** (-(2 ** -(math.log2(closest) - 3))), device=mask.device, dtype=torch.float32
        )
        powers = torch.arange(1, 1 + closest, device=mask.device, dtype=torch.int32)
        slopes = torch.pow(base, powers)
        positions = ((mask.cumsum(dim=-1) - 1) * mask)[:, None, :]
        return slopes[..., None] * positions

    compare(biases, torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]))


def test_buckets_of_relative_positions():
    """T5's, with logarithms and a minimum of tensors."""

    def buckets(x):
        positions = torch.arange(x.shape[1], dtype=torch.long, device=x.device)
        relative = (positions[None, :] - positions[:, None]).abs()
        exact = 4
        large = exact + (
            torch.log(relative.float() / exact) / math.log(16 / exact) * (8 - exact)
        ).to(torch.long)
        large = torch.min(large, torch.full_like(large, 7))
        return torch.where(relative < exact, relative, large) + x.sum().long()

    compare(buckets, torch.zeros(1, 12))


def test_mask_functions_under_vmap():
    """Masks of whole sequences from a function of single positions."""

    def causal(batch, head, query, key):
        return key <= query

    def padding(given):
        def function(batch, head, query, key):
            return given[batch, key]

        return function

    def both(*functions):
        def function(*positions):
            result = positions[0].new_ones((), dtype=torch.bool)
            for one in functions:
                result = result & one(*positions)
            return result

        return function

    def mask(given):
        function = both(causal, padding(given))
        batch, length = given.shape
        for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None)):
            function = torch.vmap(function, in_dims=dims, out_dims=0)
        function = torch.vmap(function, in_dims=(0, None, None, None), out_dims=0)
        positions = torch.arange(length)
        with TransformGetItemToIndex():
            return function(torch.arange(batch), torch.arange(1), positions, positions)

    compare(mask, torch.tensor([[True, True, True, False], [True, True, False, False]]))


def test_check_of_the_last_tokens_is_refused():
    """BART for classification counts the ends of sentences in its input."""

    def pooled(words, states):
        ends = words.eq(2)
        if len(torch.unique_consecutive(ends.sum(1))) > 1:
            raise ValueError("All examples must have the same number of <eos> tokens.")
        return states[ends, :]

    model = poptorch.inferenceModel(Runs(pooled), quiet_options())
    with pytest.raises(poptorch.Error, match=r"test_transformers_code.py:\d+ depends on values"):
        model(torch.tensor([[5, 2], [6, 2]]), torch.rand(2, 2, 3))
