"""``Options.watch``: it changes no bit, and what happens after a bad number is up to the user."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options
from tests.parity.watch.planted import PLANTED, Base
from tests.parity.watch.test_planted import train_until_bad


class Network(nn.Module):
    """Dropout, batch norm and products, whose plain SGD updates are fused."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Dropout(0.25), nn.Linear(32, 4)
        )

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x), y)


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "combined": lambda model: poptorch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, use_combined_accum=True
    ),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "without eps": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-60),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True),
}


def trained(optimizer, *, watch, replicas=1, accumulation=2):
    torch.manual_seed(4)
    model = Network()
    options = make_options(d=2, ga=accumulation, seed=3).replicationFactor(replicas)
    if watch:
        options.watch()
    training = poptorch.trainingModel(model, options, OPTIMIZERS[optimizer](model))
    batch = 2 * accumulation * replicas * 8
    results = []
    for _ in range(3):
        results.append(training(torch.randn(batch, 64), torch.randint(4, (batch,))))
    has_checks = any(op.kind == "finite" for op in training.compiled.host_program.graph.ops)
    assert has_checks == watch
    return [*results, *model.state_dict().values()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (1, 2), (2, 2)])
def test_watching_changes_no_bit(optimizer, replicas, accumulation):
    runs = [
        trained(optimizer, watch=watch, replicas=replicas, accumulation=accumulation)
        for watch in (False, True)
    ]
    for plain, watched in zip(*runs, strict=True):
        assert torch.equal(plain, watched)


def test_updates_that_are_fused_with_products_are_checked_at_their_operands():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 128))

    class Trained(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            return poptorch.identity_loss(self.layers(x), "mean")

    training = poptorch.trainingModel(
        Trained(), make_options().watch(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    x = torch.randn(2, 256)
    x[1, 7] = torch.inf
    with pytest.raises(poptorch.BadNumberError) as caught:
        training(x)
    kinds = [op.kind for op in training.compiled.host_program.graph.ops]
    assert "sgd_product_update" in kinds
    verdict = caught.value.verdict
    assert (verdict.source, verdict.op, verdict.layer) == ("op", "matmul", "layers/1")
    assert "the infinity came in with the input 'input' at (1, 7)" in verdict.note


# --- Callbacks ---


def losses_with(then, x, *, d=4):
    torch.manual_seed(2)
    model = Base(torch.log)
    options = make_options(d=d, seed=7).outputMode(poptorch.OutputMode.All)
    if then is not None:
        options.watch(then=then)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1e-3))
    return training(x), model


def with_bad_iterations(*numbers, d=4):
    x = torch.ones(2 * d, 4) * 2
    for number in numbers:
        x[2 * number : 2 * number + 2] = -1
    return x


def test_a_callback_that_returns_true_leaves_the_iteration_out():
    verdicts = []

    def skip(verdict):
        verdicts.append(verdict)
        return True

    x = with_bad_iterations(1, 3)
    loss, model = losses_with(skip, x)
    assert [one.iteration for one in verdicts] == [1, 3]
    twin_loss, twin = losses_with(None, torch.cat([x[:2], x[4:6]]), d=2)
    assert torch.equal(loss[[0, 2]], twin_loss)
    for ours, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("answer", [False, None])
def test_otherwise_the_update_happens_as_it_would_have(answer):
    verdicts = []

    def go_on(verdict):
        verdicts.append(verdict)
        return answer

    x = with_bad_iterations(2)
    loss, model = losses_with(go_on, x)
    plain_loss, plain = losses_with(None, x)
    # Every iteration after the update with NaN is bad, too.
    assert [one.iteration for one in verdicts] == [2, 3]
    assert verdicts[1].source == "parameter"
    assert torch.equal(loss.isnan(), plain_loss.isnan())
    assert torch.equal(loss[:2], plain_loss[:2])
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.isnan(), expected.isnan())


def test_an_error_of_the_callback_ends_the_call():
    def stop(verdict):
        raise KeyError(verdict.op)

    with pytest.raises(KeyError, match="log"):
        losses_with(stop, with_bad_iterations(0))


# --- What is not blamed ---


class Harmless(nn.Module):
    """Bad numbers that are left out, a mask that is infinite on purpose, and then a fault."""

    def forward(self, x):
        logarithms = torch.where(x > 0, x.log(), 0.0)
        attention = x.masked_fill(x > 0, -torch.inf).softmax(1)
        return (logarithms + attention - 5).sqrt()


def test_bad_numbers_that_did_not_lead_to_the_failed_check_are_not_blamed():
    running = poptorch.inferenceModel(Harmless(), make_options().watch())
    with pytest.raises(poptorch.BadNumberError) as caught:
        running(torch.tensor([[1.0, -1.0, 0.0]]))
    assert caught.value.verdict.op == "sqrt"


# --- Queues ---


class Enqueuing(nn.Module):
    def __init__(self, queue):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.queue = queue
        nn.init.eye_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        hidden = self.fc(x)
        self.queue.enqueue(hidden)
        hidden = poptorch.ipu_print_tensor(hidden, "hidden")
        return poptorch.identity_loss(hidden.log(), "mean")


def test_the_repeated_iteration_enqueues_and_prints_nothing(capfd):
    queue = poptorch.OutfeedQueue()
    model = Enqueuing(queue)
    training = poptorch.trainingModel(
        model, make_options().watch(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    with pytest.raises(poptorch.BadNumberError) as caught:
        training(-torch.ones(2, 4))
    assert caught.value.verdict.op == "log"
    assert capfd.readouterr().err.count("hidden") == 1
    assert torch.equal(queue.dequeue(), -torch.ones(1, 2, 4))


def test_an_iteration_that_cannot_be_repeated(monkeypatch):
    def fail(*args, **kwargs):
        raise poptorch.Error("no memory is left")

    monkeypatch.setattr("popsim_torch.executor.replay.build_executable", fail)
    _, _, error = train_until_bad(PLANTED["log of zero"])
    assert error.verdict.source == "unknown"
    assert "the iteration cannot be repeated (no memory is left)" in error.verdict.rule
    assert "the check says: 'IdentityLoss:0' has NaN or an infinity" in str(error)


# --- Inference ---


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


def test_inference_checks_the_outputs():
    running = poptorch.inferenceModel(Root(), make_options(d=4).watch())
    x = torch.ones(8, 3)
    assert torch.equal(running(x), x)
    x[5, 1] = -1
    with pytest.raises(poptorch.BadNumberError) as caught:
        running(x)
    verdict = caught.value.verdict
    assert (verdict.op, verdict.iteration, verdict.index) == ("sqrt", 2, (1, 1))
    assert "sqrt of a negative number" in verdict.rule
    assert running(x.abs()).isfinite().all()


def test_an_infinity_of_a_mask_is_not_called_arithmetic():
    class Mask(nn.Module):
        def forward(self, x):
            return x.masked_fill(x < 0.5, -torch.inf)

    running = poptorch.inferenceModel(Mask(), make_options().watch())
    with pytest.raises(poptorch.BadNumberError) as caught:
        running(torch.tensor([[1.0, 0.0]]))
    assert caught.value.verdict.rule == "no arithmetic: -inf is a constant of the op"


def test_inference_goes_on_after_a_callback():
    verdicts = []
    running = poptorch.inferenceModel(Root(), make_options(d=4).watch(then=verdicts.append))
    x = -torch.ones(4, 3)
    assert running(x).isnan().all()
    assert len(verdicts) == 1


# --- Capsules ---


@pytest.mark.parametrize("name", ["division by zero", "dropout", "micro-batch 3 of 4", "stage 1"])
def test_a_capsule_gives_the_same_verdict(name, tmp_path):
    _, _, error = train_until_bad(PLANTED[name], capsule=tmp_path)
    (file,) = tmp_path.glob("*.capsule")
    assert str(file) in str(error)
    assert str(poptorch.replay(file)) == str(error.verdict)


def test_a_capsule_gives_the_same_verdict_in_a_new_process(tmp_path):
    file = tmp_path / "it.capsule"
    _, _, error = train_until_bad(PLANTED["dropout"], capsule=file)
    command = [sys.executable, "-m", "popsim_torch", "replay", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{error.verdict}\nThis is the verdict in the file.\n"


def test_a_capsule_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "it.capsule"
    _, _, error = train_until_bad(PLANTED["division by zero"], capsule=path)
    (message,) = [one for one in caplog.messages if "the capsule is not written" in one]
    assert "poptorch_py_error" not in message and str(tmp_path / "file") in message
    assert "capsule" not in str(error)


def test_a_file_that_is_no_capsule(tmp_path, capsys):
    from popsim_torch.capsules import replay_command

    file = tmp_path / "it.capsule"
    file.write_text("no capsule")
    with pytest.raises(poptorch.Error, match=r"it\.capsule: this is not a file of popsim_torch"):
        poptorch.replay(file)
    assert replay_command([str(file)]) == 2
    assert "this is not a file of popsim_torch" in capsys.readouterr().err
    assert replay_command([]) == 2


# --- Settings ---


def test_settings_that_do_not_exist():
    options = make_options()
    with pytest.raises(poptorch.Error, match="the only place is 'updates'"):
        options.watch("everything")
    with pytest.raises(poptorch.Error, match="pass 'stop', or a function"):
        options.watch(then="go on")
    with pytest.raises(poptorch.Error, match="pass the path"):
        options.watch(capsule=3)


def test_frozen_options_cannot_watch():
    options = make_options().freeze()
    with pytest.raises(poptorch.Error, match="frozen"):
        options.watch()


def test_a_clone_watches_with_the_same_function():
    then = [].append
    options = make_options().watch(then=then)
    assert options.clone()._watching == options._watching
