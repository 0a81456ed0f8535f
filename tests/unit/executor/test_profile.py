"""``executor.program()`` and ``executor.profile()``: what runs, and how long it takes."""

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
    scheduler.step()  # would warn of a wrong order


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
