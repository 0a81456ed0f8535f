"""Ten updates of every model against eager PyTorch: losses, gradients, weights, statistics."""

import copy

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.enums import OutputMode, ReductionType
from tests.parity.compare import EagerTrainer, Loop, Pair, assert_close
from tests.parity.models import CASES
from tests.parity.tolerances import TRAINED

UPDATES = 10
BATCH = 4
LOOPS = [
    Loop(1, 1, ReductionType.Mean),
    Loop(3, 1, ReductionType.Sum),
    Loop(1, 3, ReductionType.Sum),
    Loop(3, 3, ReductionType.Mean),
]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return poptorch.optim.SGD(model.parameters(), lr=0.05)


def make_pair(case, dtype: torch.dtype, loop: Loop) -> Pair:
    # Rounding to float16 would make ReLU and max pooling take the other branch now and then.
    model = case.make(smooth=dtype == torch.float16).to(dtype)
    return Pair(model, sgd, tolerance=TRAINED[dtype], loop=loop)


def make_inputs(case, dtype: torch.dtype, loop: Loop) -> tuple[torch.Tensor, ...]:
    inputs = case.inputs(BATCH * loop.micro_batches)
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def num_calls(loop: Loop) -> int:
    return -(-UPDATES // loop.device_iterations)


@pytest.mark.parametrize("loop", LOOPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ten_updates(case, dtype, loop):
    pair = make_pair(case, dtype, loop)
    for _ in range(num_calls(loop)):
        pair.step(*make_inputs(case, dtype, loop))
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
