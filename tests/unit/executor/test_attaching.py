"""Attaching to a device and detaching from it."""

import copy
import gc
import io

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.executor import devices
from tests.unit.executor.logged import backend_lines
from tests.unit.executor.nets import LR, Function, Net, batch, infer, make_options, train

ON_DEMAND = poptorch.ConnectionType.OnDemand
NEVER = poptorch.ConnectionType.Never


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Give each test a separate machine."""
    gc.collect()
    own = devices.DeviceRegistry(4)
    monkeypatch.setattr("popsim_torch.executor.connection.registry", own)
    return own


def of_device(lines):
    """Return the lines about devices."""
    about = ("Acquired", "Attached", "Detached", "Finished")
    return [line for line in lines if line.startswith(about)]


def weights_of(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        x = nn.functional.dropout(self.norm(self.fc(x)), 0.5)
        return x, poptorch.identity_loss((x * x).mean(), "none")


# --- States ------------------------------------------------------------------------


def test_the_states_of_an_executor():
    model = infer(Net())
    assert (model.isCompiled(), model.isAttachedToDevice()) == (False, False)
    x, _ = batch()
    model.compile(x)
    assert (model.isCompiled(), model.isAttachedToDevice()) == (True, True)
    model.detachFromDevice()
    assert (model.isCompiled(), model.isAttachedToDevice()) == (True, False)
    model.attachToDevice()
    assert (model.isCompiled(), model.isAttachedToDevice()) == (True, True)
    model.destroy()
    assert (model.isCompiled(), model.isAttachedToDevice()) == (False, False)


@pytest.mark.parametrize("name", ["attachToDevice", "detachFromDevice", "copyNamedBuffersToDevice"])
def test_before_compilation_there_is_nothing_to_attach(name):
    model = infer(Net())
    with pytest.raises(
        poptorch.Error, match=f"{name}.*has not been compiled or has been destroyed"
    ):
        getattr(model, name)()
    model(batch()[0])
    model.destroy()
    with pytest.raises(poptorch.Error, match="has not been compiled or has been destroyed"):
        getattr(model, name)()


def test_attaching_and_detaching_twice_are_refused():
    model = infer(Net())
    x, _ = batch()
    expected = model(x)
    with pytest.raises(poptorch.Error, match="already attached"):
        model.attachToDevice()
    model.detachFromDevice()
    with pytest.raises(poptorch.Error, match="not attached"):
        model.detachFromDevice()
    model.attachToDevice()
    assert torch.equal(model(x), expected)


def test_a_call_attaches_again():
    model = infer(Net())
    x, _ = batch()
    expected = model(x)
    model.detachFromDevice()
    assert torch.equal(model(x), expected)
    assert model.isAttachedToDevice()


# --- What detaching keeps -------------------------------------------------------------


@pytest.mark.parametrize("make", [poptorch.optim.Adam, torch.optim.Adam], ids=["own", "torch"])
def test_training_goes_on_as_if_it_had_never_been_detached(make):
    x = torch.randn(8, 4)
    nets, results = [Dropping()], []
    nets.append(copy.deepcopy(nets[0]))
    for detaches, net in zip((False, True), nets, strict=True):
        model = train(net, make_options(2, 2, seed=5), make(net.parameters(), lr=LR))
        for _ in range(3):
            out, loss = model(x)
            if detaches:
                model.detachFromDevice()
        results.append((out, loss, weights_of(net)))
    (out, loss, weights), (other_out, other_loss, other_weights) = results
    assert torch.equal(out, other_out)
    assert torch.equal(loss, other_loss)
    for name, value in weights.items():
        assert torch.equal(value, other_weights[name]), name


def test_detaching_brings_weights_to_the_host_and_forgets_that_they_were_newer(implicit_copies):
    net = Net()
    model = train(net)
    before = weights_of(net)
    model(*batch())
    model.detachFromDevice()
    assert not torch.equal(net.fc1.weight, before["fc1.weight"])
    assert not model.copyWeightsToHostIfNeeded()
    assert implicit_copies() == 0


def test_attaching_takes_the_weights_that_the_host_has_by_then():
    net = Net()
    model = infer(net)
    x, _ = batch()
    model(x)
    model.detachFromDevice()
    with torch.no_grad():
        net.fc2.weight.zero_()
        net.fc2.bias.fill_(3)
    assert torch.equal(model(x), torch.full((6, 3), 3.0))


def test_copies_of_weights_leave_a_detached_model_alone():
    net = Net()
    model = train(net)
    model(*batch())
    model.detachFromDevice()
    with torch.no_grad():
        net.fc1.weight.fill_(2)
    model.copyWeightsToHost()
    assert torch.equal(net.fc1.weight, torch.full((5, 4), 2.0))
    model.copyWeightsToDevice()
    net.load_state_dict(model.state_dict())
    assert not model.isAttachedToDevice()
    assert torch.equal(net.fc1.weight, torch.full((5, 4), 2.0))


def test_state_loaded_while_detached_is_uploaded_when_attaching():
    net = Net()
    model = infer(net)
    x, _ = batch()
    model(x)
    model.detachFromDevice()
    other = Net()
    assert not model.load_state_dict(other.state_dict()).missing_keys
    torch.testing.assert_close(model(x), other(x).detach())


def test_buffers_that_inference_changed_stay():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen.add_(1)
            return x + self.seen

    net = Counts()
    model = infer(net)
    model(torch.zeros(1))
    assert net.seen.item() == 0
    model.detachFromDevice()
    assert net.seen.item() == 1
    assert model(torch.zeros(1)).item() == 2


def test_a_learning_rate_set_while_detached_is_used():
    net, x = Net(), batch()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=LR)
    model = train(net, optimizer=optimizer)
    model(*x)
    model.detachFromDevice()
    before = weights_of(net)
    optimizer.param_groups[0]["lr"] = 0.0
    model.setOptimizer(optimizer)
    model(*x)
    for name, value in weights_of(net).items():
        assert torch.equal(value, before[name])


def test_the_state_of_an_optimizer_is_there_while_detached():
    net = Net()
    optimizer = poptorch.optim.Adam(net.parameters(), lr=LR)
    model = train(net, optimizer=optimizer)
    model(*batch())
    attached = optimizer.state_dict()["ipu_state"]
    model.detachFromDevice()
    for name, value in optimizer.state_dict()["ipu_state"].items():
        assert torch.equal(value, attached[name])


def test_random_numbers_go_on():
    model = infer(Function(lambda x: x + torch.rand_like(x)), make_options(seed=3))
    x = torch.zeros(4)
    model(x)
    state = model.rng_state
    second = model(x)
    model.rng_state = state
    model.detachFromDevice()
    assert model.rng_state == state
    assert torch.equal(model(x), second)


def test_an_inference_model_sees_weights_of_a_trainer_that_detached():
    net = Net()
    training, inference = train(net), infer(net)
    x, y = batch()
    before = inference(x)
    training(x, y)
    training.detachFromDevice()
    after = inference(x)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, net(x).detach())


def test_a_detached_inference_model_sees_weights_trained_meanwhile():
    net = Net()
    training, inference = train(net), infer(net)
    x, y = batch()
    inference(x)
    inference.detachFromDevice()
    training(x, y)
    torch.testing.assert_close(inference(x), net(x).detach())


# --- Which device -------------------------------------------------------------------------


def test_a_device_belongs_to_one_model_at_a_time():
    x, _ = batch()
    options = make_options().useIpuId(2)
    first, second = infer(Net(), options), infer(Net(), options)
    first(x)
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        second(x)
    assert not second.isCompiled()
    first.detachFromDevice()
    second(x)
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        first(x)
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        first.attachToDevice()
    assert not first.isAttachedToDevice()
    second.destroy()
    first(x)
    del first
    second(x)


def test_a_dropped_training_model_frees_its_device():
    options = make_options().useIpuId(0)
    net = Net()
    model = train(net, options)
    model(*batch())
    del model
    model = train(net, options)
    model(*batch())
    assert model.isAttachedToDevice()


def test_a_failed_upload_frees_the_device(registry):
    net = Net()
    model = infer(net)
    x, _ = batch()
    expected = model(x)
    model.detachFromDevice()
    weight = net.fc1.weight
    net.fc1.weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(poptorch.Error, match=r"fc1\.weight"):
        model(x)
    assert not model.isAttachedToDevice()
    assert registry.acquire(1, 0).id == 0
    net.fc1.weight = weight
    assert torch.equal(model(x), expected)


def test_a_model_that_fails_to_compile_holds_no_device(registry):
    model = infer(Function(lambda x: x.item()))
    with pytest.raises(poptorch.Error):
        model(torch.ones(1))
    assert not model.isAttachedToDevice()
    assert registry.acquire(1, 0).id == 0


def test_a_model_without_work_for_a_device_runs_without_one(registry):
    class Constant(nn.Module):
        def forward(self):
            return 3, "text"

    held = [registry.acquire(1) for _ in range(4)]
    model = infer(Constant())
    assert model() == (3, "text")
    assert model.isAttachedToDevice()
    model.detachFromDevice()
    assert not model.isAttachedToDevice()
    assert model() == (3, "text")
    assert len(held) == 4


class TwoIpus(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        with poptorch.Block(ipu_id=0):
            x = self.first(x)
        with poptorch.Block(ipu_id=1):
            return self.second(x)


def test_a_model_on_two_ipus_takes_a_pair():
    model = infer(TwoIpus(), make_options(2))
    with backend_lines() as lines:
        model(torch.randn(4, 2))
    assert of_device(lines)[0] == "Acquired 2 IPU(s): running on device Id 4"
    with pytest.raises(poptorch.Error, match="Failed to acquire device 0: it has 1 IPU"):
        infer(TwoIpus(), make_options(2).useIpuId(0))(torch.randn(4, 2))


def test_waiting_for_a_device(registry, monkeypatch):
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    x, _ = batch()
    options = make_options().useIpuId(1)
    first, second = infer(Net(), options), infer(Net(), options)
    first(x)
    waited = []

    def give_it_back(seconds):
        waited.append(seconds)
        first.detachFromDevice()

    monkeypatch.setattr(registry._changed, "wait", give_it_back)
    with backend_lines() as lines:
        second(x)
    assert waited == [15.0]
    assert "No IPU available, sleeping for 15 seconds" in lines
    assert second.isAttachedToDevice()


# --- Connection types ---------------------------------------------------------------------


def test_the_log_of_a_model_that_attaches_first():
    model = infer(Net())
    with backend_lines() as lines:
        model.compile(batch()[0])
        model.detachFromDevice()
    assert of_device(lines) == [
        "Acquired 1 IPU(s): running on device Id 0",
        "Attached to device 0",
        "Finished Poplar compilation",
        "Detached from device 0",
    ]


def test_the_log_of_a_model_that_attaches_last(registry):
    held = registry.acquire(1)
    model = infer(Net(), make_options().connectionType(ON_DEMAND))
    with backend_lines() as lines:
        model(batch()[0])
    assert of_device(lines) == [
        "Acquired 1 IPU(s): running on device Id 0",
        "Finished Poplar compilation",
        "Attached to device 1",
    ]
    assert held.id == 0


def test_a_model_that_attaches_last_is_attached_when_it_is_compiled():
    model = infer(Net(), make_options().connectionType(ON_DEMAND))
    model.compile(batch()[0])
    assert model.isAttachedToDevice()


def offline_options():
    options = make_options().connectionType(NEVER)
    target = make_options()
    target.useOfflineIpuTarget(2)
    return {"never": options, "offline target": target}


@pytest.mark.parametrize("kind", ["never", "offline target"])
def test_a_model_without_a_device_is_compiled_only(kind, registry):
    net = Net()
    model = train(net, offline_options()[kind])
    with backend_lines() as lines:
        model.compile(*batch())
    assert of_device(lines) == ["Finished Poplar compilation"]
    assert (model.isCompiled(), model.isAttachedToDevice()) == (True, False)
    for use in (lambda: model(*batch()), model.attachToDevice, lambda: model.profile(*batch())):
        with pytest.raises(AssertionError, match="offline device"):
            use()
    with pytest.raises(poptorch.Error, match="not attached"):
        model.detachFromDevice()
    model.copyWeightsToDevice()
    model.copyWeightsToHost()
    assert len(model.rng_state) == 2
    assert "fc1.weight" in model.getTensorNames()
    model.destroy()
    assert type(net) is Net


def test_calling_a_model_that_never_attaches_compiles_nothing():
    model = infer(Net(), make_options().connectionType(NEVER))
    with pytest.raises(AssertionError, match="offline device"):
        model(batch()[0])
    assert not model.isCompiled()


@pytest.mark.parametrize("name", ["useIpuId", "logCycleCount"])
def test_an_offline_target_has_no_id_and_no_clock(name):
    options = make_options()
    options.useOfflineIpuTarget()
    if name == "useIpuId":
        options.useIpuId(1)
    else:
        options.logCycleCount(True)
    model = infer(Net(), options)
    with pytest.raises(poptorch.Error, match=f"useOfflineIpuTarget.*{name}"):
        model.compile(batch()[0])


# --- What the log says of transfers --------------------------------------------------------


def test_repeated_calls_transfer_nothing():
    model = train(Net(), make_options(seed=2), None)
    x = batch()
    model(*x)
    with backend_lines() as lines:
        model(*x)
        model(*x)
    assert lines == []


def test_attaching_transfers_what_there_is():
    net = Net()
    optimizer = poptorch.optim.Adam(net.parameters(), lr=LR)
    model = train(net, make_options(seed=2), optimizer)
    with backend_lines() as lines:
        model.compile(*batch())
    assert "Writing weights from host to IPU memory" in lines
    assert "Setting random seed to: 2" in lines
    assert "Setting RNG state" not in lines
    model(*batch())
    with backend_lines() as lines:
        model.detachFromDevice()
    assert lines == [
        "Writing weights from IPU to host",
        "Writing optimiser state tensors from IPU to host",
        "Reading random seed",
        "Reading RNG state",
        "Detached from device 0",
    ]
    with backend_lines() as lines:
        model.attachToDevice()
    assert lines == [
        "Acquired 1 IPU(s): running on device Id 0",
        "Attached to device 0",
        "Writing weights from host to IPU memory",
        "Writing optimiser state tensors from host to IPU memory",
        "Setting random seed to: 2",
        "Setting RNG state",
    ]
    with backend_lines() as lines:
        model.detachFromDevice()
    assert "Writing weights from IPU to host" not in lines
    assert "Writing optimiser state tensors from IPU to host" not in lines


def test_the_state_of_an_optimizer_is_read_once_for_each_run():
    net = Net()
    optimizer = poptorch.optim.Adam(net.parameters(), lr=LR)
    model = train(net, None, optimizer)
    model(*batch())
    with backend_lines() as lines:
        first = optimizer.state_dict()["ipu_state"]
        first["Accl1___fc1.weight"].zero_()
        assert optimizer.state_dict()["ipu_state"]["Accl1___fc1.weight"].any()
    assert lines == ["Writing optimiser state tensors from IPU to host"]
    model(*batch())
    with backend_lines() as lines:
        optimizer.state_dict()
    assert lines == ["Writing optimiser state tensors from IPU to host"]


# --- Saved executors ------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_a_saved_executor_compiles_when_it_is_called(compiled):
    net = Net()
    model = infer(net)
    x, _ = batch()
    if compiled:
        model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not loaded.isAttachedToDevice()
    assert torch.equal(loaded(x), model(x))
