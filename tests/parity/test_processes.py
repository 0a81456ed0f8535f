"""Several processes that train one model: like one process with all their data, bit for bit equal
among each other."""

import os
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import popsim_torch as poptorch
from popsim_torch import optim
from tests.ranks import run_ranks

RANK = int(os.environ.get("RANK", "0"))

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1, loss_scaling=4.0),
    "SGD combined": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1, use_combined_accum=True
    ),
    "SGD separate": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.2, use_combined_accum=False
    ),
    "SGD nesterov": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, use_combined_accum=True
    ),
    "SGD clipped": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, use_combined_accum=False, max_grad_norm=0.05
    ),
    "Adam": lambda p: optim.Adam(p, lr=0.01, loss_scaling=8.0),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, max_grad_norm=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "LAMB": lambda p: optim.LAMB(p, lr=0.01),
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}
ITERATIONS, STEPS, SIZE, CALLS = 2, 3, 3, 3


class Model(nn.Module):
    """A small classifier."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(8, 4)

    def forward(self, x, target):
        y = self.fc2(self.drop(torch.relu(self.fc1(x))))
        return y, F.cross_entropy(y, target)


def micro_batches(num_ranks: int, ranks: slice) -> list[torch.Tensor]:
    """Return the data of some ranks: calls, each with all its micro-batches one after the other."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(CALLS, ITERATIONS * STEPS, num_ranks, SIZE, 6, generator=generator)
    target = torch.randint(4, x.shape[:-1], generator=generator)
    return [x[:, :, ranks].flatten(1, 3), target[:, :, ranks].flatten(1, 3)]


def train_part(optimizer: str, dropout: float = 0.0, num_ranks: int = 1, **settings: Any) -> Any:
    """Train a model with the micro-batches of this rank, and return what is left."""
    torch.manual_seed(10 + RANK)  # each process begins with other weights
    options = poptorch.Options().deviceIterations(ITERATIONS).randomSeed(7)
    alone = options.Distributed.numProcesses == 1
    ranks = slice(num_ranks) if alone else slice(RANK, RANK + 1)
    options.Training.gradientAccumulation(STEPS * (num_ranks if alone else 1))
    options.outputMode(poptorch.OutputMode.All)
    if settings.get("reduction"):
        options.Training.accumulationAndReplicationReductionType(
            poptorch.ReductionType[settings["reduction"]]
        )
    if settings.get("running"):
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(
            poptorch.MeanReductionStrategy.Running
        )
    if settings.get("scaling"):
        options.Training.setAutomaticLossScaling(True)
    model = Model(dropout)
    if settings.get("half"):
        model.half()
    if settings.get("stages"):
        model.fc2 = poptorch.BeginBlock(model.fc2, ipu_id=1)
    training = poptorch.trainingModel(model, options, OPTIMIZERS[optimizer](model.parameters()))
    outputs = []
    for x, target in zip(*micro_batches(num_ranks, ranks), strict=True):
        outputs.append(training(x.half() if settings.get("half") else x, target))
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "state": training._device.state.read_all_states(),
        "outputs": outputs,
        "traffic": training.traffic(),
        "rng": training.rng_state,
    }


def assert_equal_ranks(ranks: list[Any]) -> None:
    for other in ranks[1:]:
        for part in ("weights", "state", "rng"):
            torch.testing.assert_close(other[part], ranks[0][part], rtol=0, atol=0)


def assert_like_one(one: Any, ranks: list[Any], **tolerance: float) -> None:
    for name, value in one["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][name], value, **tolerance)


def train_with_each() -> Any:
    return {name: train_part(name, num_ranks=2) for name in OPTIMIZERS}


@pytest.fixture(scope="module")
def trained_with_each(tmp_path_factory):
    return run_ranks(train_with_each, 2, tmp_path_factory.mktemp("optimizers"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_processes_train_like_one(optimizer, trained_with_each):
    one = train_part(optimizer, num_ranks=2)
    ranks = [rank[optimizer] for rank in trained_with_each]
    assert_equal_ranks(ranks)
    assert_like_one(one, ranks)
    assert one["traffic"].exchanges == 0
    assert ranks[0]["traffic"].exchanges == CALLS * ITERATIONS


def test_each_process_draws_its_own_dropout_masks(tmp_path):
    settings: dict[str, Any] = {"optimizer": "Adam", "dropout": 0.5, "num_ranks": 2}
    one = train_part(**settings)
    ranks = run_ranks(train_part, 2, tmp_path, **settings)
    assert_equal_ranks(ranks)
    assert_like_one(one, ranks)
    for call, (outputs, _) in enumerate(one["outputs"]):
        parts = outputs.view(ITERATIONS * STEPS, 2, SIZE, 4).unbind(1)
        for rank, expected in enumerate(parts):
            found = ranks[rank]["outputs"][call][0].view_as(expected)
            torch.testing.assert_close(found, expected)
    # The random numbers continue where those of one process would.
    assert ranks[0]["rng"] == one["rng"]


SETTINGS: dict[str, dict[str, Any]] = {
    "Sum": {"reduction": "Sum"},
    "Running": {"running": True},
    "stages": {"stages": True, "dropout": 0.5},
    "loss scaling": {"scaling": True},
    "half": {"half": True},
    "half, loss scaling, Running": {"half": True, "scaling": True, "running": True},
}


def train_with_settings() -> Any:
    return {
        name: train_part("SGD separate", num_ranks=2, **settings)
        for name, settings in SETTINGS.items()
    }


@pytest.fixture(scope="module")
def trained_with_settings(tmp_path_factory):
    return run_ranks(train_with_settings, 2, tmp_path_factory.mktemp("settings"))


@pytest.mark.parametrize("name", SETTINGS)
def test_options(name, trained_with_settings):
    settings = SETTINGS[name]
    one = train_part("SGD separate", num_ranks=2, **settings)
    ranks = [rank[name] for rank in trained_with_settings]
    assert_equal_ranks(ranks)
    tolerance = {"rtol": 1e-2, "atol": 2e-3} if settings.get("half") else {}
    assert_like_one(one, ranks, **tolerance)


def test_three_processes(tmp_path):
    settings: dict[str, Any] = {"optimizer": "AdamW", "dropout": 0.5, "num_ranks": 3}
    one = train_part(**settings)
    ranks = run_ranks(train_part, 3, tmp_path, **settings)
    assert_equal_ranks(ranks)
    assert_like_one(one, ranks)
    assert ranks[0]["traffic"].exchanges == CALLS * ITERATIONS


def train_replicas(replicas: int) -> Any:
    """Train four replicas in all processes together."""
    torch.manual_seed(10 + RANK)
    options = poptorch.Options().replicationFactor(replicas).randomSeed(7)
    options.deviceIterations(ITERATIONS)
    options.Training.gradientAccumulation(STEPS)
    first = options.Distributed.processId * replicas
    model = Model(dropout=0.5)
    training = poptorch.trainingModel(model, options, OPTIMIZERS["AdamW"](model.parameters()))
    for x, target in zip(*micro_batches(4, slice(first, first + replicas)), strict=True):
        training(x, target)
    state = training._device.state.read_all_states()  # without the gradients of each replica
    state = {name: value for name, value in state.items() if not name.startswith("Accum")}
    return {"weights": dict(model.state_dict()), "state": state, "rng": training.rng_state}


@pytest.mark.parametrize(
    ("processes", "replicas"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_replicas_in_processes_have_the_bits_of_replicas_in_one(processes, replicas, tmp_path):
    one = train_replicas(4)
    ranks = run_ranks(train_replicas, processes, tmp_path, replicas=replicas)
    assert_equal_ranks(ranks)
    torch.testing.assert_close(ranks[0]["weights"], one["weights"], rtol=0, atol=0)
    assert ranks[0]["rng"] == one["rng"]


def other_ways() -> Any:
    """Train with a loop, with fit, with queues, and after the model was off the device."""
    found: dict[str, Any] = {}
    x, target = (part[0] for part in micro_batches(2, slice(RANK, RANK + 1)))

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = poptorch.OutfeedQueue()
    infeed = poptorch.InfeedQueue(list(zip(x.split(SIZE), target.split(SIZE), strict=True)))

    def step(x, target):
        optimizer.zero_grad()
        _, loss = model(x, target)
        loss.backward()
        optimizer.step()
        losses.enqueue(loss)

    @poptorch.function
    def train():
        poptorch.repeat(ITERATIONS * STEPS, step, infeed=infeed)

    train()
    infeed.close()
    found["losses"] = losses.dequeue()
    found["loop"] = {name: value.clone() for name, value in model.state_dict().items()}

    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model.fc2(torch.relu(self.model.fc1(x)))

    scores = Scores()
    batches = list(zip(x.split(SIZE), target.split(SIZE), strict=True))
    rate = torch.optim.SGD(scores.parameters(), lr=0.1)
    poptorch.fit(scores, batches, loss=nn.CrossEntropyLoss(), optimizer=rate, verbose=0)
    found["fit"] = {name: value.clone() for name, value in scores.state_dict().items()}

    queue = poptorch.MaybeOutfeedQueue()
    adam = poptorch.OutfeedOptimizer(
        optim.AdamW(model.parameters(), lr=0.01), queue, poptorch.OutfeedOptimizerMode.BEFORE_APPLY
    )
    options = poptorch.Options()
    for name in ("fc1.weight_reducedGrad", "Gradient___fc1.weight", "Accum___fc1.weight"):
        options.anchorTensor(name, name)
    training = poptorch.trainingModel(model, options, adam)
    for _ in range(2):
        training(x, target)
    found["anchors"] = {name: training.getAnchoredTensor(name) for name in options.anchored_tensors}
    found["queue"] = queue.dequeue()
    training.detachFromDevice()
    training(x, target)
    if RANK == 0:  # validation needs no other process
        poptorch.inferenceModel(training.model)(x, target)
    training.profile(x, target)
    found["traffic"] = training.traffic()
    found["model"] = {name: value.clone() for name, value in model.state_dict().items()}
    return found


def test_loops_queues_anchors_and_the_way_off_the_device(tmp_path):
    first, second = run_ranks(other_ways, 2, tmp_path)
    for part in ("loop", "fit", "model"):
        torch.testing.assert_close(first[part], second[part], rtol=0, atol=0)
    assert not torch.equal(first["losses"], second["losses"])
    assert first["traffic"].exchanges == 4
    parts = [rank["anchors"]["Gradient___fc1.weight"] for rank in (first, second)]
    total = first["anchors"]["fc1.weight_reducedGrad"]
    assert torch.equal(total, parts[0] + parts[1])
    for rank in (first, second):
        assert torch.equal(rank["anchors"]["fc1.weight_reducedGrad"], total)
        (mean,) = [v for k, v in rank["queue"].items() if k.startswith("fc1.weight")]
        assert torch.equal(mean[-1], total / 2)


def train_with_loader(files: str, restart: bool) -> Any:
    """Train for four epochs; after the second one, continue from a file if asked to."""
    torch.manual_seed(RANK)
    options = poptorch.Options().randomSeed(3)
    options.Training.gradientAccumulation(2)
    data = torch.utils.data.TensorDataset(
        torch.randn(24, 6, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 4
    )
    loader = poptorch.DataLoader(options, data, batch_size=2, shuffle=True)
    model = Model(dropout=0.5)
    training = poptorch.trainingModel(model, options, optim.AdamW(model.parameters(), lr=0.1))
    seen = []
    for epoch in range(4):
        for x, target in loader:
            training(x, target)
            seen.append(x)
        if epoch == 1 and restart:
            if RANK == 0:
                training.save(f"{files}/now.new")
                os.rename(f"{files}/now.new", f"{files}/now")
            while not os.path.exists(f"{files}/now"):
                time.sleep(0.01)
            training.destroy()
            training = poptorch.load(f"{files}/now")
    return torch.cat(seen), {n: v.clone() for n, v in training.state_dict().items()}


def test_loaders_and_files(tmp_path):
    plain = run_ranks(train_with_loader, 2, tmp_path, files=str(tmp_path), restart=False)
    again = run_ranks(train_with_loader, 2, tmp_path, files=str(tmp_path), restart=True)
    for found in (*plain, *again):
        torch.testing.assert_close(found[1], plain[0][1], rtol=0, atol=0)
    for epoch in range(4):
        rows = [part for x, _ in plain for part in x[epoch * 12 : (epoch + 1) * 12]]
        assert len({tuple(row.tolist()) for row in rows}) == 24


def train_rounding(**settings: Any) -> Any:
    """Train float16 weights that are rounded at random, in two stages on threads of their own."""
    options = poptorch.Options().randomSeed(7)
    options.Training.gradientAccumulation(STEPS)
    options.Precision.enableStochasticRounding(True)
    model = Model(dropout=0.5).half()
    model.fc2 = poptorch.BeginBlock(model.fc2, ipu_id=1)
    make = OPTIMIZERS["Adam"]
    training = poptorch.trainingModel(model, options, make(model.parameters()))
    for x, target in zip(*micro_batches(2, slice(RANK, RANK + 1)), strict=True):
        training(x[: STEPS * SIZE].half(), target[: STEPS * SIZE])
    state = training._device.state.read_all_states()
    return {"weights": dict(model.state_dict()), "state": state, "rng": training.rng_state}


def test_weights_that_are_rounded_at_random_stay_equal(tmp_path):
    ranks = run_ranks(train_rounding, 2, tmp_path, env={"OMP_NUM_THREADS": "2"})
    assert_equal_ranks(ranks)


def with_a_group() -> Any:
    """Make the default group before the model, or after it."""
    import torch.distributed as dist

    def train() -> list[torch.Tensor]:
        torch.manual_seed(RANK)
        model = Model()
        training = poptorch.trainingModel(model, None, OPTIMIZERS["SGD"](model.parameters()))
        training(*(part[0][:SIZE] for part in micro_batches(2, slice(RANK, RANK + 1))))
        return [value.clone() for value in model.state_dict().values()]

    found = [train()]
    dist.init_process_group("gloo")
    found.append(train())
    sums = torch.ones(1)
    dist.all_reduce(sums)
    dist.destroy_process_group()
    return found, sums.item()


def test_the_default_group_remains_the_programs(tmp_path):
    (first, one), (second, other) = run_ranks(with_a_group, 2, tmp_path)
    assert one == other == 2
    for ours, theirs in zip(first, second, strict=True):
        assert all(map(torch.equal, ours, theirs))
