"""When a model is compiled, and which state this leaves."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.unit.executor.nets import (
    LR,
    TOLERANCE,
    Function,
    Net,
    assert_same_weights,
    batch,
    eager_step,
    infer,
    make_options,
    train,
)


@pytest.mark.parametrize("wrap", [train, infer])
def test_wrapping_compiles_nothing(wrap):
    calls = []

    class Notes(Net):
        def forward(self, x, y=None):
            calls.append(tuple(x.shape))
            return super().forward(x, y)

    model = wrap(Notes())
    assert not model.isCompiled()
    assert not model.isAttachedToDevice()
    assert calls == []
    model.compile(*batch())
    assert model.isCompiled()
    assert model.isAttachedToDevice()
    for _ in range(3):
        model(*batch())
    assert calls == [(6, 4)]


@pytest.mark.parametrize("wrap", [train, infer])
def test_counts_of_true_are_one(wrap):
    options = make_options(True)
    if wrap is train:
        options.Training.gradientAccumulation(True)
    options.outputMode(poptorch.OutputMode.EveryN, True)
    options.anchorTensor("hidden", "fc1/Gemm:0", poptorch.OutputMode.EveryN, True)
    model = wrap(Net(), options)
    assert model(*batch())[0].shape == (6, 3)
    assert model.getAnchoredTensor("hidden").shape == (6, 5)


@pytest.mark.parametrize("count", [0, -1, 2**31, 2**70])
def test_counts_out_of_range(count):
    model = infer(Function(lambda: torch.ones(2)), make_options(count))
    with pytest.raises(
        poptorch.Error,
        match=rf"deviceIterations\({count}\): the count must be from 1 to 2147483647",
    ):
        model()


def test_forward_sees_one_micro_batch():
    shapes = []

    def function(x):
        shapes.append((tuple(x.shape), x.device.type, poptorch.isRunningOnIpu()))
        return x + 1

    infer(Function(function), make_options(3))(torch.ones(12, 2))
    assert shapes == [((4, 2), "ipu", True)]
    assert not poptorch.isRunningOnIpu()


def test_a_call_compiles():
    model = infer(Net())
    model(batch()[0])
    assert model.isCompiled()


def test_compiling_again_is_ignored_with_a_warning(caplog):
    model = infer(Net())
    model.compile(batch()[0])
    program = model.compiled
    model.compile(torch.randn(1, 4))
    assert model.compiled is program
    assert "compiled already" in caplog.text


def test_destroy_and_compile_for_another_shape():
    net = Net()
    model = infer(net)
    model(batch(6)[0])
    model.destroy()
    assert not model.isCompiled()
    assert not model.isAttachedToDevice()
    x, _ = batch(9)
    torch.testing.assert_close(model(x), net(x).detach(), **TOLERANCE)


def test_destroy_and_go_on_training():
    net = Net()
    twin = copy.deepcopy(net)
    model = train(net)
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    for size in (6, 10, 4):
        for _ in range(2):
            x, y = batch(size)
            out, loss = model(x, y)
            expected_out, expected_loss = eager_step(twin, optimizer, x, y)
            torch.testing.assert_close(out, expected_out, **TOLERANCE)
            torch.testing.assert_close(loss, expected_loss, **TOLERANCE)
        model.destroy()
        assert type(net) is Net
        assert type(net.fc1.weight) is nn.Parameter
        assert_same_weights(net, twin)


def test_an_uncompiled_training_model_stays_wrapped():
    net = Net()
    model = train(net)
    model.destroy()
    assert type(net).__name__ == "PoptorchNet"
    with pytest.raises(RuntimeError, match="already been wrapped"):
        train(net)
    assert not model.isCompiled()


def test_optimizer_state_survives_destroy():
    net = Net()
    twin = copy.deepcopy(net)
    model = train(net, optimizer=poptorch.optim.Adam(net.parameters(), lr=0.01))
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
    for size in (6, 4):
        for _ in range(3):
            x, y = batch(size)
            model(x, y)
            eager_step(twin, optimizer, x, y)
        model.destroy()
    torch.testing.assert_close(net.fc1.weight, twin.fc1.weight, rtol=1e-4, atol=1e-5)


def test_a_failed_compilation_can_be_repeated():
    fails = {"on": True}

    def function(x):
        if fails["on"]:
            raise ValueError("ours")
        return x * 2

    model = infer(Function(function))
    with pytest.raises(ValueError, match="ours"):
        model(torch.ones(2))
    fails["on"] = False
    assert model(torch.ones(2)).tolist() == [2.0, 2.0]


def test_no_options_and_no_optimizer():
    net = Net()
    twin = copy.deepcopy(net)
    x, y = batch()
    options = make_options()
    poptorch.trainingModel(net, options)(x, y)
    eager_step(twin, torch.optim.SGD(twin.parameters(), lr=0.01), x, y)
    assert_same_weights(net, twin)


def test_options_are_frozen_copies():
    options = make_options(2)
    net = Net()
    model = infer(net, options)
    assert model.options.device_iterations == 2
    assert model.options is not options
    with pytest.raises(AttributeError):
        model.options.deviceIterations(3)
