"""``executor.program()`` and ``executor.profile()``: the ops that run, and their times."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x, y):
        return nn.functional.cross_entropy(torch.tanh(self.fc(x)), y)


def make_model(d=1, ga=1):
    torch.manual_seed(0)
    net = Net()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
    return net, poptorch.trainingModel(net, make_options(d, ga), optimizer)


def batch(samples=4):
    return torch.ones(samples, 3), torch.zeros(samples, dtype=torch.long)


def test_a_profile_has_the_ops_in_their_order_with_their_counts():
    _, model = make_model(d=2, ga=3)
    profile = model.profile(*batch(24), repeats=2)
    kinds = {op.kind: op for op in profile}
    assert kinds["matmul"].executions == 6
    assert kinds["matmul"].scope == "fc"
    assert "test_profile.py:" in kinds["matmul"].source
    (updated,) = (op for op in profile if op.name == "UpdatedVar___fc.weight")
    assert (updated.phase, updated.executions) == ("update", 2)
    phases = [op.phase for op in profile]
    assert phases == sorted(phases, key=["forward", "backward", "update"].index)
    assert profile.seconds == pytest.approx(sum(op.seconds for op in profile))
    assert all(op.seconds >= 0 for op in profile)
    assert profile[0] is next(iter(profile)) and len(profile[:2]) == 2


def test_the_text_of_a_profile_starts_with_what_took_longest():
    _, model = make_model()
    profile = model.profile(*batch(), repeats=3)
    slowest = max(profile, key=lambda op: op.seconds)
    head, first, *_ = str(profile).splitlines()
    assert head.split() == ["us", "share", "runs", "op"]
    assert f"{slowest.kind} '{slowest.name}'" in first


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.head = nn.Linear(4, 2)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.encoder(x)), y)


@pytest.fixture(scope="module")
def nested():
    net = Nested()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
    return poptorch.trainingModel(net, make_options(1, 2), optimizer).profile(*batch(8))


def test_ops_have_the_names_of_their_layers(nested):
    assert {"encoder.0", "encoder.1", "head", ""} == {op.layer for op in nested}
    # Accumulations have no scope; their layer is that of their parameter.
    layers = {op.name: op.layer for op in nested}
    assert layers["UpdatedVar___Accum___encoder.0.weight"] == "encoder.0"
    assert layers["UpdatedVar___Accum___head.bias"] == "head"


def test_backward_ops_have_the_names_of_their_forward_ops(nested):
    backward = [op for op in nested if op.phase == "backward"]
    known = ("Gradient___", "UpdatedVar___", "backward of ")
    assert all(op.name.startswith(known) for op in backward)
    assert {"backward of encoder/0/Gemm:0", "backward of head/Gemm:0"} <= {
        op.name for op in backward
    }


def test_sums_by_phase_and_module(nested):
    phases, modules = nested.by_phase(), nested.by_module()
    assert list(phases) == ["forward", "backward", "update"]
    assert sum(phases.values()) == pytest.approx(nested.seconds)
    assert modules[""].total == pytest.approx(nested.seconds)
    assert modules[""].backward == pytest.approx(phases["backward"])
    assert set(modules) == {"", "encoder", "encoder.0", "encoder.1", "head"}
    inside = modules["encoder.0"].total + modules["encoder.1"].total
    assert modules["encoder"].total == pytest.approx(inside)
    own = [op.seconds for op in nested if op.layer == "head" and op.phase == "forward"]
    assert modules["head"].forward == pytest.approx(sum(own))


def test_the_text_of_a_profile_ends_with_the_sums_of_modules(nested):
    ops, modules = str(nested).split("\n\n")
    assert ops.splitlines()[-1].split()[1:] == ["100.0%", "all", str(len(nested)), "ops"]
    head, *lines = modules.splitlines()
    assert head.split() == ["us", "forward", "backward", "update", "share", "module"]
    assert [line.split()[-1] for line in lines] == ["(all)", "encoder", "0", "1", "head"]
    assert repr(nested).startswith(f"Profile({len(nested)} ops, ")
    assert "encoder.0" in nested._repr_html_()


def test_no_line_of_a_profile_is_wider_than_the_terminal(nested, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, str(nested).splitlines())) <= 60


def test_profiling_trains_like_calls_do():
    net, model = make_model()
    twin, called = make_model()
    model.profile(*batch(), repeats=3)
    for _ in range(3):
        called(*batch())
    assert torch.equal(net.fc.weight, twin.fc.weight)


def test_a_scheduler_behind_a_profile_has_seen_an_update():
    _, model = make_model()
    scheduler = torch.optim.lr_scheduler.StepLR(model._use.optimizer, 1)
    model.profile(*batch())
    scheduler.step()  # PyTorch would warn of the wrong order otherwise


def test_a_profiled_inference_model_sees_trained_weights():
    net, model = make_model()
    inference = poptorch.inferenceModel(net, make_options())
    before = inference(*batch())
    model(*batch())
    inference.profile(*batch())
    assert not torch.equal(inference(*batch()), before)


def test_repeats_must_be_positive():
    _, model = make_model()
    with pytest.raises(poptorch.Error, match="repeats must be at least 1, got 0"):
        model.profile(*batch(), repeats=0)
    model(*batch())


def test_the_program_is_stated_before_it_is_fitted_to_the_host():
    _, model = make_model()
    model.compile(*batch())
    stated, fitted = model.program(), model.program(host=True)
    assert "parameter fc.weight: float32[2, 3]" in stated.splitlines()
    assert "sgd_update(" in stated
    assert len(fitted.splitlines()) < len(stated.splitlines())


@pytest.mark.parametrize("what", ["program", "compiled"])
def test_there_is_no_program_before_compiling(what):
    _, model = make_model()
    with pytest.raises(poptorch.Error, match=f"{what}: the model has not been compiled"):
        result = getattr(model, what)
        result()
