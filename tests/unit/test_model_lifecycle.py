"""Executors from wrapping to ``destroy``: compilation, weights, optimizer, random numbers."""

import copy
import gc
import io
import logging
import threading
import weakref
from collections import namedtuple

import pytest
import torch
from torch import nn

import popsim_torch as poptorch

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
LR = 0.125


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 5)
        self.fc2 = nn.Linear(5, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y=None):
        x = self.fc2(torch.tanh(self.fc1(x)))
        return x if y is None else (x, self.loss(x, y))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, *args):
        return self._function(*args)


def make_options(d=1, ga=1, seed=None):
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    options.deviceIterations(d)
    options.Training.gradientAccumulation(ga)
    if seed is not None:
        options.randomSeed(seed)
    return options


def train(net, options=None, optimizer=None):
    optimizer = optimizer or poptorch.optim.SGD(net.parameters(), lr=LR)
    return poptorch.trainingModel(net, options or make_options(), optimizer)


def infer(net, options=None):
    return poptorch.inferenceModel(net, options or make_options())


def batch(size=6):
    return torch.randn(size, 4), torch.randint(0, 3, (size,))


def eager_step(net, optimizer, x, y):
    optimizer.zero_grad()
    out, loss = net(x, y)
    loss.backward()
    optimizer.step()
    return out.detach(), loss.detach()


def assert_same_weights(net, other):
    for name, value in other.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, **TOLERANCE)


@pytest.fixture
def implicit_copies(caplog):
    """Count the copies that nobody asked for, by their log line."""
    caplog.set_level(logging.DEBUG, logger="poptorch::python")

    def count(direction="Host"):
        return sum(f"Implicit copyWeightsTo{direction}()" in r.message for r in caplog.records)

    return count


# Compilation


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


# Mode and attributes


def test_the_training_flag_of_the_top_level_is_that_of_wrapping():
    class Flag(nn.Module):
        def forward(self, x):
            return x * (2 if self.training else 3)

    net = Flag().train()
    model = infer(net)
    net.eval()
    assert model(torch.ones(1)).tolist() == [2.0]


def test_the_mode_of_sub_modules_is_that_of_compilation():
    class Flag(nn.Module):
        def forward(self, x):
            return x * (2 if self.training else 3)

    net = nn.Sequential(Flag())
    model = infer(net)
    net.eval()
    assert model(torch.ones(1)).tolist() == [3.0]
    net.train()
    assert model(torch.ones(1)).tolist() == [3.0]


def test_plain_attributes_are_constants():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = 2.0
            self.table = torch.tensor([1.0, 10.0])

        def forward(self, x):
            return x * self.factor + self.table

    net = Holder()
    model = infer(net)
    assert model(torch.ones(2)).tolist() == [3.0, 12.0]
    net.factor = 5.0
    net.table.fill_(0)
    assert model(torch.ones(2)).tolist() == [3.0, 12.0]


class Caches(nn.Module):
    """Makes a table in its first forward and keeps it, as positional encodings do."""

    def __init__(self):
        super().__init__()
        self.table = None
        self.kept = {}

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(4.0)
        if "scale" not in self.kept:
            self.kept["scale"] = [torch.full((4,), 2.0)]
        return x * self.kept["scale"][0] + self.table


@pytest.mark.parametrize("top", [True, False], ids=["top level", "sub-module"])
def test_a_tensor_cached_by_forward_is_made_anew_by_the_next_trace(top):
    net = Caches() if top else nn.Sequential(Caches())
    first, second = infer(net), infer(net)
    expected = torch.tensor([2.0, 3.0, 4.0, 5.0])
    assert torch.equal(first(torch.ones(1, 4))[0], expected)
    assert torch.equal(second(torch.ones(2, 4))[1], expected)
    first.destroy()
    assert torch.equal(first(torch.ones(3, 4))[2], expected)


@pytest.mark.parametrize("top", [True, False], ids=["top level", "sub-module"])
def test_a_tensor_cached_by_forward_does_not_spoil_the_model(top):
    net = Caches() if top else nn.Sequential(Caches())
    infer(net)(torch.ones(1, 4))
    copy.deepcopy(net)
    torch.save(net, io.BytesIO())
    assert net(torch.ones(1, 4)).tolist() == [[2.0, 3.0, 4.0, 5.0]]


def test_a_table_cached_on_the_host_is_used():
    net = nn.Sequential(Caches())
    expected = net(torch.ones(1, 4))
    assert torch.equal(infer(net)(torch.ones(1, 4)), expected)


def test_attributes_come_from_the_model():
    net = Net()
    net.note = "mine"
    model = infer(net)
    assert model.model is net
    assert model.note == "mine"
    assert model.fc1 is net.fc1
    assert dict(model.named_parameters()).keys() == dict(net.named_parameters()).keys()
    assert not isinstance(model, nn.Module)
    model.eval()
    assert not net.training
    with pytest.raises(AttributeError):
        _ = model.missing


def test_attributes_are_set_on_the_executor():
    net = Net()
    model = infer(net)
    model.note = "executor"
    assert not hasattr(net, "note")
    assert model.note == "executor"


def test_a_wrapped_model_is_still_its_class():
    net = Net()
    model = train(net)
    assert isinstance(net, Net)
    assert type(net).__name__ == "PoptorchNet"
    assert isinstance(net.fc1.weight, nn.Parameter)
    model.compile(*batch())
    net.destroy()
    assert type(net) is Net


def test_the_representation_shows_blocks():
    net = Net()
    poptorch.BeginBlock(net.fc2, "late", ipu_id=0)
    assert "(fc2): BeginBlock(user_id=late, ipu_id=0) Linear(" in repr(infer(net))
    assert "BeginBlock" not in repr(net)


# Outputs


def test_outputs_are_fresh_tensors():
    model = infer(Net())
    x, _ = batch()
    first = model(x)
    kept = first.clone()
    second = model(x + 1)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)
    first.zero_()
    assert torch.equal(model(x), kept)


@pytest.mark.parametrize("wrap", [train, infer])
def test_outputs_need_no_gradient(wrap):
    out, loss = wrap(Net())(*batch())
    for tensor in (out, loss):
        assert type(tensor) is torch.Tensor
        assert not tensor.requires_grad
        assert tensor.device.type == "cpu"
        assert not tensor.is_inference()
        tensor.add_(1)


def test_gradients_never_reach_the_host():
    net = Net()
    train(net)(*batch())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_returned_input_is_a_copy():
    model = infer(Function(lambda x: (x, x)))
    x = torch.ones(3)
    one, two = model(x)
    one.zero_()
    assert x.tolist() == [1.0, 1.0, 1.0]
    assert two.tolist() == [1.0, 1.0, 1.0]


Point = namedtuple("Point", "x, y")


@pytest.mark.parametrize(
    "structure",
    [
        lambda x: None,
        lambda x: (x, [x + 1, {"k": x * 2, "n": None}], 3, "text"),
        lambda x: Point(x, (x - 1,)),
        lambda x: [x],
        lambda x: (x,),
        lambda x: {"only": x},
    ],
    ids=["None", "nested", "namedtuple", "list", "tuple", "dict"],
)
def test_the_structure_of_outputs_is_kept(structure):
    x = torch.ones(2)
    expected, actual = structure(x), infer(Function(structure))(x)

    def check(ours, theirs):
        assert type(ours) is type(theirs)
        if isinstance(ours, torch.Tensor):
            assert torch.equal(ours, theirs)
        elif isinstance(ours, dict):
            assert list(ours) == list(theirs)
            for key in ours:
                check(ours[key], theirs[key])
        elif isinstance(ours, (list, tuple)):
            for a, b in zip(ours, theirs, strict=True):
                check(a, b)
        else:
            assert ours == theirs

    check(actual, expected)


def test_a_model_without_inputs():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([2.0]))

        def forward(self):
            return self.w * 3, poptorch.identity_loss(self.w, "sum")

    net = Fixed()
    model = train(net)
    assert [model()[0].item() for _ in range(2)] == [6.0, (2 - LR) * 3]


def test_wide_types_come_back_narrow():
    model = infer(Function(lambda a, b, c: (a + 1, b * 2, c - 1)))
    a, b, c = model(
        torch.tensor([2**30]), torch.tensor([0.1], dtype=torch.double), torch.ones(1).bfloat16()
    )
    assert (a.dtype, b.dtype, c.dtype) == (torch.int32, torch.float32, torch.float32)
    assert a.item() == 2**30 + 1
    assert b.item() == pytest.approx(0.2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_parameters_of_wide_types_run_in_float(dtype):
    net = nn.Linear(4, 3).to(dtype)
    before = net.weight.detach().clone()
    x = torch.randn(2, 4).to(dtype)
    out = infer(net)(x)
    assert out.dtype == torch.float32
    expected = nn.functional.linear(x.float(), net.weight.float(), net.bias.float())
    torch.testing.assert_close(out, expected.detach(), **TOLERANCE)
    assert torch.equal(net.weight, before)
    assert net.weight.dtype == dtype


def test_training_a_model_of_doubles():
    net = Net().double()
    twin = copy.deepcopy(net).float()
    x, y = batch()
    model = train(net)
    out, _ = model(x.double(), y)
    expected, _ = eager_step(twin, torch.optim.SGD(twin.parameters(), lr=LR), x, y)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, **TOLERANCE)
    assert net.fc1.weight.dtype == torch.float64
    torch.testing.assert_close(net.fc1.weight.float(), twin.fc1.weight, **TOLERANCE)


# Inputs changed in place


def change_first(x):
    x[:, 0] = 7.0
    return x.sum()


def test_an_input_changed_in_forward_is_written_back():
    x = torch.zeros(2, 3)
    total = infer(Function(change_first))(x)
    assert total == 14.0
    assert x[:, 0].tolist() == [7.0, 7.0]
    assert x[:, 1:].count_nonzero() == 0


@pytest.mark.parametrize("mode", ["All", "Final", "Sum"])
def test_every_micro_batch_of_a_changed_input_is_written_back(mode):
    options = make_options(3)
    options.outputMode(poptorch.OutputMode[mode])

    def function(x):
        x.mul_(2)
        return x.sum()

    x = torch.arange(6.0).view(6, 1)
    infer(Function(function), options)(x)
    assert x.flatten().tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float16, torch.int32], ids=str)
def test_a_changed_input_keeps_its_type(dtype):
    x = torch.tensor([1, 2, 3], dtype=dtype)

    def function(x):
        x.add_(x)
        return x.sum()

    infer(Function(function))(x)
    assert x.dtype == dtype
    assert x.tolist() == [2, 4, 6]


def test_a_changed_input_can_be_returned_too():
    x = torch.ones(3)

    def function(x):
        x.mul_(5)
        return x

    out = infer(Function(function))(x)
    assert out.tolist() == [5.0, 5.0, 5.0]
    assert x.tolist() == [5.0, 5.0, 5.0]
    out.zero_()
    assert x.tolist() == [5.0, 5.0, 5.0]


def test_the_change_happens_again_at_every_call():
    def function(x, y):
        y.add_(x)
        return x * 2

    model = infer(Function(function))
    x, y = torch.ones(2), torch.zeros(2)
    for _ in range(3):
        assert model(x, y).tolist() == [2.0, 2.0]
    assert y.tolist() == [3.0, 3.0]
    assert x.tolist() == [1.0, 1.0]


def test_an_input_changed_while_training():
    class Changes(Net):
        def forward(self, x, y):
            x.clamp_(min=0)
            return super().forward(x, y)

    x, y = batch(8)
    expected = x.clamp(min=0)
    train(Changes(), make_options(2, 2))(x, y)
    assert torch.equal(x, expected)


def test_an_unchanged_input_is_left_alone():
    x, y = batch()
    kept = x.clone(), y.clone()
    train(Net())(x, y)
    assert torch.equal(x, kept[0])
    assert torch.equal(y, kept[1])
    assert x._version == 0


# Weights between host and device


def test_training_matches_eager_and_is_seen_on_the_host():
    net = Net()
    twin = copy.deepcopy(net)
    model = train(net)
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    for _ in range(3):
        x, y = batch()
        model(x, y)
        eager_step(twin, optimizer, x, y)
    assert_same_weights(net, twin)


def test_a_training_loop_copies_nothing(implicit_copies):
    net = Net()
    model = train(net)
    for _ in range(5):
        model(*batch())
    assert implicit_copies() == 0
    _ = net.fc1.weight.shape, net.fc1.weight.dtype
    assert implicit_copies() == 0


READS = {
    "attribute": lambda net: net.fc1.weight.sum(),
    "parameters": lambda net: list(net.parameters()),
    "state_dict": lambda net: net.state_dict(),
    "call": lambda net: net(batch()[0]),
    "print": lambda net: str(net.fc2.bias),
    "equal": lambda net: torch.equal(net.fc1.weight, net.fc1.weight),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_the_first_read_copies_and_the_next_do_not(implicit_copies, read):
    net = Net()
    model = train(net)
    model(*batch())
    read(net)
    assert implicit_copies() == 1
    for other in READS.values():
        other(net)
    assert implicit_copies() == 1
    model(*batch())
    assert implicit_copies() == 1
    read(net)
    assert implicit_copies() == 2


def test_copies_if_needed_tell_whether_they_copied():
    net = Net()
    model = train(net)
    assert model.copyWeightsToHostIfNeeded() is False
    model(*batch())
    assert model.copyWeightsToHostIfNeeded() is True
    assert model.copyWeightsToHostIfNeeded() is False
    assert net.copyWeightsToHostIfNeeded() is False


def test_copy_to_host_writes_into_the_same_tensors():
    net = Net()
    weight = net.fc1.weight
    pointer, before = weight.data_ptr(), weight.detach().clone()
    model = train(net)
    model(*batch())
    model.copyWeightsToHost()
    assert net.fc1.weight is weight
    assert weight.data_ptr() == pointer
    assert not torch.equal(weight, before)


def test_copy_to_device_discards_training_progress():
    net = Net()
    before = copy.deepcopy(net.state_dict())
    model = train(net)
    x, y = batch()
    first = model(x, y)[1]
    model(x, y)
    model.copyWeightsToDevice()
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(model(x, y)[1], first)


def test_copy_to_device_after_a_read_keeps_the_progress():
    net = Net()
    model = train(net)
    model(*batch())
    seen = net.fc1.weight.detach().clone()
    model.copyWeightsToDevice()
    model.copyWeightsToHost()
    assert torch.equal(net.fc1.weight, seen)


def test_a_change_on_the_host_needs_copy_to_device():
    net = Net()
    model = infer(net)
    x, _ = batch()
    before = model(x)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert torch.equal(model(x), before)
    model.copyWeightsToDevice()
    assert torch.equal(model(x), torch.zeros(6, 3))


def test_state_dict_of_a_wrapped_model_is_plain_and_current():
    net = Net()
    twin = copy.deepcopy(net)
    model = train(net)
    x, y = batch()
    model(x, y)
    eager_step(twin, torch.optim.SGD(twin.parameters(), lr=LR), x, y)
    for state in (net.state_dict(), model.state_dict()):
        assert all(type(value) is torch.Tensor for value in state.values())
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(state[name], value, **TOLERANCE)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    fresh = Net()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_same_weights(fresh, twin)


@pytest.mark.parametrize("wrap", [train, infer])
def test_load_state_dict_of_the_executor_uploads(wrap):
    net, other = Net(), Net()
    model = wrap(net)
    x, y = batch()
    model(x, y)
    result = model.load_state_dict(other.state_dict())
    assert result.missing_keys == []
    out, _ = model(x, y)
    torch.testing.assert_close(out, other(x).detach(), **TOLERANCE)


def test_load_state_dict_before_compilation():
    net, other = Net(), Net()
    model = infer(net)
    model.load_state_dict(other.state_dict())
    x, _ = batch()
    torch.testing.assert_close(model(x), other(x).detach(), **TOLERANCE)


def test_load_state_dict_tells_missing_and_unexpected_keys():
    model = infer(Net())
    model.compile(batch()[0])
    state = Net().state_dict()
    state["extra"] = state.pop("fc1.bias")
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["fc1.bias"]
    assert result.unexpected_keys == ["extra"]


def test_load_state_dict_of_the_raw_model_does_not_upload():
    net, other = Net(), Net()
    model = infer(net)
    x, _ = batch()
    before = model(x)
    net.load_state_dict(other.state_dict())
    assert torch.equal(model(x), before)
    model.copyWeightsToDevice()
    torch.testing.assert_close(model(x), other(x).detach(), **TOLERANCE)


# Buffers


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.fc = nn.Linear(4, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y=None):
        x = self.fc(self.norm(x))
        return x if y is None else (x, self.loss(x, y))


def test_running_statistics_advance_once_per_micro_batch():
    net = Normed()
    twin = copy.deepcopy(net)
    model = train(net, make_options(2, 3))
    x, y = batch(24)
    model(x, y)
    for part in x.split(4):
        twin.norm(part)
    torch.testing.assert_close(net.norm.running_mean, twin.norm.running_mean, **TOLERANCE)
    torch.testing.assert_close(net.norm.running_var, twin.norm.running_var, **TOLERANCE)
    assert net.norm.num_batches_tracked == 0


def test_buffers_that_inference_changes_stay_on_the_device():
    net = Normed().train()
    model = infer(net)
    x, _ = batch()
    model(x)
    assert torch.equal(net.norm.running_mean, torch.zeros(4))
    model.copyWeightsToHost()
    torch.testing.assert_close(net.norm.running_mean, 0.1 * x.mean(0), **TOLERANCE)


def test_trained_statistics_reach_inference():
    net = Normed()
    training = train(net)
    training(*batch())
    net.eval()
    x, _ = batch()
    inference = infer(net)
    torch.testing.assert_close(inference(x), net(x).detach(), **TOLERANCE)
    training(*batch())
    torch.testing.assert_close(inference(x), net(x).detach(), **TOLERANCE)


# Training and inference of one model


@pytest.mark.parametrize("inference_first", [True, False])
@pytest.mark.parametrize("compile_first", [True, False])
def test_inference_sees_what_was_trained(inference_first, compile_first):
    net = Net()
    x, y = batch()
    if inference_first:
        inference = infer(net)
        training = train(net)
    else:
        training = train(net)
        inference = infer(training)
    if compile_first:
        inference.compile(x)
    before = inference(x) if compile_first else None
    for _ in range(2):
        training(x, y)
        after = inference(x)
        torch.testing.assert_close(after, net(x).detach(), **TOLERANCE)
        assert before is None or not torch.equal(after, before)
        before = after


def test_several_inference_executors_follow_one_training():
    net = Net()
    x, y = batch()
    first, training, second = infer(net), train(net), infer(net)
    for _ in range(2):
        training(x, y)
        assert torch.equal(first(x), second(x))
        torch.testing.assert_close(first(x), net(x).detach(), **TOLERANCE)


def test_inference_uploads_once_per_training_call(implicit_copies):
    net = Net()
    x, y = batch()
    training, inference = train(net), infer(net)
    training(x, y)
    for _ in range(3):
        inference(x)
    assert implicit_copies("Host") == 1
    uploads = implicit_copies("Device")
    assert uploads <= 1
    training(x, y)
    training(x, y)
    for _ in range(3):
        inference(x)
    assert implicit_copies("Host") == 2
    assert implicit_copies("Device") == uploads + 1


def test_inference_of_a_part_of_the_trained_model():
    net = Net()
    x, y = batch()
    part = infer(net.fc1)
    before = part(x)
    train(net)(x, y)
    training = train(net)
    training(x, y)
    after = part(x)
    assert not torch.equal(before, after)
    expected = nn.functional.linear(x, net.fc1.weight, net.fc1.bias)
    torch.testing.assert_close(after, expected.detach(), **TOLERANCE)


class Pair(nn.Module):
    """Trains one of two layers with the help of the other one."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return poptorch.identity_loss(self.second(torch.tanh(self.first(x))), "sum")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_two_training_executors_leave_what_each_trained(order):
    layers = nn.Linear(4, 4), nn.Linear(4, 2)
    twins = copy.deepcopy(layers)
    x, _ = batch()
    executors = []
    for i in (0, 1):
        net = Pair(*layers)
        layers[1 - i].requires_grad_(False)
        executors.append(train(net, optimizer=poptorch.optim.SGD(layers[i].parameters(), lr=LR)))
        executors[i].compile(x)
        layers[1 - i].requires_grad_(True)
        # Both start from the same weights: neither sees what the other one does.
        pair = Pair(*copy.deepcopy(twins))
        pair(x).backward()
        for ours, theirs in zip(
            twins[i].parameters(), (pair.first, pair.second)[i].parameters(), strict=True
        ):
            ours.grad = theirs.grad
    for i in order:
        executors[i](x)
    for layer, twin in zip(layers, twins, strict=True):
        for ours, theirs in zip(layer.parameters(), twin.parameters(), strict=True):
            expected = theirs.detach() - LR * theirs.grad
            torch.testing.assert_close(ours.detach(), expected, **TOLERANCE)


def test_a_destroyed_training_is_no_longer_followed():
    net = Net()
    x, y = batch()
    training, inference = train(net), infer(net)
    training(x, y)
    before = inference(x)
    training(x, y)
    training.destroy()
    assert torch.equal(inference(x), before)
    inference.copyWeightsToDevice()
    torch.testing.assert_close(inference(x), net(x).detach(), **TOLERANCE)


# Optimizers


def test_set_optimizer_changes_values_without_compiling():
    net = Net()
    twin = copy.deepcopy(net)
    model = train(net)
    x, y = batch()
    model(x, y)
    program = model.compiled
    eager = torch.optim.SGD(twin.parameters(), lr=LR)
    eager_step(twin, eager, x, y)
    model.setOptimizer(poptorch.optim.SGD(net.parameters(), lr=0.5))
    eager.param_groups[0]["lr"] = 0.5
    model(x, y)
    eager_step(twin, eager, x, y)
    assert model.compiled is program
    assert_same_weights(net, twin)


def test_a_changed_group_counts_from_set_optimizer_on():
    net = Net()
    twin = copy.deepcopy(net)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=LR)
    model = train(net, optimizer=optimizer)
    eager = torch.optim.SGD(twin.parameters(), lr=LR)
    x, y = batch()
    model(x, y)
    eager_step(twin, eager, x, y)
    optimizer.param_groups[0]["lr"] = 0.0
    model(x, y)
    eager_step(twin, eager, x, y)
    model.setOptimizer(optimizer)
    model(x, y)
    assert_same_weights(net, twin)


def test_a_scheduler():
    net = Net()
    twin = copy.deepcopy(net)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.5)
    eager = torch.optim.SGD(twin.parameters(), lr=0.5)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, eager)]
    model = train(net, optimizer=optimizer)
    x, y = batch()
    for _ in range(3):
        model(x, y)
        eager_step(twin, eager, x, y)
        optimizer.step()  # only to keep the scheduler from complaining; no gradients, no effect
        for scheduler in schedulers:
            scheduler.step()
        model.setOptimizer(optimizer)
    assert_same_weights(net, twin)


def test_set_optimizer_keeps_momentum():
    net = Net()
    twin = copy.deepcopy(net)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    eager = torch.optim.SGD(twin.parameters(), lr=LR, momentum=0.9)
    model = train(net, optimizer=optimizer)
    x, y = batch()
    for lr in (LR, 0.5, 0.25):
        for group in (*optimizer.param_groups, *eager.param_groups):
            group["lr"] = lr
        model.setOptimizer(optimizer)
        model(x, y)
        eager_step(twin, eager, x, y)
    assert_same_weights(net, twin)


def test_groups_with_values_of_their_own():
    net = Net()
    twin = copy.deepcopy(net)

    def groups(model):
        return [
            {"params": model.fc1.parameters(), "lr": 0.5},
            {"params": model.fc2.parameters(), "lr": 0.0625, "weight_decay": 0.25},
        ]

    optimizer = poptorch.optim.SGD(groups(net), lr=LR, weight_decay=0.0)
    eager = torch.optim.SGD(groups(twin), lr=LR)
    model = train(net, optimizer=optimizer)
    for _ in range(3):
        x, y = batch()
        model(x, y)
        eager_step(twin, eager, x, y)
    assert_same_weights(net, twin)


# Random numbers


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 16)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        out = self.drop(self.fc(x))
        return out, poptorch.identity_loss(out, "sum")


def drops(seed, net=None):
    torch.manual_seed(0)
    net = net or Drops()
    return train(net, make_options(seed=seed), poptorch.optim.SGD(net.parameters(), lr=0.0))


X = torch.ones(8, 4)


def test_the_same_seed_gives_the_same_numbers():
    one, two, other = drops(3), drops(3), drops(4)
    for _ in range(3):
        expected = one(X)[0]
        assert torch.equal(expected, two(X)[0])
        assert not torch.equal(expected, other(X)[0])


def test_numbers_differ_between_calls_and_micro_batches():
    torch.manual_seed(0)
    net = Drops()
    options = make_options(2, 2, seed=3)
    options.outputMode(poptorch.OutputMode.All)
    model = train(net, options, poptorch.optim.SGD(net.parameters(), lr=0.0))
    masks = [part.bool() for _ in range(2) for part in model(X)[0].split(2)]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert not torch.equal(mask, other)


def test_half_the_elements_survive_and_are_doubled():
    torch.manual_seed(0)
    net = Drops()
    model = drops(3, net)
    out, loss = model(torch.ones(512, 4))
    full = net.fc(torch.ones(1, 4)).detach()
    kept = out != 0
    assert 0.45 < kept.float().mean() < 0.55
    torch.testing.assert_close(out, torch.where(kept, 2 * full, 0.0), **TOLERANCE)
    torch.testing.assert_close(loss, out.sum(), rtol=1e-4, atol=1e-3)


def test_the_gradient_has_the_mask_of_forward():
    torch.manual_seed(0)
    net = Drops()
    options = make_options(seed=3)
    options.anchorTensor("g", "Gradient___fc/Gemm:0")
    model = train(net, options)
    out, _ = model(X)
    assert torch.equal(model.getAnchoredTensor("g"), 2.0 * (out != 0))


def test_rng_state_round_trip():
    model = drops(3)
    model(X)
    state = model.rng_state
    assert all(type(number) is int for number in state)
    expected = [model(X)[0] for _ in range(3)]
    model.rng_state = state
    for value in expected:
        assert torch.equal(model(X)[0], value)


def test_rng_state_moves_to_another_executor():
    first, second = drops(3), drops(99)
    first(X)
    state = first.rng_state
    expected = first(X)[0]
    second.compile(X)
    second.rng_state = state
    assert torch.equal(second(X)[0], expected)


def test_reading_rng_state_changes_nothing():
    one, two = drops(3), drops(3)
    one(X), two(X)
    _ = one.rng_state
    assert torch.equal(one(X)[0], two(X)[0])


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63, 2**64 - 1])
def test_large_and_negative_seeds(seed):
    model = drops(seed)
    out, _ = model(X)
    assert model.rng_state == [seed % 2**64, 1]
    assert torch.equal(out, drops(seed)(X)[0])
    assert not torch.equal(out, drops(seed // 2 + 1)(X)[0])


@pytest.mark.parametrize("state", [[1], [1, 2, 3], [], [-1, 0], [2**64, 0], [0, -1], [0, 2**63]])
def test_a_state_that_is_none(state):
    model = drops(3)
    model.compile(X)
    with pytest.raises(poptorch.Error, match="rng_state"):
        model.rng_state = state


def test_dropout_is_the_identity_in_inference():
    net = Drops().train()
    out, _ = infer(net)(X)
    torch.testing.assert_close(out, net.fc(X).detach(), **TOLERANCE)


def test_random_seed_seeds_torch_too():
    make_options(seed=11)
    expected = torch.rand(3)
    make_options(seed=11)
    assert torch.equal(torch.rand(3), expected)


def test_a_run_leaves_torchs_generator_alone():
    model = drops(3)
    model(X)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model(X)
    assert torch.equal(torch.rand(3), expected)


# The end


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_an_executor_dropped_while_dirty_leaves_its_weights(optimizer):
    net = Net()
    before = net.fc1.weight.detach().clone()
    kind = getattr(poptorch.optim, optimizer)
    own = kind(net.parameters(), lr=LR)
    model = train(net, optimizer=own)
    model(*batch())
    expected = {k: v.clone() for k, v in copy.deepcopy(net.state_dict()).items()}
    model(*batch())
    model.copyWeightsToHost()
    model(*batch())
    del model
    gc.collect()
    assert type(net) is Net
    assert not torch.equal(net.fc1.weight, before)
    assert not torch.equal(net.fc1.weight, expected["fc1.weight"])
    own.state_dict()
    train(net)(*batch())


def test_a_dropped_executor_leaves_what_it_trained():
    net = Net()
    twin = copy.deepcopy(net)
    x, y = batch()
    train(net)(x, y)
    gc.collect()
    eager_step(twin, torch.optim.SGD(twin.parameters(), lr=LR), x, y)
    assert_same_weights(net, twin)


def test_a_dropped_inference_executor_does_not_matter():
    net = Net()
    x, y = batch()
    inference = infer(net)
    inference(x)
    training = train(net)
    del inference
    gc.collect()
    training(x, y)
    torch.testing.assert_close(infer(net)(x), net(x).detach(), **TOLERANCE)


def test_executors_are_freed():
    net = Net()
    model = train(net)
    model(*batch())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("destroy", [True, False])
def test_parameters_are_freed_with_their_model(destroy):
    def use():
        net = Net()
        model = train(net)
        model(*batch())
        if destroy:
            model.destroy()
        return [weakref.ref(parameter) for parameter in net.parameters()]

    alive = use()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 4


def test_compiling_in_threads():
    nets = [Net() for _ in range(4)]
    x, y = batch()
    results = {}

    def use(position):
        try:
            results[position] = train(nets[position])(x, y)[1]
        except Exception as error:
            results[position] = error

    expected = [net(x, y)[1].detach() for net in nets]
    threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for position, loss in enumerate(expected):
        torch.testing.assert_close(results[position], loss, **TOLERANCE)


def test_a_running_executor_refuses_another_thread():
    model = infer(nn.Sequential(*[nn.Linear(256, 256) for _ in range(20)]), make_options(50))
    x = torch.randn(50 * 8, 256)
    expected = model(x)
    outcomes = []

    def use():
        try:
            outcomes.append(torch.equal(model(x), expected))
        except poptorch.Error as error:
            outcomes.append("already running" in str(error))

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True, True, True]
    assert torch.equal(model(x), expected)


def test_a_deep_copy_of_a_trained_model_is_plain_and_current():
    net = Net()
    model = train(net)
    model(*batch())
    twin = copy.deepcopy(net)
    assert type(twin) is Net
    assert torch.equal(twin.fc1.weight, net.fc1.weight)
    model(*batch())
    assert not torch.equal(twin.fc1.weight, net.fc1.weight)
