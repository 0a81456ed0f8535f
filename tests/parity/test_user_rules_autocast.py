"""``torch.autocast`` with float16: the dtypes and values of eager PyTorch on the CPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import popsim_torch as poptorch
from popsim_torch.trace.autocast_policies import Policy, policies_of
from tests.options import make_options
from tests.parity.compare import quiet_options
from tests.parity.tolerances import TRAINED
from tests.parity.user_rules import Net, batches, compare_training, momentum, refusal

HALF = torch.float16


def cast(device="cpu", **settings):
    return torch.autocast(device, **{"dtype": HALF, **settings})


def within(function):
    """Return a program whose whole forward is in one region."""

    def run(m, x):
        with cast():
            return function(m, x)

    return run


def nested(m, x):
    with cast():
        y = m.fc(x)
        with cast(enabled=False):
            z = m.last(y.float())
            with cast():
                inner = m.last(y)
        w = m.fc(z.repeat(1, 2)[:, :4])
    return y, z, inner, w, m.fc(x)


def one_weight_twice(m, x):
    """The cast of the weight is cached: one gradient for both uses."""
    with cast():
        return m.fc(m.fc(x).tanh())


def without_cache(m, x):
    with cast(cache_enabled=False):
        return m.fc(m.fc(x).tanh())


def weight_changed_inside(m, x):
    """As in eager PyTorch, the region keeps the cast of the weight from before the change."""
    with cast():
        y = m.fc(x)
        with torch.no_grad():
            m.fc.weight.mul_(0.5)
        return y, m.fc(x)


def no_grad_first(m, x):
    with cast(cache_enabled=False):
        with torch.no_grad():
            target = m.fc(x)
        return F.mse_loss(m.fc(x).float(), target.float() * 0.5)


class Squared(torch.autograd.Function):
    """Written for autocast: it runs in the dtype of the region, forward and backward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.enabled = torch.is_autocast_enabled("cpu")
        return x.mm(w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        assert ctx.enabled
        assert torch.is_autocast_enabled("cpu")
        result = gradient.mm(w.t())
        assert result.dtype == HALF
        return result.float(), x.t().mm(gradient).float() * 2


class InFloat32(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        assert x.dtype == w.dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
        ctx.save_for_backward(x, w)
        return x.mm(w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient.mm(w.t()), x.t().mm(gradient) * 2


@torch.autocast("cpu", dtype=HALF)
def decorated(m, x):
    return m.last(m.fc(x).relu())


def settings(m, x):
    with cast():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == HALF
        y = m.fc(x)
        with cast(enabled=False):
            assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    return y


def convolution(m):
    m.conv = nn.Conv1d(2, 3, 3, padding=1)


def attention(m):
    m.heads = nn.MultiheadAttention(4, 2, batch_first=True)


def norms(m):
    m.norm, m.batch, m.group = nn.LayerNorm(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4)


def encoder(m):
    m.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


LABELS = torch.tensor([0, 1, 2, 1, 0])

PROGRAMS = {
    "linear": (within(lambda m, x: m.fc(x)), None),
    "perceptron": (within(lambda m, x: m.last(m.fc(x).relu())), None),
    "products": (
        within(
            lambda m, x: (
                x @ m.fc.weight,
                torch.mm(x, m.fc.weight),
                torch.addmm(m.fc.bias, x, m.fc.weight),
                torch.einsum("bi,oi->bo", x, m.fc.weight),
                torch.bmm(x[None], m.fc.weight[None]),
                torch.baddbmm(x[None], x[None], m.fc.weight[None]),
                x.matmul(m.scale),
            )
        ),
        None,
    ),
    "convolution": (within(lambda m, x: m.conv(m.fc(x).reshape(5, 2, 2))), convolution),
    "prelu": (within(lambda m, x: F.prelu(m.fc(x), m.scale[:1])), None),
    "what is not listed": (
        within(lambda m, x: (m.fc(x) + x, m.fc(x) * 2, m.fc(x).tanh(), m.fc(x).softmax(1))),
        None,
    ),
    "norms": (
        within(lambda m, x: (m.norm(m.fc(x)), m.batch(m.fc(x).float()), m.group(x))),
        norms,
    ),
    "attention": (within(lambda m, x: m.heads(*[m.fc(x)[None]] * 3)[0]), attention),
    "scaled_dot_product_attention": (
        within(lambda m, x: F.scaled_dot_product_attention(*[m.fc(x)[None]] * 3)),
        None,
    ),
    "transformer": (within(lambda m, x: m.encoder(x[None])), encoder),
    "losses run in float32": (
        within(
            lambda m, x: (
                F.mse_loss(m.fc(x), x),
                F.l1_loss(m.fc(x), x),
                F.cross_entropy(m.last(x), LABELS),
                F.nll_loss(m.last(x).float().log_softmax(1), LABELS),
                F.smooth_l1_loss(m.fc(x), x),
                F.kl_div(m.fc(x).log_softmax(1), x.softmax(1), reduction="batchmean"),
                F.binary_cross_entropy_with_logits(m.fc(x), (x > 0).float()),
            )
        ),
        None,
    ),
    "binary_cross_entropy": (
        within(lambda m, x: F.binary_cross_entropy(m.fc(x).sigmoid(), (x > 0).float())),
        None,
    ),
    "other operators in float32": (
        within(
            lambda m, x: (
                m.fc(x).prod(1),
                torch.cdist(m.fc(x), x),
                torch.trace(m.fc(x)[:4]),
                F.pad(m.fc(x)[None], (1, 1), mode="reflect"),
            )
        ),
        None,
    ),
    "promotion": (
        within(lambda m, x: (torch.cat([m.fc(x), x]), torch.stack([m.fc(x), m.fc(x)]))),
        None,
    ),
    "nested": (nested, None),
    "one weight twice": (one_weight_twice, None),
    "without the cache": (without_cache, None),
    "a weight changed inside": (weight_changed_inside, None),
    "no_grad first": (no_grad_first, None),
    "decorated": (decorated, None),
    "settings": (settings, None),
    "custom_fwd": (within(lambda m, x: Squared.apply(m.fc(x), m.fc.weight)), None),
    "custom_fwd with a cast": (within(lambda m, x: InFloat32.apply(m.fc(x), m.fc.weight)), None),
    "checkpoint": (
        within(lambda m, x: checkpoint(lambda y: m.last(m.fc(y).relu()), x, use_reentrant=False)),
        None,
    ),
    "half inputs": (within(lambda m, x: m.fc(x.half()) * m.scale), None),
    "in place": (within(lambda m, x: m.fc(x).mul_(2).add_(1)), None),
    "under vmap": (within(lambda m, x: torch.vmap(m.fc)(x)), None),
    "gradient inside": (
        within(
            lambda m, x: (
                torch.func.grad(lambda y: m.last(m.fc(y).tanh()).float().sum())(x) * m.scale
            )
        ),
        None,
    ),
    "float64 and integers": (
        within(lambda m, x: (m.fc(x), torch.arange(4).reshape(2, 2) @ torch.ones(2, 2).long())),
        None,
    ),
}


@pytest.mark.parametrize(("program", "prepare"), PROGRAMS.values(), ids=PROGRAMS)
def test_it_trains_as_in_eager_pytorch(program, prepare):
    compare_training(program, prepare, TRAINED[HALF])


def results_of(function, prepare=None):
    return poptorch.inferenceModel(Net(function, prepare), quiet_options())(batches()[0])[1:]


@pytest.mark.parametrize("device", ["cuda", "ipu"])
def test_other_devices_have_the_lists_of_cuda(device):
    def function(m, x):
        with cast(device):
            y = m.fc(x)
            assert torch.is_autocast_enabled(device)
            return (
                y,
                y.softmax(1),
                y.exp(),
                y.sum(1),
                y.cumsum(0),
                y**2,
                y.norm(),
                y.tanh(),
                F.layer_norm(y, (4,)),
                torch.addcmul(x, y, y),
                F.mse_loss(y, x),
                F.softmax(y, 1, dtype=torch.float16),
            )

    def plain(m, x):
        y = F.linear(x.half(), m.fc.weight.half(), m.fc.bias.half())
        z = y.float()
        return (
            *(y, z.softmax(1), z.exp(), z.sum(1), z.cumsum(0), z**2, z.norm(), y.tanh()),
            *(F.layer_norm(z, (4,)), torch.addcmul(x, z, z), F.mse_loss(z, x), y.softmax(1)),
        )

    for ours, expected in zip(results_of(function), results_of(plain), strict=True):
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


def test_a_loss_that_cuda_refuses():
    def function(m, x):
        with cast("cuda"):
            return F.binary_cross_entropy(m.fc(x).sigmoid(), (x > 0).float())

    with pytest.raises(poptorch.Error, match="are unsafe to autocast"):
        results_of(function)


def test_bfloat16_computes_in_float32_and_says_so_once(caplog):
    def function(m, x):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = m.fc(x)
                assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        return x

    caplog.set_level("WARNING", logger="poptorch::python")
    (ours,) = results_of(function)
    (expected,) = results_of(lambda m, x: m.fc(m.fc(x)))
    assert torch.equal(ours, expected)
    told = [one for one in caplog.messages if "holds bfloat16 as float32" in one]
    assert len(told) == 1
    assert "test_user_rules_autocast.py" in told[0]


def test_a_recurrent_layer_runs_in_the_lower_precision():
    def prepare(m):
        m.lstm = nn.LSTM(4, 4)

    y, h = results_of(within(lambda m, x: (lambda r: (r[0], r[1][0]))(m.lstm(x[None]))), prepare)
    expected, state = results_of(lambda m, x: (lambda r: (r[0], r[1][0]))(m.lstm(x[None])), prepare)
    assert y.dtype == h.dtype == HALF
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(h.float(), state, rtol=1e-2, atol=1e-2)


def test_a_serialized_product():
    def function(m, x):
        with cast("ipu"):
            mode = poptorch.MatMulSerializationMode.OutputChannels
            return poptorch.serializedMatMul(x, m.fc.weight, mode, factor=2)

    (ours,) = results_of(function)
    (expected,) = results_of(lambda m, x: x.half() @ m.fc.weight.half())
    assert ours.dtype == HALF
    torch.testing.assert_close(ours, expected)


def test_the_body_of_a_loop():
    def function(m, x):
        with cast():
            y = m.fc(x).float()
            (y,) = poptorch.for_loop(2, lambda z: [m.fc(z).float() * 0.5], [y])
            return y, m.fc(y)

    def unrolled(m, x):
        with cast():
            y = m.fc(x).float()
            for _ in range(2):
                y = m.fc(y).float() * 0.5
            return y, m.fc(y)

    twin, model = Net(unrolled), Net(function)
    expected = twin(batches()[0])
    expected[0].backward()
    options = make_options()
    options.anchorTensor("gradient", "Gradient___fc.weight")
    executor = poptorch.trainingModel(model, options, momentum(model))
    ours = executor(batches()[0])
    for mine, other in zip(ours, expected, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other.detach(), rtol=2e-2, atol=1e-2)
    gradient = executor.getAnchoredTensor("gradient")
    torch.testing.assert_close(gradient, twin.fc.weight.grad, rtol=2e-2, atol=2e-2)


def test_a_region_ends_with_an_exception():
    def function(m, x):
        with cast():
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        results_of(function)
    assert not torch.is_autocast_enabled("ipu")
    (ours,) = results_of(lambda m, x: m.fc(x))
    assert ours.dtype == torch.float32


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_listed_operator_has_a_policy(device):
    policies = policies_of(device)
    assert policies["linear"] == policies["scaled_dot_product_attention"] == Policy.LOWER
    assert policies["mse_loss"] == Policy.FLOAT32
    assert len(policies) > 100


def test_a_type_error_reads_as_in_eager_pytorch():
    def function(m, x):
        with cast():
            return m.fc(x[:, :3])

    eager, ours = refusal(function)
    assert "mat1 and mat2 shapes cannot be multiplied" in eager
    assert eager.split("\n")[0] in ours
