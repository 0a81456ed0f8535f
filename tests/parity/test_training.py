"""Ten updates of every model against eager PyTorch: losses, gradients, weights, statistics."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import popsim_torch as poptorch
from popsim_torch.enums import OutputMode, ReductionType
from tests.parity.compare import EagerTrainer, Loop, Pair, assert_close, quiet_options
from tests.parity.models import CASES
from tests.parity.tolerances import TRAINED
from tests.sweeps import one_by_one

UPDATES = 10
BATCH = 4
LOOPS = [
    Loop(1, 1, ReductionType.Mean),
    Loop(3, 1, ReductionType.Sum),
    Loop(1, 3, ReductionType.Sum),
    Loop(3, 3, ReductionType.Mean),
]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return poptorch.optim.SGD(model.parameters(), lr=0.05)


def make_pair(case, dtype: torch.dtype, loop: Loop, *, smooth: bool = True) -> Pair:
    # Rounding makes ReLU and max pooling take the other branch now and then: over many updates even
    # that of float32, which differs from eager PyTorch's in the order of sums.
    model = case.make(smooth=smooth).to(dtype)
    return Pair(model, sgd, tolerance=TRAINED[dtype], loop=loop)


def make_inputs(case, dtype: torch.dtype, loop: Loop) -> tuple[torch.Tensor, ...]:
    inputs = case.inputs(BATCH * loop.micro_batches)
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def num_calls(loop: Loop) -> int:
    return -(-UPDATES // loop.device_iterations)


@pytest.mark.parametrize(
    ("name", "dtype", "loop"), one_by_one(CASES, [torch.float32, torch.float16], LOOPS)
)
def test_ten_updates(name, dtype, loop):
    case = CASES[name]
    pair = make_pair(case, dtype, loop)
    for _ in range(num_calls(loop)):
        pair.step(*make_inputs(case, dtype, loop))
    pair.finish()


@pytest.mark.parametrize("loop", [Loop(1, 2), Loop(2, 1)], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_updates_with_kinks(case, loop):
    pair = make_pair(case, torch.float32, loop, smooth=False)
    for _ in range(2 // loop.device_iterations):
        pair.step(*make_inputs(case, torch.float32, loop))
    pair.finish()


@pytest.mark.parametrize("loop", [Loop(1, 3), Loop(3, 3, ReductionType.Sum)], ids=str)
def test_other_reductions_on_the_mlp(loop):
    pair = make_pair(CASES["mlp"], torch.float32, loop)
    for _ in range(num_calls(loop)):
        pair.step(*make_inputs(CASES["mlp"], torch.float32, loop))
    pair.finish()


OUTPUT_MODES = {
    "all": (OutputMode.All, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
    "final": (OutputMode.Final, 1, [7]),
    "every second": (OutputMode.EveryN, 2, [2, 3, 6, 7]),
}


@pytest.mark.parametrize(("mode", "period", "kept"), OUTPUT_MODES.values(), ids=OUTPUT_MODES)
def test_output_modes_pick_micro_batches(mode, period, kept):
    loop = Loop(4, 2)
    case = CASES["cnn"]
    model = case.make()
    twin = copy.deepcopy(model)
    options = loop.options()
    options.outputMode(mode, period)
    options.anchorTensor("gradient", "Gradient___fc.bias")
    device = poptorch.trainingModel(model, options, sgd(model))
    eager = EagerTrainer(twin, sgd(twin), loop)
    for _ in range(2):
        inputs = case.inputs(BATCH * loop.micro_batches)
        output, loss = device(*inputs)
        call = eager(*inputs)
        tolerance = TRAINED[torch.float32]
        assert_close(output, torch.cat([call.outputs[i] for i in kept]), tolerance)
        losses = torch.stack([call.losses[i] for i in kept])
        assert_close(loss, losses if len(kept) > 1 else losses[0], tolerance)
        expected = torch.cat([call.gradients[i]["fc.bias"] for i in kept])
        assert_close(device.getAnchoredTensor("gradient"), expected, tolerance)


def test_sum_mode_adds_micro_batches_up():
    loop = Loop(2, 3)
    case = CASES["mlp"]
    model = case.make()
    twin = copy.deepcopy(model)
    options = loop.options()
    options.outputMode(OutputMode.Sum)
    options.anchorTensor("gradient", "Gradient___layers.0.weight")
    device = poptorch.trainingModel(model, options, sgd(model))
    eager = EagerTrainer(twin, sgd(twin), loop)
    inputs = case.inputs(BATCH * loop.micro_batches)
    output, loss = device(*inputs)
    call = eager(*inputs)
    tolerance = TRAINED[torch.float32]
    assert_close(output, sum(call.outputs), tolerance)
    assert_close(loss, sum(call.losses), tolerance)
    expected = sum(g["layers.0.weight"] for g in call.gradients)
    assert_close(device.getAnchoredTensor("gradient"), expected, tolerance)


@pytest.mark.parametrize("name", ["cnn", "resnet"])
def test_statistics_count_every_micro_batch(name):
    case = CASES[name]
    model = case.make()
    twin = copy.deepcopy(model)
    loop = Loop(2, 2)
    device = poptorch.trainingModel(model, loop.options(), sgd(model))
    eager = EagerTrainer(twin, sgd(twin), loop)
    inputs = case.inputs(BATCH * 4)
    device(*inputs)
    eager(*inputs)
    device.copyWeightsToHost()
    for (key, ours), expected in zip(model.named_buffers(), twin.buffers(), strict=True):
        if key.endswith("num_batches_tracked"):
            assert ours == 0  # a constant on the device
        else:
            assert_close(ours, expected, TRAINED[torch.float32], key)


def test_padding_of_an_embedding_is_not_trained():
    case = CASES["embedding"]
    model = case.make()
    before = model.words.weight.detach().clone()
    device = poptorch.trainingModel(model, Loop().options(), sgd(model))
    for _ in range(3):
        device(*case.inputs(BATCH))
    after = model.words.weight.detach()
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1:], before[1:])


def test_two_wrappers_of_one_model_in_turn():
    case = CASES["cnn"]
    model = case.make()
    twin = copy.deepcopy(model)
    eager = EagerTrainer(twin, sgd(twin), Loop())
    for batch in (4, 2):
        device = poptorch.trainingModel(model, Loop().options(), sgd(model))
        for _ in range(2):
            inputs = case.inputs(batch)
            _, loss = device(*inputs)
            assert_close(loss, eager(*inputs).losses[0], TRAINED[torch.float32])
        device.destroy()
    ours = model.state_dict()
    for name, expected in twin.state_dict().items():
        if expected.is_floating_point():
            assert_close(ours[name], expected, TRAINED[torch.float32], name)


# --- Pipelines -------------------------------------------------------------------------------

# Modules that later stages begin at, and a parameter of the first one.
STAGES = {
    "cnn": (["norm1", "conv2", "fc"], "conv1.weight"),
    "resnet": (["layer1", "layer2", "fc"], "stem.0.weight"),
    "transformer": (["encoder.layers.1"], "position"),
}


@pytest.mark.parametrize("strategy", [poptorch.PipelinedExecution, poptorch.ShardedExecution])
@pytest.mark.parametrize("name", STAGES)
def test_models_in_stages(name, strategy):
    case = CASES[name]
    model = case.make()
    twin = copy.deepcopy(model)
    begins, first = STAGES[name]
    for stage, path in enumerate(begins, start=1):
        parent, _, child = path.rpartition(".")
        block = poptorch.BeginBlock(model.get_submodule(path), ipu_id=stage)
        setattr(model.get_submodule(parent), child, block)
    loop = Loop(2, 8)
    options = loop.options()
    options.setExecutionStrategy(strategy())
    options.outputMode(OutputMode.All)
    options.anchorTensor("gradient", f"Gradient___{first}")
    device = poptorch.trainingModel(model, options, sgd(model))
    eager = EagerTrainer(twin, sgd(twin), loop)
    tolerance = TRAINED[torch.float32]
    for _ in range(UPDATES // 2):
        inputs = case.inputs(2 * loop.micro_batches)
        output, loss = device(*inputs)
        call = eager(*inputs)
        assert_close(output, torch.cat(call.outputs), tolerance)
        assert_close(loss, torch.stack(call.losses), tolerance)
        expected = torch.cat([g[first] for g in call.gradients])
        assert_close(device.getAnchoredTensor("gradient"), expected, tolerance)
    ours = model.state_dict()
    for key, expected in twin.state_dict().items():
        if expected.is_floating_point():
            assert_close(ours[key], expected, tolerance, key)


# --- Ways to write forward -------------------------------------------------------------------


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, _unused):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y, None


def gradient_penalty(y, weight):
    (gradient,) = torch.autograd.grad(y.sin().sum(), y, create_graph=True)
    return gradient + weight[0]


def changed_through_its_transpose(y, weight):
    y = y.clone()
    y.t().masked_fill_(y.t() > 0.1, 0.3)
    return y.reshape(-1)[:6] + y.as_strided((6,), (2,), 1)


def written_in_parts(y, weight):
    result = torch.zeros(5, 6)
    result[:, :3] = y[:, :3]
    result[1] = weight[0]
    result[:, [5, 4]] = y[:, :2]
    result[result > 0.2] = 0.25
    return result


def through_no_grad(y, weight):
    with torch.no_grad():
        scale = y.mean()
    return y * scale + y.detach() * weight.sum()


def losses_of_losses(y, weight):
    target = y.detach().tanh()
    losses = F.mse_loss(y, target) + F.huber_loss(y, target) + F.smooth_l1_loss(y, target)
    losses = losses + F.binary_cross_entropy(y.sigmoid(), target.abs())
    return y * losses + F.soft_margin_loss(y, target)


WAYS = {
    "custom function": lambda y, weight: Exp.apply(y.tanh(), None),
    "checkpoint": lambda y, weight: checkpoint(torch.tanh, y * 2, use_reentrant=False),
    "gradient penalty": gradient_penalty,
    "changed through its transpose": changed_through_its_transpose,
    "written in parts": written_in_parts,
    "through no_grad": through_no_grad,
    "losses of losses": losses_of_losses,
    "list as index": lambda y, weight: y[:, [1, 1, 3]] + y[[0, 0, 1, 2, 3], :3],
    "parameter used often": lambda y, weight: (y @ weight.t()) @ weight + weight.sum(),
    "constants": lambda y, weight: y * torch.arange(6) + torch.eye(5, 6) - torch.tensor([0.5]),
    "other types": lambda y, weight: y.half().float() * (y > 0) + y.to(torch.int32) % 3,
}


class Written(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.function = function

    def forward(self, x):
        output = self.function(x @ self.weight, self.weight)
        return output, poptorch.identity_loss(output * output, "mean")


@pytest.mark.parametrize("function", WAYS.values(), ids=WAYS)
def test_ways_to_write_forward(function):
    pair = Pair(Written(function), sgd, tolerance=TRAINED[torch.float32])
    for _ in range(3):
        pair.step(torch.randn(5, 4))
    pair.finish()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 4, 1), (8, 3, 224, 224)),
        (nn.Conv2d(4, 4, 3, groups=4), (8, 4, 150, 150)),
        (nn.Conv1d(2, 4, 5, stride=2), (4, 2, 150_000)),
        (nn.Conv3d(2, 4, 3, padding=1), (2, 2, 32, 64, 64)),
        (nn.ConvTranspose2d(2, 4, 2, stride=2), (8, 2, 80, 80)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "bias_only"])
def test_the_gradient_of_a_convolutions_bias_is_accurate(layer, shape, frozen):
    """In one running float32 sum over so many positions, errors are twenty times larger."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = copy.deepcopy(layer)
            self.layer.weight.requires_grad_(not frozen)

        def forward(self, x, weights):
            return poptorch.identity_loss(self.layer(x) * weights, "sum")

    model, x = Weighted(), torch.randn(shape)
    weights = torch.rand(layer(x).shape)
    options = quiet_options()
    options.anchorTensor("bias", "Gradient___layer.bias")
    training = poptorch.trainingModel(model, options, sgd(model))
    training(x, weights)
    exact = weights.double().transpose(0, 1).flatten(1).sum(1)
    torch.testing.assert_close(
        training.getAnchoredTensor("bias").double(), exact, rtol=4e-7, atol=0.0
    )
