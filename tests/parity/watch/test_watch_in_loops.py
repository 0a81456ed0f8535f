"""``Options.watch`` in loops on the device: of ``fit``, functions and pipelines."""

import copy
import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import _native
from popsim_torch.files.container import read_sections, write_sections
from popsim_torch.files.parts import pack, unpack
from tests.options import make_options
from tests.parity.watch.planted import Fault

CONTENT = "a device iteration"  # of a capsule
NUM = 8
BAD = 5  # the bad element of most runs


class Model(nn.Module):
    """A layer, a fault, and a layer; forward returns the loss."""

    def __init__(self, fault=torch.log):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.bad = Fault(fault)
        self.last = nn.Linear(4, 4)
        nn.init.eye_(self.first.weight)
        nn.init.zeros_(self.first.bias)

    def forward(self, x):
        return self.last(self.bad(self.first(x))).mean()


class Staged(Model):
    def __init__(self):
        super().__init__()
        poptorch.BeginBlock(self.first, "one", ipu_id=0)
        poptorch.BeginBlock(self.bad, "two", ipu_id=1)


def elements(*bad, num=NUM, value=-1.0):
    """Return elements for a loop, some of which have a bad row."""
    torch.manual_seed(1)
    data = [torch.rand(2, 4) + 1 for _ in range(num)]
    for number in bad:
        data[number][1, 2] = value
    return data


def sgd(model, lr=1e-3):
    return torch.optim.SGD(model.parameters(), lr=lr)


def made(kind=Model, *args):
    torch.manual_seed(2)
    return kind(*args)


def watching(ga=1, *, replicas=1, **watch):
    options = make_options(ga=ga, seed=7).replicationFactor(replicas)
    return options.watch(**watch)


def fitted(model, data, options, lr=1e-3, **others):
    return poptorch.fit(model, data, optimizer=sgd(model, lr), options=options, verbose=0, **others)


def caught(model, data, options, **others):
    """Return the verdict about a fit that fails, and the weights that it leaves."""
    with pytest.raises(poptorch.BadNumberError) as error:
        fitted(model, data, options, **others)
    assert "in iteration" not in str(error.value)
    verdict = error.value.verdict
    assert str(verdict) in str(error.value)
    return verdict, weights_of(model)


def weights_of(model):
    return [one.detach().clone() for one in model.parameters()]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


# --- The verdict ---


@pytest.mark.parametrize("ga", [1, 4])
def test_the_verdict_names_op_layer_and_position(ga):
    verdict, weights = caught(made(), elements(BAD), watching(ga))
    assert (verdict.op, verdict.layer, verdict.phase) == ("log", "model/bad", "forward")
    assert verdict.rule.startswith("log of a negative number: log(-0.99")
    assert (verdict.iteration, verdict.micro_batch) == divmod(BAD, ga)
    assert (verdict.index, verdict.replica) == ((1, 2), 0)
    assert __file__ in verdict.line or "planted.py" in verdict.line
    twin = made()
    fine = BAD // ga * ga
    fitted(twin, elements(num=fine), make_options(ga=ga, seed=7))
    assert_equal(weights, weights_of(twin))


@pytest.mark.parametrize("schedule", ["Default", "Grouped", "Interleaved"])
def test_a_pipeline_of_two_stages(schedule):
    options = watching(4).pipelineSchedule(getattr(poptorch.PipelineSchedule, schedule))
    verdict, weights = caught(made(Staged), elements(BAD), options)
    assert (verdict.op, verdict.stage) == ("log", 1)
    assert (verdict.iteration, verdict.micro_batch) == (1, 1)
    twin = made(Staged)
    fitted(twin, elements(num=4), make_options(ga=4, seed=7))
    assert_equal(weights, weights_of(twin))


@pytest.mark.parametrize("ga", [1, 2])
def test_replicas(ga):
    verdict, _ = caught(made(), elements(BAD), watching(ga, replicas=2))
    # Each replica takes the next element.
    assert (verdict.iteration, verdict.replica) == (BAD // (2 * ga), 1)
    assert verdict.micro_batch == BAD // 2 % ga
    assert verdict.layer == "model/bad"


def test_a_bad_number_of_the_data():
    model = made(Model, torch.exp)
    verdict, _ = caught(model, elements(BAD, value=torch.nan), watching())
    assert (verdict.source, verdict.tensor, verdict.index) == ("input", "input", (1, 2))
    assert verdict.iteration == BAD
    assert "NaN came in through the input 'input' at element (1, 2)" in verdict.rule


def test_a_learning_rate_that_is_too_large():
    model = made(Model, lambda x: x)
    before = weights_of(model)
    options = watching()
    with pytest.raises(poptorch.BadNumberError) as error:
        poptorch.fit(
            model,
            [1e5 * one for one in elements()],
            optimizer=sgd(model, 1e35),
            options=options,
            verbose=0,
        )
    verdict = error.value.verdict
    assert (verdict.phase, verdict.iteration) == ("update", 0)
    assert_equal(weights_of(model), before)


class Masked(Model):
    """The loss is NaN, and ``relu`` makes the gradients of its negative elements zero."""

    def forward(self, x):
        hidden = self.first(x).relu()
        return (hidden / hidden.sum(1, keepdim=True)).mean()


@pytest.mark.parametrize("ga", [1, 4])
def test_a_loss_that_is_bad_although_all_gradients_are_numbers(ga):
    steps = []
    data = [one - 2 * one if number == BAD else one for number, one in enumerate(elements())]
    options = watching(ga, then=lambda verdict: steps.append(verdict) or True)
    logs = []

    class Note:
        def on_epoch_end(self, epoch, values):
            logs.append(values["loss"])

    fitted(made(Masked), data, options, callbacks=[Note()])
    (verdict,) = steps
    assert (verdict.op, verdict.rule) == ("div", "undefined: 0 / 0")
    assert (verdict.iteration, verdict.micro_batch) == divmod(BAD, ga)
    assert logs[0].isnan().nonzero().flatten().tolist() == [BAD]


def test_the_data_ends_in_the_bad_iteration():
    infeed = poptorch.InfeedQueue(elements(1, num=3))
    model = made()
    optimizer = sgd(model)

    @poptorch.function(options=watching())
    def train():
        poptorch.repeat(4, lambda x: step(model, optimizer, x), [], infeed, gradient_accumulation=4)

    with infeed, pytest.raises(poptorch.Error, match="end of the dataset"):
        train()


def test_the_elements_of_all_loops_of_a_function_are_their_own():
    """The first loop keeps elements until its end, and the second one goes on after them."""
    model, infeed = made(), poptorch.InfeedQueue(elements(6))
    optimizer = sgd(model)

    @poptorch.function(options=watching(then=lambda verdict: True))
    def train():
        for _ in range(2):
            poptorch.repeat(4, lambda x: step(model, optimizer, x), [], infeed)

    with infeed:
        train()
        assert infeed.statistics()["taken"] == NUM
        train.destroy()
    twin = made()
    data = elements()
    fitted(twin, data[:6] + data[7:], make_options(seed=7))
    assert_equal(weights_of(model), weights_of(twin))


# --- Functions ---


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()


def test_a_captured_tensor():
    model = made(Model, lambda x: x)
    optimizer, infeed = sgd(model), poptorch.InfeedQueue(elements())

    @poptorch.function(options=watching())
    def train(scale):
        poptorch.repeat(4, lambda x: step(model, optimizer, x * scale), [], infeed)

    scale = torch.ones(4)
    with infeed:
        train(scale)
        scale[3] = torch.inf
        before = weights_of(model)
        with pytest.raises(poptorch.BadNumberError) as error:
            train(scale)
        verdict = error.value.verdict
        assert "the infinity came in" in f"{verdict.rule} {verdict.note}"
        assert "at (3,)" in verdict.note or verdict.index == (3,)
        assert verdict.iteration == 4
        assert_equal(weights_of(model), before)
        train.destroy()


def test_carried_values_are_those_before_the_iteration():
    model = made()
    optimizer = sgd(model)
    seen = []

    @poptorch.function(options=watching(then=lambda verdict: seen.append(verdict) or True))
    def train(count, total):
        def body(count, total, x):
            step(model, optimizer, x)
            return count + 1, total + x.sum()

        return poptorch.repeat(NUM, body, [count, total], infeed)

    data = elements(BAD)
    with poptorch.InfeedQueue(data) as infeed:
        count, total = train(torch.tensor(0), torch.tensor(0.0))
        train.destroy()
    assert [one.iteration for one in seen] == [BAD]
    assert count == NUM - 1
    expected = torch.tensor(0.0)
    for number, x in enumerate(data):
        expected += 0 if number == BAD else x.sum()
    torch.testing.assert_close(total, expected)


def test_a_carried_value_that_leads_to_the_fault():
    model = made()
    optimizer = sgd(model)

    @poptorch.function(options=watching())
    def train(x):
        def body(x):
            step(model, optimizer, x)
            return x - 1

        return poptorch.repeat(NUM, body, [x])

    with pytest.raises(poptorch.BadNumberError) as error:
        train(torch.full((2, 4), 3.5))
    verdict = error.value.verdict
    assert (verdict.iteration, verdict.op) == (4, "log")


def test_an_infinity_that_is_only_carried_is_no_fault():
    model = made()
    optimizer = sgd(model)

    @poptorch.function(options=watching())
    def train(best):
        def body(best, x):
            step(model, optimizer, x)
            return best.clone()

        return poptorch.repeat(NUM, body, [best], infeed)

    with poptorch.InfeedQueue(elements()) as infeed:
        assert train(torch.tensor(torch.inf)).isinf()
        train.destroy()


def test_a_while_loop():
    model = made()
    optimizer = sgd(model)

    @poptorch.function(options=watching())
    def train(n):
        def body(n, x):
            step(model, optimizer, x)
            return n + 1

        return poptorch.while_loop(lambda n: n < NUM, body, [n], infeed)

    with poptorch.InfeedQueue(elements(BAD)) as infeed:
        with pytest.raises(poptorch.BadNumberError) as error:
            train(torch.tensor(0))
        assert error.value.verdict.iteration == BAD
        assert train(torch.tensor(6)) == 8
        train.destroy()


def test_a_pipeline_function():
    model = made()
    optimizer, outfeed = sgd(model), poptorch.OutfeedQueue()
    infeed = poptorch.InfeedQueue(elements(BAD))

    @poptorch.function(options=watching())
    def train():
        poptorch.pipeline(
            [model.first, lambda x: model.last(model.bad(x)).mean()],
            4,
            2,
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            optimizer_function=lambda loss: (optimizer, loss),
        )

    with infeed, pytest.raises(poptorch.BadNumberError) as error:
        train()
    verdict = error.value.verdict
    assert (verdict.op, verdict.iteration, verdict.micro_batch) == ("log", 1, 1)
    train.destroy()
    outfeed.close()


# --- Updates in the middle of an iteration ---


OPTIMIZERS = {"sgd": sgd, "adam": lambda model: torch.optim.Adam(model.parameters(), 1e-3)}


def trained_early(data, optimizer, options):
    """Train with a body that reads a weight after its update; return model, norms and error."""
    model, norms = made(), poptorch.OutfeedQueue()
    stepped, caught = OPTIMIZERS[optimizer](model), None

    @poptorch.function(options=options)
    def train():
        def body(x):
            step(model, stepped, x)
            norms.enqueue(model.last.weight.norm())

        poptorch.repeat(len(data), body, [], infeed)

    with poptorch.InfeedQueue(data) as infeed:
        try:
            train()
        except poptorch.BadNumberError as error:
            caught = error
        train.destroy()
    return model, norms.dequeue(), caught


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_that_the_body_reads_after_their_update(optimizer):
    model, norms, error = trained_early(elements(BAD), optimizer, watching())
    verdict = error.verdict
    assert (verdict.op, verdict.layer, verdict.iteration) == ("log", "model/bad", BAD)
    twin, wanted, _ = trained_early(elements(num=BAD), optimizer, make_options(seed=7))
    assert_equal(weights_of(model), weights_of(twin))
    # The queue has the norm of the failed iteration, too.
    assert torch.equal(norms[:BAD], wanted)
    assert norms[BAD:].isnan().tolist() == [True]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_early_update_that_is_left_out(optimizer):
    options = watching(then=lambda verdict: True)
    data = elements(2, BAD)
    model, norms, error = trained_early(data, optimizer, options)
    assert error is None
    rest = [x for number, x in enumerate(data) if number not in (2, BAD)]
    twin, wanted, _ = trained_early(rest, optimizer, make_options(seed=7))
    assert_equal(weights_of(model), weights_of(twin))
    assert norms.isnan().nonzero().flatten().tolist() == [2, BAD]
    assert torch.equal(norms[norms.isfinite()], wanted)


def test_checks_of_early_updates_change_no_bit():
    found = []
    for options in (make_options(seed=7), watching()):
        model = made()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)

        def train(model=model, optimizer=optimizer):
            def body(x):
                step(model, optimizer, x)
                step(model, optimizer, x + 1)

            poptorch.repeat(NUM, body, [], infeed)

        function = poptorch.function(train, options=options)
        with poptorch.InfeedQueue(elements()) as infeed:
            function()
        kinds = [op.kind for op in function.programs[0].compiled.host_program.graph.ops]
        function.destroy()
        found.append(([*weights_of(model)], "finite" in kinds))
    (plain, has_none), (watched, has_checks) = found
    assert (has_none, has_checks) == (False, True)
    assert_equal(plain, watched)


# --- Callbacks ---


@pytest.mark.parametrize(
    ("kind", "ga", "replicas"), [(Model, 1, 1), (Model, 4, 1), (Model, 2, 2), (Staged, 4, 1)]
)
def test_an_iteration_that_is_left_out(kind, ga, replicas):
    verdicts = []

    def skip(verdict):
        verdicts.append(verdict)
        return True

    model, size = made(kind), ga * replicas
    data = elements(5, 13, num=24)
    options = watching(ga, replicas=replicas, then=skip)
    history = fitted(model, data, options, steps_per_execution=8)
    assert [one.iteration for one in verdicts] == [5 // size, 13 // size]
    assert len(history["loss"]) == 1
    twin = made(kind)
    bad = {5 // size, 13 // size}
    rest = [x for number, x in enumerate(data) if number // size not in bad]
    fitted(twin, rest, make_options(ga=ga, seed=7).replicationFactor(replicas))
    assert_equal(weights_of(model), weights_of(twin))


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("ga", [1, 2])
def test_each_step_has_one_result(ga, answer):
    steps, logs, verdicts = [], [], []

    class Note:
        def on_batch_end(self, step, logs):
            steps.append(step)

        def on_epoch_end(self, epoch, values):
            logs.append(values["loss"])

    def then(verdict):
        verdicts.append(verdict)
        return answer

    options = watching(ga, then=then)
    fitted(made(), elements(1), options, steps_per_execution=4, callbacks=[Note()])
    (losses,) = logs
    assert steps == list(range(NUM))
    assert losses.shape == (NUM,)
    assert losses[1].isnan()
    assert losses[0].isfinite()
    assert losses[2:].isfinite().all() == answer
    assert verdicts[0].iteration == 1 // ga


def test_the_progress_counts_each_step_once():
    model = made()
    optimizer, infeed = sgd(model), poptorch.InfeedQueue(elements(1, 6))
    answers = iter([True, False, False])

    @poptorch.function(options=watching(then=lambda verdict: next(answers)))
    def train():
        poptorch.repeat(
            NUM, lambda x: step(model, optimizer, x), [], infeed, gradient_accumulation=4
        )

    with infeed:
        train()
    assert train.programs[0].num_iterations == NUM
    train.destroy()


def test_an_update_that_a_callback_allows():
    model, plain = made(), made()
    seen = []
    fitted(model, elements(6), watching(then=seen.append))
    fitted(plain, elements(6), make_options(seed=7))
    assert [one.iteration for one in seen] == [6, 7]
    assert seen[1].source == "parameter"
    for one, other in zip(weights_of(model), weights_of(plain), strict=True):
        assert torch.equal(one.isnan(), other.isnan())


def test_an_error_of_the_callback_ends_the_fit():
    def stop(verdict):
        raise KeyError(verdict.op)

    with pytest.raises(KeyError, match="log"):
        fitted(made(), elements(BAD), watching(then=stop))


def test_the_error_after_an_iteration_that_was_left_out_names_its_own_iteration():
    def failing():
        yield from elements(1, num=3)
        raise OSError("no more")

    model = made()
    optimizer, infeed = sgd(model), poptorch.InfeedQueue(failing())

    @poptorch.function(options=watching(then=lambda verdict: True))
    def train():
        poptorch.repeat(NUM, lambda x: step(model, optimizer, x), [], infeed)

    with infeed, pytest.raises(poptorch.Error, match=r"iteration 3 of the loop.*did not begin"):
        train()


# --- After the error ---


def test_the_function_can_be_called_again_and_nothing_is_left():
    model = made()
    optimizer, infeed = sgd(model), poptorch.InfeedQueue(elements(BAD, num=4 * NUM))

    @poptorch.function(options=watching())
    def train():
        poptorch.repeat(4, lambda x: step(model, optimizer, x), [], infeed, gradient_accumulation=2)

    train()
    with pytest.raises(poptorch.BadNumberError) as error:
        train()
    assert (error.value.verdict.iteration, error.value.verdict.micro_batch) == (2, 1)
    taken = infeed.statistics()["taken"]
    assert taken == 6
    train()  # the next elements
    assert infeed.statistics()["taken"] == taken + 4
    assert train.programs[0].compiled.executable.num_iterations == 4
    infeed.close()
    train.destroy()
    assert all(one.isfinite().all() for one in model.parameters())


def test_another_loop_can_take_the_elements_after_the_error():
    model, other = made(), made()
    infeed = poptorch.InfeedQueue(elements(1))
    functions = []
    for one in (model, other):
        optimizer = sgd(one)

        def train(one=one, optimizer=optimizer):
            poptorch.repeat(2, lambda x: step(one, optimizer, x), [], infeed)

        functions.append(poptorch.function(train, options=watching()))
    with infeed:
        with pytest.raises(poptorch.BadNumberError):
            functions[0]()
        functions[1]()
        functions[1].destroy()
    twin = made()
    fitted(twin, elements()[2:4], make_options(seed=7))
    assert_equal(weights_of(other), weights_of(twin))


def test_no_thread_is_left():
    before = {one.ident for one in threading.enumerate()}
    caught(made(), elements(BAD), watching(4))
    gc.collect()
    assert {one.ident for one in threading.enumerate()} <= before


def test_a_program_goes_with_the_elements_that_it_holds():
    model = made()
    optimizer, infeed = sgd(model), poptorch.InfeedQueue(elements(0))

    @poptorch.function(options=watching())
    def train():
        poptorch.repeat(2, lambda x: step(model, optimizer, x), [], infeed)

    with pytest.raises(poptorch.BadNumberError):
        train()
    infeed.close()
    known = weakref.ref(train)
    del train
    gc.collect()
    assert known() is None


SCRIPT = """
import torch
from torch import nn
import popsim_torch as poptorch
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
infeed = poptorch.InfeedQueue([torch.full((2, 4), torch.nan)] * 1000)
options = poptorch.Options().showCompilationProgressBar(False)

@poptorch.function(options=options.watch(capsule="it.capsule"))
def train():
    def body(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    poptorch.repeat(100, body, [], infeed, gradient_accumulation=10)

try:
    train()
except poptorch.BadNumberError as error:
    print(error.verdict.source)
"""


def test_the_interpreter_ends_after_the_error(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "input\n"), done.stderr
    assert (tmp_path / "it.capsule").exists()


# --- Capsules ---


@pytest.mark.parametrize("kind", [Model, Staged])
def test_a_capsule_gives_the_same_verdict(kind, tmp_path):
    options = watching(4, capsule=tmp_path)
    with pytest.raises(poptorch.BadNumberError) as error:
        fitted(made(kind), elements(BAD), options)
    (file,) = tmp_path.glob("*.capsule")
    assert file.name == f"{kind.__name__}_1.capsule"
    assert str(file) in str(error.value)
    assert str(poptorch.replay(file)) == str(error.value.verdict)


def test_a_capsule_with_a_captured_tensor(tmp_path):
    model = made(Model, lambda x: x.sqrt())
    optimizer = sgd(model)
    file = tmp_path / "it.capsule"

    @poptorch.function(options=watching(2, capsule=file))
    def train(shift):
        poptorch.repeat(
            4, lambda x: step(model, optimizer, x + shift), [], infeed, gradient_accumulation=2
        )

    with poptorch.InfeedQueue(elements()) as infeed:
        with pytest.raises(poptorch.BadNumberError) as error:
            train(torch.tensor([0.0, -9.0, 0.0, 0.0]))
        train.destroy()
    assert str(poptorch.replay(file)) == str(error.value.verdict)
    assert error.value.verdict.op == "sqrt"


def capsule_of(tmp_path):
    """Return the file of a fit whose element 5 of 8 is bad, and the error."""
    with pytest.raises(poptorch.BadNumberError) as error:
        fitted(made(), elements(BAD), watching(4, capsule=tmp_path / "it.capsule"))
    return tmp_path / "it.capsule", error.value


def with_facts(file, change):
    """Write a capsule again with other facts."""
    sections = read_sections(file, CONTENT)
    facts = change(unpack(sections, "facts"))
    write_sections(file, CONTENT, {**sections, **pack("facts", facts, "The facts")})


def test_a_capsule_of_before_there_were_shared_inputs(tmp_path):
    file, error = capsule_of(tmp_path)
    with_facts(file, lambda facts: facts[:-1])
    assert str(poptorch.replay(file)) == str(error.verdict)


@pytest.mark.parametrize("shared", [(7,), (-1,), (True,), 0])
def test_a_capsule_with_shared_inputs_that_it_does_not_have(shared, tmp_path):
    file, _ = capsule_of(tmp_path)
    with_facts(file, lambda facts: (*facts[:-1], shared))
    with pytest.raises(poptorch.Error, match="its shared inputs are none of its inputs"):
        poptorch.replay(file)


def test_no_run_has_a_bad_iteration():
    model = made()
    optimizer, infeed = sgd(model), poptorch.InfeedQueue(elements())

    @poptorch.function(options=watching())
    def train():
        poptorch.repeat(2, lambda x: step(model, optimizer, x), [], infeed)

    with infeed:
        train()
        executable = train.programs[0].compiled.executable
        with pytest.raises(_native.ERRORS, match="bad_inputs: no run has ended"):
            executable.bad_inputs([])
        with pytest.raises(_native.ERRORS, match="resume: no run has ended"):
            executable.resume([], True)
        train.destroy()


# --- No bit changes ---


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Dropout(0.25), nn.Linear(32, 4)
        )

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x), y)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize(("ga", "replicas"), [(1, 1), (3, 1), (2, 2)])
def test_watching_changes_no_bit(optimizer, ga, replicas):
    found = []
    data = [(torch.randn(4, 64), torch.randint(4, (4,))) for _ in range(12)]
    for watch in (False, True):
        model = made(Network)
        options = make_options(ga=ga, seed=7).replicationFactor(replicas)
        history = poptorch.fit(
            model,
            data,
            epochs=2,
            optimizer=optimizer(model.parameters(), lr=0.05),
            options=options.watch() if watch else options,
            verbose=0,
        )
        found.append((history["loss"], copy.deepcopy(model.state_dict())))
    (losses, state), (watched_losses, watched_state) = found
    assert losses == watched_losses
    assert_equal(state.values(), watched_state.values())


@pytest.mark.parametrize(("watch", "depth"), [(False, 3), (True, 8 + 3)])
def test_only_a_watched_loop_needs_a_longer_queue(watch, depth):
    model = made()
    optimizer, infeed = sgd(model), poptorch.InfeedQueue(elements())
    options = make_options()

    @poptorch.function(options=options.watch() if watch else options)
    def train():
        poptorch.repeat(
            NUM, lambda x: step(model, optimizer, x), [], infeed, gradient_accumulation=NUM
        )

    with infeed:
        train()
        assert infeed._native.depth == depth
    train.destroy()


# --- Loops that do not train ---


def test_loops_that_do_not_train_say_that_they_are_not_watched(caplog, monkeypatch):
    monkeypatch.setattr("popsim_torch.logs._warned", set())
    model = made()
    data = elements(BAD)
    assert poptorch.predict(model, data, options=watching()).isnan().any()
    poptorch.evaluate(model, data, options=watching(), verbose=0)
    (message,) = [one for one in caplog.messages if "Options.watch" in one]
    assert "steps no optimizer" in message


def test_validation_and_conditions_say_nothing(caplog, monkeypatch):
    monkeypatch.setattr("popsim_torch.logs._warned", set())
    model = made()
    history = fitted(
        model, elements(), watching(), validation_data=elements(BAD), validation_steps=NUM
    )
    assert history["val_loss"][0] != history["val_loss"][0]
    optimizer = sgd(model)

    @poptorch.function(options=watching())
    def train(n):
        def body(n, x):
            step(model, optimizer, x)
            return n + 1

        return poptorch.while_loop(lambda n: n < 2, body, [n], infeed)

    with poptorch.InfeedQueue(elements()) as infeed:
        assert train(torch.tensor(0)) == 2
        train.destroy()
    assert not [one for one in caplog.messages if "Options.watch" in one]
