"""Thirty faults, each planted in a model of its own, and the verdict about each of them."""

import copy
import math

import pytest
import torch

import popsim_torch as poptorch
from tests.options import make_options
from tests.parity.watch.planted import PLANTED, Base, Fault, Plain, Planted


def healthy_inputs(planted: Planted) -> tuple[torch.Tensor, ...]:
    """Return inputs of the same shapes; whether they are healthy is for the model to say."""
    return tuple(torch.ones_like(one) for one in planted.inputs())


def train_until_bad(planted: Planted, **watch):
    """Return the model, its weights before the call, and the error of the call."""
    torch.manual_seed(2)
    model = planted.make()
    options = make_options(seed=7)
    planted.options(options)
    options.watch(**watch)
    training = poptorch.trainingModel(model, options, planted.optimizer(model))
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(poptorch.BadNumberError) as caught:
        training(*planted.inputs())
    return training, before, caught.value


@pytest.mark.parametrize("name", PLANTED)
def test_the_verdict_names_the_fault(name):
    planted = PLANTED[name]
    training, before, error = train_until_bad(planted)
    verdict = error.verdict
    print(verdict)
    found = {field: getattr(verdict, field) for field in planted.expected}
    assert found == planted.expected
    assert planted.rule in verdict.rule
    assert not math.isfinite(verdict.value)
    assert str(verdict) in str(error)
    if planted.expected.get("iteration", 0) == 0:
        # The weights are those before the bad iteration, and the model can be read and called.
        for key, value in training.model.state_dict().items():
            assert torch.equal(value, before[key]) or value.isnan().any(), key
    training.destroy()


def test_there_are_thirty_faults():
    assert len(PLANTED) >= 30


@pytest.mark.parametrize("name", ["division by zero", "micro-batch 3 of 4", "velocities"])
def test_the_model_can_be_used_after_the_error(name):
    planted = PLANTED[name]
    training, _, error = train_until_bad(planted)
    with pytest.raises(poptorch.BadNumberError) as again:
        training(*planted.inputs())
    assert str(again.value) == str(error)
    fine = healthy_inputs(planted)
    before = training.model.last.weight.clone()
    assert training(*fine).isfinite().all()
    assert not torch.equal(training.model.last.weight, before)


def test_iterations_before_the_bad_one_have_trained():
    planted = PLANTED["iteration 5 of 8"]
    training, before, _ = train_until_bad(planted)
    torch.manual_seed(2)
    model = planted.make()
    options = make_options(d=5, seed=7)
    twin = poptorch.trainingModel(model, options, planted.optimizer(model))
    twin(planted.inputs()[0][:10])
    after = training.model.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(after[key], value), key
    assert not torch.equal(after["first.weight"], before["first.weight"])


# --- Code of users, replicas, precision ---


@poptorch.register_custom_op("RootOfUser", domain="tests.watch")
def root_of_user(x):
    return x**0.5


@root_of_user.shapes
def _(x):
    return torch.empty_like(x)


class OwnRoot(torch.nn.Module):
    def forward(self, x):
        return poptorch.custom_op([x], "RootOfUser", "tests.watch", 1, [x])[0]


def test_a_custom_op_that_gives_nan():
    running = poptorch.inferenceModel(OwnRoot(), make_options().watch())
    x = torch.ones(2, 3)
    x[1, 2] = -4
    with pytest.raises(poptorch.BadNumberError) as caught:
        running(x)
    verdict = caught.value.verdict
    assert (verdict.op, verdict.index, verdict.exact) == ("tests.watch::RootOfUser", (1, 2), None)
    assert verdict.rule == "the code of the user computed nan from finite operands"


class OnHost(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.root = poptorch.CPU(Fault(torch.sqrt), "root")

    def forward(self, x):
        return self.root(x) + 1


def test_a_function_of_the_host_is_called_again(tmp_path, caplog):
    running = poptorch.inferenceModel(OnHost(), make_options().watch(capsule=tmp_path))
    with pytest.raises(poptorch.BadNumberError) as caught:
        running(-torch.ones(2, 3))
    verdict = caught.value.verdict
    assert (verdict.op, verdict.source) == ("host_call", "op")
    assert verdict.note == "the repeated iteration called the functions of poptorch.CPU"
    # Its code cannot be in a file.
    assert list(tmp_path.iterdir()) == []
    assert "no capsule is written, since the program calls poptorch.CPU" in caplog.text


def test_the_second_replica():
    torch.manual_seed(2)
    model = Base(torch.log)
    options = make_options(ga=2).replicationFactor(2).watch()
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(8, 4)
    x[6:] = -1  # micro-batch 1 of replica 1
    with pytest.raises(poptorch.BadNumberError) as caught:
        training(x)
    verdict = caught.value.verdict
    assert (verdict.op, verdict.replica, verdict.micro_batch) == ("log", 1, 1)


def test_weights_in_float16_overflow_in_the_update():
    torch.manual_seed(2)
    model = Plain(torch.nn.Linear(4, 4)).half()
    options = make_options().watch()
    training = poptorch.trainingModel(
        model, options, torch.optim.SGD(model.parameters(), lr=2000.0)
    )
    before = model.layers[0].weight.clone()
    with pytest.raises(poptorch.BadNumberError) as caught:
        training(torch.full((2, 4), 100.0, dtype=torch.float16))
    verdict = caught.value.verdict
    assert (verdict.phase, verdict.more_precision_helps) == ("update", True)
    assert "overflow of float16" in verdict.rule
    assert torch.equal(model.layers[0].weight, before)


def test_running_statistics_are_put_back():
    torch.manual_seed(2)
    model = Plain(torch.nn.BatchNorm1d(4), Fault(torch.sqrt))
    options = make_options(ga=2).watch()
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(poptorch.BadNumberError):
        training(torch.randn(8, 4))
    assert model.layers[0].running_mean.eq(0).all()
    assert model.layers[0].num_batches_tracked == 0


def test_a_verdict_prints_in_few_lines():
    _, _, error = train_until_bad(PLANTED["float16"])
    lines = str(error.verdict).splitlines()
    assert len(lines) <= 15
    assert "  rule:       overflow of float16: 120000 > 65504" in lines
