"""Replicas: copies of a model on other micro-batches train as one copy on all of them."""

import threading

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from popsim_torch.optim import LAMB, SGD, Adam, AdamW, RMSprop
from tests.options import make_options

D, GA, R, MICRO_BATCH = 3, 2, 4, 2
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def threads():
    """Set how many threads PyTorch has, for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Embedding(10, 6),
            nn.Linear(6, 8),
            nn.Dropout(0.25),
            nn.Tanh(),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
        )

    def forward(self, x, y):
        out = self.layers(x)
        return out, nn.functional.cross_entropy(out, y)


def data(rows=MICRO_BATCH * D * GA * R, calls=2):
    torch.manual_seed(1)
    return [(torch.randint(0, 10, (rows,)), torch.randint(0, 3, (rows,))) for _ in range(calls)]


def options_of(replicas, accumulation=None, iterations=D):
    """Return options of a program that takes the same rows for each number of replicas."""
    if accumulation is None:
        accumulation = GA * R // replicas
    options = make_options(iterations, accumulation, seed=3)
    options.replicationFactor(replicas).autoRoundNumIPUs(True)
    return options.outputMode(poptorch.OutputMode.All)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def wrap(replicas, make_optimizer=sgd, stages=1, schedule=None, change=None):
    model, options = Model(), options_of(replicas)
    if schedule is not None:
        options.pipelineSchedule(schedule)
    if change is not None:
        change(options)
    if stages > 1:
        poptorch.set_pipeline_stage_assignment(model.layers, [i * stages // 6 for i in range(6)])
    return model, poptorch.trainingModel(model, options, make_optimizer(model))


def trained(replicas, *args, **more):
    """Train, and return outputs, weights and optimizer states."""
    model, training = wrap(replicas, *args, **more)
    found = {f"call {i}": training(*one)[0] for i, one in enumerate(data())}
    found |= {name: training.getAnchoredTensor(name) for name in training.options.anchored_tensors}
    found |= {name: value.clone() for name, value in model.state_dict().items()}
    training.destroy()
    return found


def close(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "weight decay": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, weight_decay=0.1),
    "combined": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, use_combined_accum=True),
    "separate": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, use_combined_accum=False),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "scaled": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, loss_scaling=64.0),
    "clipped": lambda m: Adam(m.parameters(), lr=0.05, max_grad_norm=0.5),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.05),
    "adamw": lambda m: AdamW(m.parameters(), lr=0.05, weight_decay=0.1),
    "rmsprop": lambda m: RMSprop(m.parameters(), lr=0.01, centered=True),
    "lamb": lambda m: LAMB(m.parameters(), lr=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replicas_train_as_one_with_more_accumulation(name):
    """Also the masks of dropout are those of one replica."""
    expected = trained(1, OPTIMIZERS[name])
    for replicas in (2, 4):
        close(trained(replicas, OPTIMIZERS[name]), expected, rtol=2e-4, atol=1e-5)


ANCHORED = ("Gradient___layers.1.weight", "UpdatedVar___layers.4.weight", "layers.1.bias")


def anchor(options):
    for name in ANCHORED:
        for mode in ("All", "Sum", "Final"):
            options.anchorTensor(f"{name} {mode}", name, output_mode=poptorch.OutputMode[mode])


def anchor_every_second(options):
    anchor(options)
    options.anchorTensor(
        "every", ANCHORED[0], output_mode=poptorch.OutputMode.EveryN, output_return_period=2
    )


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("num_threads", [2, 3, 4, 8])
def test_threads_change_no_bit(num_threads, stages, threads):
    replicas = 4 if stages == 1 else 2  # a pipeline needs several micro-batches
    more = {"stages": stages, "change": anchor}
    if stages > 1:
        more["schedule"] = PipelineSchedule.Interleaved
    threads(1)
    expected = trained(replicas, **more)
    threads(num_threads)
    found = trained(replicas, **more)
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def test_teams_and_lanes_share_the_threads(threads, monkeypatch):
    plans = []
    threads(8)
    for num_threads in (1, 2, 4, 8):
        monkeypatch.setenv("POPSIM_STAGE_THREADS", str(num_threads))
        _, training = wrap(2, stages=2, schedule=PipelineSchedule.Interleaved)
        training.compile(*data()[0])
        plan = training.compiled.executable.plan
        plans.append((plan.num_teams, len(set(plan.lane_of_stage))))
        training.destroy()
    assert plans == [(1, 1), (2, 1), (2, 2), (2, 2)]


def test_anchors_have_an_entry_for_each_replica():
    """In the order of the rows of the inputs; sums and last values are those of a replica."""
    found, one = (trained(replicas, change=anchor_every_second) for replicas in (4, 1))
    shape = (D, GA, R, 8, 6)
    gradients = found[f"{ANCHORED[0]} All"].reshape(shape)
    torch.testing.assert_close(
        gradients, one[f"{ANCHORED[0]} All"].reshape(shape), rtol=2e-4, atol=1e-5
    )
    sums = found[f"{ANCHORED[0]} Sum"].reshape(R, 8, 6)
    torch.testing.assert_close(sums, gradients.sum((0, 1)), rtol=1e-5, atol=1e-6)
    assert torch.equal(found[f"{ANCHORED[0]} Final"].reshape(R, 8, 6), gradients[-1, -1])
    assert torch.equal(found["every"].reshape(1, GA, R, 8, 6)[0], gradients[1])
    weights = found[f"{ANCHORED[1]} All"].reshape(D, GA, R, 8, 8)
    assert torch.equal(weights, weights[:, :1, :1].expand_as(weights))
    assert torch.equal(weights[-1, 0, 0], found["layers.4.weight"])
    assert torch.equal(found[f"{ANCHORED[1]} Final"].reshape(R, 8, 8), weights[-1, -1])


@pytest.mark.parametrize("reduction", ["Mean", "Sum"])
@pytest.mark.parametrize("strategy", ["Post", "Running"])
def test_gradients_are_reduced_as_those_of_micro_batches(reduction, strategy):
    def change(options):
        training = options.Training
        training.accumulationAndReplicationReductionType(poptorch.ReductionType[reduction])
        training.setMeanAccumulationAndReplicationReductionStrategy(
            poptorch.MeanReductionStrategy[strategy]
        )

    make = OPTIMIZERS["sgd"]
    close(trained(4, make, change=change), trained(1, make, change=change), rtol=2e-4, atol=1e-5)


def test_without_accumulation_replicas_accumulate():
    found = {}
    for replicas, accumulation in ((4, 1), (1, 4)):
        model, options = Model(), options_of(replicas, accumulation)
        options.anchorTensor("sum", "FinalReducedGradient___layers.1.weight")
        training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
        training(*data(MICRO_BATCH * D * 4)[0])
        found[replicas] = model.layers[1].weight.detach().clone()
        assert "layers.1.weight_reducedGrad" in training.getTensorNames() or replicas == 1
        training.destroy()
    torch.testing.assert_close(found[4], found[1], rtol=2e-4, atol=1e-5)


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


def test_prints_name_the_replica(capfd):
    class Prints(nn.Module):
        def forward(self, x):
            return poptorch.ipu_print_tensor(x, "x")

    inference = poptorch.inferenceModel(Prints(), options_of(2, 1, 2))
    inference(torch.arange(4.0))
    printed = capfd.readouterr().err
    titles = [line.partition(":")[0] for line in printed.splitlines()[::2]]
    assert titles == ["x_replica_0", "x_replica_1"] * 2
    assert printed.splitlines()[1::2] == [""] * 4


def test_elements_of_queues_have_all_replicas():
    for replication_factor in (1, 2):
        queue = poptorch.OutfeedQueue(replication_factor=replication_factor)

        class Queued(nn.Module):
            def forward(self, x):
                queue.enqueue({"twice": 2 * x, "sum": x.sum()})  # noqa: B023
                return x

        inference = poptorch.inferenceModel(Queued(), options_of(2, 1, 3))
        x = torch.randn(3 * 2 * 4, 5)
        inference(x)
        elements = queue.dequeue()
        rows = x.reshape(3, 2, 4, 5)
        assert torch.equal(elements["twice"], 2 * rows)
        torch.testing.assert_close(elements["sum"], rows.sum((2, 3)))
    queue = poptorch.OutfeedQueue(replication_factor=3)

    class Queued(nn.Module):
        def forward(self, x):
            queue.enqueue(x)
            return x

    with pytest.raises(poptorch.Error, match=r"replication_factor=3.*has 2 replicas"):
        poptorch.inferenceModel(Queued(), options_of(2, 1, 3))(x)


def test_code_of_the_host_runs_for_each_replica_in_turn():
    called = []

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.negate = poptorch.CPU(self.on_host, "negate")

        def on_host(self, x):
            called.append((threading.current_thread(), x.clone()))
            return -x

        def forward(self, x):
            return self.negate(x)

    x = torch.randn(3 * 2 * 4, 5)
    assert torch.equal(poptorch.inferenceModel(Calls(), options_of(2, 1, 3))(x), -x)
    threads, values = zip(*called[-6:], strict=True)
    assert set(threads) == {threading.current_thread()}
    assert torch.equal(torch.cat(values), x)


def test_an_error_in_a_replica_leaves_whole_iterations(threads):
    threads(2)
    model = Model()
    training = poptorch.trainingModel(model, options_of(2, 2), sgd(model))
    x, y = data(MICRO_BATCH * D * 4)[0]
    training(x, y)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    num_threads = threading.active_count()
    wrong = x.clone()
    wrong[-1] = 99
    with pytest.raises(poptorch.Error, match=r"layers\.0|embedding|index"):
        training(wrong, y)
    assert threading.active_count() == num_threads
    training(x, y)
    assert any(not torch.equal(v, before[n]) for n, v in model.state_dict().items())
    training.destroy()


def test_programs_of_several_replicas_are_saved(tmp_path):
    x = data()[0]
    expected = trained(4)
    _, training = wrap(4)
    training.compile(*x)
    training.save(str(tmp_path / "model"), export_model=True)
    training.destroy()
    loaded = poptorch.load(str(tmp_path / "model"))
    for i, one in enumerate(data()):
        assert torch.equal(loaded(*one)[0], expected[f"call {i}"])


def test_automatic_loss_scaling_counts_all_replicas():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 2).half()

        def forward(self, x):
            out = self.linear(x)
            return out, poptorch.identity_loss(out.square().mean(), reduction="none")

    found = {}
    for replicas, accumulation in ((4, 1), (1, 4)):
        model, options = Half(), options_of(replicas, accumulation)
        options.Training.setAutomaticLossScaling(True)
        optimizer = SGD(model.parameters(), lr=0.1, loss_scaling=64.0)
        training = poptorch.trainingModel(model, options, optimizer)
        torch.manual_seed(0)
        for _ in range(4):
            training(torch.randn(D * 4 * 3, 4).half())
        found[replicas] = model.linear.weight.detach().float()
        training.destroy()
    torch.testing.assert_close(found[4], found[1], rtol=2e-2, atol=1e-3)


def test_a_loop_gives_each_replica_elements_of_its_own():
    model, twin = Model(), Model()
    rows = data(2 * 3 * GA * 2, calls=1)[0]
    elements = list(zip(*(one.split(2) for one in rows), strict=True))
    found = {}
    for replicas, own in ((2, model), (1, twin)):
        infeed, outfeed = poptorch.InfeedQueue(elements), poptorch.OutfeedQueue()
        options = options_of(replicas, GA * 2 // replicas)
        training = poptorch.trainingModel(own, options, OPTIMIZERS["sgd"](own))
        del training
        optimizer = OPTIMIZERS["sgd"](own)

        @poptorch.function(options=options_of(replicas, GA * 2 // replicas))
        def run():
            def body(x, y):
                _, loss = own(x, y)  # noqa: B023
                loss.backward()
                optimizer.step()  # noqa: B023
                optimizer.zero_grad()  # noqa: B023
                outfeed.enqueue(loss)  # noqa: B023

            poptorch.repeat(len(elements) // replicas, body, infeed=infeed)  # noqa: B023

        run()
        found[replicas] = outfeed.dequeue()
        run.destroy()
    assert found[2].shape == (3 * GA, 2)
    torch.testing.assert_close(found[2].flatten(), found[1], rtol=2e-4, atol=1e-5)
    close(dict(model.state_dict()), dict(twin.state_dict()), rtol=2e-4, atol=1e-5)


def test_loops_that_carry_values_have_one_replica():
    @poptorch.function(options=options_of(2, 1))
    def run():
        return poptorch.repeat(2, lambda x: x + 1, torch.zeros(2))

    with pytest.raises(poptorch.Error, match=r"repeat.*replicationFactor\(2\).*carries values"):
        run()


def test_fit_trains_replicas_as_more_accumulation():
    found = {}
    x, y = data(2 * GA * 2 * 3, calls=1)[0]
    dataset = torch.utils.data.TensorDataset(x, y)
    for replicas in (1, 2):
        model, options = Model(), options_of(replicas, GA * 2 // replicas, 1)

        class Logits(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = model.layers  # noqa: B023

            def forward(self, x):
                return self.layers(x)

        loader = torch.utils.data.DataLoader(dataset, batch_size=2)
        history = poptorch.fit(
            Logits(),
            loader,
            epochs=2,
            loss=nn.functional.cross_entropy,
            optimizer=OPTIMIZERS["sgd"](model),
            options=options,
            validation_data=loader,
            verbose=0,
        )
        found[replicas] = history["loss"], {n: v.clone() for n, v in model.state_dict().items()}
    torch.testing.assert_close(found[2][0], found[1][0], rtol=2e-4, atol=1e-5)
    close(found[2][1], found[1][1], rtol=2e-4, atol=1e-5)


def test_too_many_ipus():
    model = Model()
    options = options_of(65, 1)
    training = poptorch.trainingModel(model, options, sgd(model))
    with pytest.raises(poptorch.Error, match=r"Too many IPUs requested \(65\)"):
        training(*data(MICRO_BATCH * D * 65)[0])


def test_a_call_with_too_few_rows_names_the_replicas():
    _, training = wrap(4)
    with pytest.raises(AssertionError, match=r"replicationFactor \(R=4\)"):
        training(*(one[:-1] for one in data()[0]))
