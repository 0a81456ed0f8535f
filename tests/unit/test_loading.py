"""``poptorch.load``: the executor continues where the saved executor was."""

import copy
from collections import namedtuple

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

Pair = namedtuple("Pair", "left right")


class Net(nn.Module):
    """A model with dropout, statistics, tied weights, frozen weights, and buffers of all kinds."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.body[0].weight
        self.out = nn.Linear(4, 3)
        self.out.bias.requires_grad_(False)
        self.register_buffer("shift", torch.tensor([0.5, 1, 2, 3]), persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y=None):
        x = self.out(self.tied(self.body(x)) + self.shift * self.count)
        return x if y is None else (x, self.loss(x, y))


def batch(size=16):
    return torch.randn(size, 4), torch.randint(0, 3, (size,))


def saved(model, tmp_path, **more):
    model.save(tmp_path / "file", **more)
    return tmp_path / "file"


def assert_same_state(one, other):
    mine, theirs = one.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


def assert_goes_on_alike(one, other, *, calls=3, size=16):
    for _ in range(calls):
        part = batch(size)
        for mine, theirs in zip(one(*part), other(*part), strict=True):
            assert torch.equal(mine, theirs)
    assert_same_state(one, other)


OPTIMIZERS = {
    "SGD": lambda p: poptorch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, loss_scaling=8.0),
    "nesterov": lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "combined": lambda p: poptorch.optim.SGD(
        p, lr=0.1, momentum=0.9, use_combined_accum=True, velocity_scaling=2.0
    ),
    "half accumulators": lambda p: poptorch.optim.SGD(
        p, lr=0.1, momentum=0.9, accum_type=torch.half, velocity_accum_type=torch.half
    ),
    "clipped": lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.5, max_grad_norm=0.1),
    "Adam": lambda p: poptorch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "AdamW": lambda p: poptorch.optim.AdamW(p, lr=0.01, bias_correction=False),
    "RMSprop": lambda p: poptorch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "TensorFlow's RMSprop": lambda p: poptorch.optim.RMSprop(p, lr=0.01, use_tf_variant=True),
    "LAMB": lambda p: poptorch.optim.LAMB(p, lr=0.01),
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "torch RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_to_the_last_bit(tmp_path, name):
    net = Net()
    optimizer = OPTIMIZERS[name](net.parameters())
    model = poptorch.trainingModel(net, make_options(2, 2), optimizer)
    for _ in range(2):
        model(*batch())
    loaded = poptorch.load(saved(model, tmp_path))
    assert loaded.training_mode
    assert loaded.isCompiled()
    assert_same_state(model, loaded)
    assert_goes_on_alike(model, loaded)
    if isinstance(optimizer, poptorch.optim.Optimizer):
        mine, theirs = optimizer.state_dict(), loaded._use.optimizer.state_dict()
        for part in ("ipu_state", "ipu_param"):
            assert list(mine[part]) == list(theirs[part])
            assert all(torch.equal(mine[part][key], theirs[part][key]) for key in mine[part])
        assert mine["param_groups"] == theirs["param_groups"]


def test_a_model_that_has_not_run_is_saved_as_it_is(tmp_path):
    net = Net()
    model = poptorch.trainingModel(net, make_options(seed=4), OPTIMIZERS["Adam"](net.parameters()))
    model.compileAndExport(tmp_path / "file", *batch())
    assert_goes_on_alike(model, poptorch.load(tmp_path / "file"))


def test_loading_and_saving_goes_on_and_on(tmp_path):
    net = Net()
    model = poptorch.trainingModel(net, make_options(2), OPTIMIZERS["LAMB"](net.parameters()))
    model(*batch())
    loaded = model
    for _ in range(3):
        loaded = poptorch.load(saved(loaded, tmp_path))
    assert_goes_on_alike(model, loaded)
    assert_goes_on_alike(loaded, poptorch.load(saved(model, tmp_path)))


def two_groups(net):
    groups = [
        {"params": list(net.body.parameters()), "lr": 0.1},
        {"params": [net.tied.bias, net.out.weight], "weight_decay": 0.25},
    ]
    return poptorch.optim.SGD(groups, lr=0.05, momentum=0.5)


def test_groups_and_later_values(tmp_path):
    net = Net()
    optimizer = two_groups(net)
    model = poptorch.trainingModel(net, make_options(), optimizer)
    model(*batch())
    optimizer.param_groups[0]["lr"] = 0.5
    model.setOptimizer(optimizer)
    optimizer.param_groups[1]["lr"] = 99.0  # not used before setOptimizer
    loaded = poptorch.load(saved(model, tmp_path))
    assert_goes_on_alike(model, loaded)
    for one, its_optimizer in ((model, optimizer), (loaded, loaded._use.optimizer)):
        assert its_optimizer.param_groups[1]["lr"] == 99.0
        its_optimizer.param_groups[1]["lr"] = 0.001
        one.setOptimizer(its_optimizer)
    assert_goes_on_alike(model, loaded)


def test_a_new_optimizer_for_a_loaded_model(tmp_path):
    net = Net()
    model = poptorch.trainingModel(net, make_options(), two_groups(net))
    model(*batch())
    loaded = poptorch.load(saved(model, tmp_path))
    for one in (model, loaded):
        optimizer = two_groups(one.model)
        optimizer.param_groups[0]["lr"] = 0.7
        one.setOptimizer(optimizer)
    assert_goes_on_alike(model, loaded)


def test_schedulers_go_on(tmp_path):
    net = Net()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model = poptorch.trainingModel(net, make_options(), optimizer)
    model(*batch())
    scheduler.step()
    model.setOptimizer(optimizer)
    loaded = poptorch.load(saved(model, tmp_path))
    restored = torch.optim.lr_scheduler.StepLR(loaded._use.optimizer, 1)
    restored.load_state_dict(scheduler.state_dict())
    for one, its_scheduler in ((model, scheduler), (loaded, restored)):
        one(*batch(16))
        its_scheduler.step()
    assert scheduler.get_last_lr() == restored.get_last_lr()


def test_random_numbers_go_on_unless_they_are_left_out(tmp_path):
    net = Net()
    model = poptorch.trainingModel(net, make_options(seed=3), OPTIMIZERS["SGD"](net.parameters()))
    model(*batch())
    kept = poptorch.load(saved(model, tmp_path))
    assert kept.rng_state == model.rng_state
    fresh = poptorch.load(saved(model, tmp_path, save_rng_state=False))
    assert fresh.rng_state == [3, 0]


def test_inference(tmp_path):
    net = Net().eval()
    model = poptorch.inferenceModel(net, make_options(2))
    x, _ = batch()
    expected = model(x)
    loaded = poptorch.load(saved(model, tmp_path))
    assert not loaded.training_mode
    assert torch.equal(loaded(x), expected)
    torch.testing.assert_close(expected, net(x), rtol=1e-5, atol=1e-6)


def test_an_inference_model_is_saved_with_what_has_been_trained(tmp_path):
    net = Net()
    training = poptorch.trainingModel(net, make_options(), OPTIMIZERS["SGD"](net.parameters()))
    inference = poptorch.inferenceModel(net, make_options())
    x, y = batch()
    inference.compile(x)
    training(x, y)
    loaded = poptorch.load(saved(inference, tmp_path))
    assert_same_state(loaded, training)


def test_buffers_that_inference_changes_are_those_of_the_device(tmp_path):
    net = nn.Sequential(nn.BatchNorm1d(4))
    model = poptorch.inferenceModel(net, make_options())
    x, _ = batch()
    model(x)
    loaded = poptorch.load(saved(model, tmp_path))
    assert torch.equal(loaded(x), model(x))
    assert_same_state(loaded, model)
    assert not torch.equal(net[0].running_mean, torch.zeros(4))


def test_a_pipeline_with_anchors(tmp_path):
    net = Net()
    net.body = poptorch.BeginBlock(net.body, "first", ipu_id=0)
    net.out = poptorch.BeginBlock(net.out, "second", ipu_id=1)
    net.tied.weight = nn.Parameter(torch.randn(4, 4))
    options = make_options(2, 4)
    options.setExecutionStrategy(poptorch.PipelinedExecution("first", poptorch.Stage("second")))
    options.anchorTensor("gradient", "Gradient___out.weight", poptorch.OutputMode.All)
    options.anchorTensor("last", "Gradient___tied.bias", poptorch.OutputMode.Final)
    optimizer = OPTIMIZERS["momentum"](net.parameters())
    model = poptorch.trainingModel(net, options, optimizer)
    model(*batch(32))
    loaded = poptorch.load(saved(model, tmp_path))
    assert repr(loaded.options.execution_strategy) == repr(options.execution_strategy)
    assert_goes_on_alike(model, loaded, size=32)
    for name in ("gradient", "last"):
        assert torch.equal(model.getAnchoredTensor(name), loaded.getAnchoredTensor(name))
    assert loaded.getTensorNames() == model.getTensorNames()
    assert loaded.program() == model.program()


class Structures(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.table = torch.arange(3.0)

    def forward(self, pair, named, *rest, scale=2.0, **more):
        total = pair.left + pair.right[0] + named["a"] + sum(rest) + more["extra"]
        out = self.fc(total) * scale
        return Pair(out, [total]), {"text": "constant", "table": self.table, "again": out}, None


def test_structures_of_arguments_and_results(tmp_path):
    x = torch.randn(8, 4)
    args = (Pair(x, (x + 1,)), {"a": x + 2, "b": "text"}, x + 3, x + 4)
    kwargs = {"extra": x + 5}
    model = poptorch.inferenceModel(Structures(), make_options(2))
    with pytest.warns(UserWarning, match="expected to be on the IPU"):
        expected = model(*args, **kwargs)
    loaded = poptorch.load(saved(model, tmp_path))
    found = loaded(*args, **kwargs)
    assert type(found[0]) is Pair
    assert torch.equal(found[0].left, expected[0].left)
    assert torch.equal(found[0].right[0], expected[0].right[0])
    assert found[1]["text"] == "constant"
    assert torch.equal(found[1]["table"], torch.arange(3.0))
    assert torch.equal(found[1]["again"], expected[1]["again"])
    assert found[2] is None
    with pytest.raises(poptorch.Error, match="named"):
        loaded(args[0], {"a": x + 2, "b": "other"}, *args[2:], **kwargs)
    with pytest.raises(poptorch.Error, match="scale"):
        loaded(*args, scale=3.0, **kwargs)
    with pytest.raises(poptorch.Error):
        loaded(*args)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_element_types(tmp_path, dtype):
    net = nn.Linear(4, 3).to(dtype)
    model = poptorch.inferenceModel(net, make_options())
    x = torch.randn(2, 4, dtype=dtype)
    expected = model(x)
    loaded = poptorch.load(saved(model, tmp_path))
    assert torch.equal(loaded(x), expected)
    assert loaded.model.weight.dtype == dtype


def test_inputs_that_forward_changes(tmp_path):
    class Changing(nn.Module):
        def forward(self, x):
            x += 1
            return x * 2

    model = poptorch.inferenceModel(Changing(), make_options())
    x = torch.zeros(2)
    model.compile(x)
    loaded = poptorch.load(saved(model, tmp_path))
    assert torch.equal(loaded(x), torch.full((2,), 2.0))
    assert torch.equal(x, torch.ones(2))


# --- What comes back of the model ---------------------------------------------


def test_the_model_has_its_weights_under_their_names(tmp_path):
    net = Net()
    model = poptorch.trainingModel(net, make_options(), OPTIMIZERS["Adam"](net.parameters()))
    model(*batch())
    loaded = poptorch.load(saved(model, tmp_path)).model
    assert torch.equal(loaded.tied.weight, net.tied.weight)
    assert loaded.tied.weight is loaded.get_submodule("body.0").weight
    assert not loaded.out.bias.requires_grad
    assert torch.equal(loaded.shift, net.shift)
    assert "shift" not in loaded.state_dict()
    assert [name for name, _ in loaded.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert [name for name, _ in loaded.named_buffers()] == [n for n, _ in net.named_buffers()]
    twin = Net()
    twin.load_state_dict(loaded.state_dict())
    assert torch.equal(twin.tied.weight, net.tied.weight)


def test_what_is_known_of_a_compiled_model_is_known_of_a_loaded_one(tmp_path):
    options = make_options()
    options.showCompilationProgressBar()
    model = poptorch.inferenceModel(nn.Linear(4, 3), options)
    x = torch.ones(2, 4)
    model.compileAndExport(tmp_path / "file", x)
    loaded = poptorch.load(tmp_path / "file")
    assert loaded.compilationTime().total_seconds() > 0
    assert loaded.getTensorNames() == model.getTensorNames()
    assert loaded.program(host=True) == model.program(host=True)
    assert loaded.compiled.run == model.compiled.run
    assert "matmul" in str(loaded.profile(x))


def test_training_flags_come_back(tmp_path):
    net = Net()
    net.body[1].eval()
    model = poptorch.inferenceModel(net, make_options())
    model.compile(batch()[0])
    loaded = poptorch.load(saved(model, tmp_path)).model
    assert loaded.training
    assert not loaded.get_submodule("body.1").training


def test_the_class_does_not_come_back(tmp_path):
    net = Net()
    model = poptorch.inferenceModel(net, make_options())
    x, _ = batch()
    model.compile(x)
    loaded = poptorch.load(saved(model, tmp_path))
    assert "BatchNorm1d" in repr(loaded)
    with pytest.raises(poptorch.Error, match="This Net comes from a file"):
        loaded.model(x)
    loaded.destroy()
    with pytest.raises(poptorch.Error, match=r"load_state_dict\(loaded\.state_dict\(\)\)"):
        loaded(x)
    with pytest.raises(poptorch.Error, match="comes from a file"):
        copy.deepcopy(loaded)(x)


def test_a_destroyed_model_can_load_its_program_again(tmp_path):
    net = Net()
    model = poptorch.trainingModel(net, make_options(), OPTIMIZERS["Adam"](net.parameters()))
    model(*batch())
    path = saved(model, tmp_path)
    loaded = poptorch.load(path)
    model.destroy()
    loaded.destroy()
    model.loadExecutable(path)
    loaded.loadExecutable(path)
    loaded.rng_state = model.rng_state
    assert_goes_on_alike(model, loaded)


def test_a_second_program_for_a_loaded_model(tmp_path):
    net = Net()
    training = poptorch.trainingModel(net, make_options(), OPTIMIZERS["SGD"](net.parameters()))
    evaluating = poptorch.inferenceModel(copy.deepcopy(net).eval(), make_options())
    x, y = batch()
    training(x, y)
    evaluating.compileAndExport(tmp_path / "inference", x, export_model=False)
    loaded = poptorch.load(saved(training, tmp_path))
    inference = poptorch.inferenceModel(loaded, make_options())
    inference.loadExecutable(tmp_path / "inference")
    own = Net().eval()
    for _ in range(2):
        loaded(x, y)
        own.load_state_dict(loaded.state_dict())
        torch.testing.assert_close(inference(x), own(x), rtol=1e-5, atol=1e-6)


def test_two_models_that_are_loaded_are_not_connected(tmp_path):
    net = Net()
    model = poptorch.trainingModel(net, make_options(), OPTIMIZERS["SGD"](net.parameters()))
    model(*batch())
    path = saved(model, tmp_path)
    one, other = poptorch.load(path), poptorch.load(path)
    one(*batch())
    assert not torch.equal(one.model.out.weight, other.model.out.weight)


def test_a_program_of_other_weights_is_refused(tmp_path):
    small, large = nn.Linear(4, 3), nn.Linear(4, 5)
    x = torch.ones(2, 4)
    for net, name in ((small, "small"), (large, "large")):
        poptorch.inferenceModel(net, make_options()).compileAndExport(tmp_path / name, x)
    model = poptorch.inferenceModel(poptorch.load(tmp_path / "small").model, make_options())
    with pytest.raises(poptorch.Error, match=r"uses 'weight' of shape \(5, 4\)"):
        model.loadExecutable(tmp_path / "large")
    model.loadExecutable(tmp_path / "small")


def test_a_program_for_another_optimizer_is_refused(tmp_path):
    net = Net()
    model = poptorch.trainingModel(net, make_options(), OPTIMIZERS["Adam"](net.parameters()))
    model(*batch())
    path = saved(model, tmp_path)
    for name in ("SGD", "AdamW", "clipped"):
        loaded = poptorch.load(path)
        loaded.destroy()
        module = loaded.model
        optimizer = OPTIMIZERS[name](module.parameters())
        other = poptorch.trainingModel(module, make_options(), optimizer)
        with pytest.raises(poptorch.Error, match=r"do not match|updates of the optimizer differ"):
            other.loadExecutable(path)
    module = poptorch.load(path).model
    with pytest.raises(poptorch.Error, match="for training, the executor is for inference"):
        poptorch.inferenceModel(module, make_options()).loadExecutable(path)


# --- Options ------------------------------------------------------------------


def test_options_come_back_and_can_be_edited(tmp_path):
    options = make_options(2)
    options.modelName("name of the model").anchorTensor("a", "input")
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    options._Popart.set("autoRecomputation", 0)
    net = Net()
    model = poptorch.trainingModel(net, options, OPTIMIZERS["SGD"](net.parameters()))
    model.compile(*batch())
    seen = []

    def edit(found):
        seen.append(repr(found))
        found.modelName("another name").logDir("elsewhere")

    loaded = poptorch.load(saved(model, tmp_path), edit)
    assert seen == [repr(model.options)]
    assert loaded.options.model_name == "another name"
    with pytest.raises(AttributeError):
        loaded.options.logDir("too late")


def test_a_file_made_without_a_device_attaches_when_it_is_loaded(tmp_path):
    options = make_options()
    options.useOfflineIpuTarget(2)
    net = nn.Linear(4, 3)
    x = torch.ones(2, 4)
    model = poptorch.inferenceModel(net, options)
    model.compileAndExport(tmp_path / "file", x)
    assert not model.isAttachedToDevice()
    with pytest.raises(AssertionError):
        model(x)
    seen = []
    loaded = poptorch.load(tmp_path / "file", lambda found: seen.append(found.clone()))
    assert seen[0].connection_type == poptorch.ConnectionType.Always
    assert not seen[0].exists("ipu_version")
    assert loaded.isAttachedToDevice()
    assert torch.equal(loaded(x), poptorch.inferenceModel(net, make_options())(x))


@pytest.mark.parametrize("optimizer", ["Adam", "torch Adam"])
def test_a_detached_model_is_saved_as_it_was(tmp_path, optimizer):
    net = Net()
    model = poptorch.trainingModel(net, make_options(), OPTIMIZERS[optimizer](net.parameters()))
    model(*batch())
    model.detachFromDevice()
    loaded = poptorch.load(saved(model, tmp_path))
    assert not model.isAttachedToDevice()
    assert loaded.isAttachedToDevice()
    assert_goes_on_alike(model, loaded)


def test_a_loaded_model_detaches_and_attaches(tmp_path):
    net = Net()
    model = poptorch.trainingModel(net, make_options(), OPTIMIZERS["LAMB"](net.parameters()))
    model(*batch())
    loaded = poptorch.load(saved(model, tmp_path))
    loaded.detachFromDevice()
    assert_goes_on_alike(model, loaded)
