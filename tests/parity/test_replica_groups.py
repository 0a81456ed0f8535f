"""What replicas share: buffers, inputs of a group, weights of a group."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.optim import SGD, Adam
from tests.parity.replicas import D, options_of, sgd

pytestmark = pytest.mark.filterwarnings("ignore")


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear = nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.register_buffer("seen", torch.zeros(5))
        self.counts = False

    def forward(self, x):
        if self.counts:
            self.seen.add_(x.sum(0))
        out = self.linear(self.norm(x))
        return out, poptorch.identity_loss(out.square().mean(), reduction="none")


def test_each_replica_has_statistics_of_its_own():
    model, twin = Normed(), Normed()
    training = poptorch.trainingModel(
        model, options_of(2, 3), torch.optim.SGD(model.parameters(), lr=0.0)
    )
    torch.manual_seed(2)
    x = torch.randn(D * 3 * 2 * 4, 5)
    out, _ = training(x)
    rows = x.reshape(D * 3, 2, 4, 5)
    expected = [twin(one)[0] for one in rows[:, 0]]
    torch.testing.assert_close(out.reshape(D * 3, 2, 4, 2)[:, 0], torch.stack(expected))
    torch.testing.assert_close(model.norm.running_mean, twin.norm.running_mean)
    torch.testing.assert_close(model.norm.running_var, twin.norm.running_var)
    training.destroy()


def test_buffers_that_change_need_a_copy_for_each_replica():
    x = torch.randn(D * 2 * 2 * 4, 5)

    def make(broadcast, size=1):
        model = Normed()
        model.counts = True
        options = options_of(2, 2).broadcastBuffers(broadcast)
        if size > 1:
            options.inputReplicaGrouping(size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return model, poptorch.trainingModel(model, options, optimizer)

    _, training = make(True)
    with pytest.raises(poptorch.Error, match=r"'seen' in place.*broadcasting buffers.*"):
        training(x)
    model, training = make(False)
    training(x)
    torch.testing.assert_close(model.seen, x.reshape(D * 2, 2, 4, 5)[:, 0].sum((0, 1)))
    training(x)
    torch.testing.assert_close(model.seen, 2 * x.reshape(D * 2, 2, 4, 5)[:, 0].sum((0, 1)))
    # Replicas with the same input change their buffers alike.
    model, training = make(True, 2)
    training(x)
    torch.testing.assert_close(model.seen, x.sum(0))


GROUPINGS = {
    "Consecutive": (poptorch.CommGroupType.Consecutive, 2, [0, 0, 1, 1]),
    "Orthogonal": (poptorch.CommGroupType.Orthogonal, 2, [0, 1, 0, 1]),
    "NoGrouping": (poptorch.CommGroupType.NoGrouping, 0, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", ["Consecutive", "Orthogonal"])
@pytest.mark.parametrize("training", [True, False])
def test_replicas_of_an_input_group_get_the_same_rows(name, training):
    kind, size, groups = GROUPINGS[name]
    torch.manual_seed(0)
    linear = nn.Linear(4, 3)
    options = options_of(4, 2 if training else 1).inputReplicaGrouping(size, kind)

    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            out = self.linear(x)
            return out, poptorch.identity_loss(out.square().mean(), reduction="none")

    model = Squares()
    if training:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        wrapped = poptorch.trainingModel(model, options, optimizer)
    else:
        wrapped = poptorch.inferenceModel(model, options)
    steps = 2 if training else 1
    x = torch.randn(D * steps * 2 * 3, 4)
    out, _ = wrapped(x)
    rows = x.reshape(D * steps, 2, 3, 4)[:, groups]
    torch.testing.assert_close(out, linear(rows).reshape(-1, 3).detach())


class Grouped(nn.Module):
    def __init__(self, num_groups):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(num_groups, 4))
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        out = self.linear(x * self.scale)
        return out, poptorch.identity_loss(out.square().mean(), reduction="none")


@pytest.mark.parametrize("name", GROUPINGS)
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "clipped"])
def test_a_weight_can_differ_between_groups_of_replicas(name, optimizer, threads):
    """Its gradients are added up within a group, and divided by the number of all gradients."""
    kind, size, groups = GROUPINGS[name]
    num_groups = max(groups) + 1
    make = {
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.05),
        "clipped": lambda p: SGD(p, lr=0.1, max_grad_norm=1e6),
    }[optimizer]
    twin = Grouped(num_groups)
    x = torch.randn(D * 2 * 4 * 3, 4)
    before = None
    for num_threads in (1, 3):
        threads(num_threads)
        one = Grouped(num_groups)
        training = poptorch.trainingModel(one, options_of(4, 2), make(one.parameters()))
        training.scale.replicaGrouping(kind, size, poptorch.VariableRetrievalMode.OnePerGroup)
        outputs = [training(x)[0] for _ in range(2)]
        weights = {n: v.clone() for n, v in one.state_dict().items()}
        training.destroy()
        if before is not None:
            assert all(map(torch.equal, outputs, before[0]))
            assert all(torch.equal(weights[n], before[1][n]) for n in weights)
        before = outputs, weights
    eager = (
        make(twin.parameters())
        if optimizer != "clipped"
        else torch.optim.SGD(twin.parameters(), lr=0.1)
    )
    expected = []
    for _ in range(2):
        for step in x.reshape(D, 2, 4, 3, 4):
            eager.zero_grad()
            for rows in step:
                for replica, own in enumerate(rows):
                    out = twin.linear(own * twin.scale[groups[replica]])
                    (out.square().mean() / 8).backward()
                    expected.append(out.detach())
            eager.step()
    torch.testing.assert_close(torch.cat(outputs), torch.cat(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, dict(twin.state_dict()), rtol=1e-4, atol=1e-5)


def test_states_of_a_grouped_weight_have_its_groups():
    model = Grouped(2)
    optimizer = Adam(model.parameters(), lr=0.05)
    training = poptorch.trainingModel(model, options_of(4, 2), optimizer)
    training.scale.replicaGrouping(
        poptorch.CommGroupType.Consecutive, 2, poptorch.VariableRetrievalMode.OnePerGroup
    )
    x = torch.randn(D * 2 * 4 * 3, 4)
    training(x)
    saved = optimizer.state_dict()
    assert saved["ipu_state"]["Accl1___scale"].shape == (2, 4)
    assert saved["ipu_state"]["Step___scale"].shape == (2, 1)
    optimizer.load_state_dict(saved)
    training.setOptimizer(optimizer)
    before = model.scale.detach().clone()
    training(x)
    assert not torch.equal(before, model.scale)


@pytest.mark.parametrize(
    ("shape", "call", "message"),
    [
        ((3, 4), ("Consecutive", 2, "OnePerGroup"), r"form 2 groups.*\(3, 4\).*\(2, \.\.\.\)"),
        ((4,), ("Consecutive", 3, "OnePerGroup"), "must divide the replication factor, 4"),
        ((2, 4), ("Consecutive", 2, "AllReplicas"), "reads 4 values.*room for 2"),
        ((), ("NoGrouping", 0, "OnePerGroup"), "no dimension for the groups"),
    ],
)
def test_groups_that_do_not_fit(shape, call, message):
    model = Grouped(2)
    model.scale = nn.Parameter(torch.zeros(shape))
    training = poptorch.trainingModel(model, options_of(4, 2), sgd(model))
    kind, size, mode = call
    with pytest.raises(poptorch.Error, match=message):
        training.scale.replicaGrouping(
            poptorch.CommGroupType[kind], size, poptorch.VariableRetrievalMode[mode]
        )


def test_a_grouped_weight_is_saved_with_its_groups(tmp_path):
    model = Grouped(2)
    training = poptorch.trainingModel(model, options_of(4, 2), sgd(model))
    training.scale.replicaGrouping(
        poptorch.CommGroupType.Orthogonal, 2, poptorch.VariableRetrievalMode.OnePerGroup
    )
    x = torch.randn(D * 2 * 4 * 3, 4)
    training(x)
    training.save(str(tmp_path / "model"), export_model=True)
    expected = training(x)[0], model.scale.detach().clone()
    training.destroy()
    loaded = poptorch.load(str(tmp_path / "model"))
    assert torch.equal(loaded(x)[0], expected[0])
    loaded.copyWeightsToHost()
    assert torch.equal(loaded.state_dict()["scale"], expected[1])
    # Scheduled values reach a grouped weight, too: another rate needs no compilation.
    loaded.setOptimizer(torch.optim.SGD(loaded.model.parameters(), lr=0.0, momentum=0.0))
    loaded.destroy()


def test_the_executable_cache_tells_groups_apart(tmp_path):
    """Programs with other groups differ, although shapes are the same."""
    x, found = torch.randn(D * 2 * 4 * 3, 4), []
    for kind in (poptorch.CommGroupType.Consecutive, poptorch.CommGroupType.Orthogonal) * 2:
        model = Grouped(2)
        options = options_of(4, 2).enableExecutableCaching(str(tmp_path))
        training = poptorch.trainingModel(model, options, sgd(model))
        training.scale.replicaGrouping(kind, 2, poptorch.VariableRetrievalMode.OnePerGroup)
        found.append(training(x)[0].clone())
        training.destroy()
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])
    assert len(list(tmp_path.glob("*.popart")) or list(tmp_path.iterdir())) == 2
