"""Loops of ``fit`` and ``poptorch.function`` are observed as models are."""

import gc
import inspect
import threading

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import UsageAttributeError, UsageTypeError, UsageValueError
from popsim_torch.statistics import Counts, Moments, statistics_of

BATCH, STEPS, EPOCHS = 4, 12, 2
NAME = "Gradient___model.0.weight"


def net(dropout=0.25):
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)
    return nn.Sequential(*layers)


def batches(count=STEPS):
    torch.manual_seed(1)
    return [(torch.randn(BATCH, 6), torch.randint(0, 3, (BATCH,))) for _ in range(count)]


def options_of(accumulation=1, every=None, select="*"):
    options = poptorch.Options().randomSeed(3).autoRoundNumIPUs(True)
    options.Training.gradientAccumulation(accumulation)
    return options if every is None else options.observe(select, every=every)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def fit(model, options, **more):
    return poptorch.fit(
        model,
        batches(),
        EPOCHS,
        loss=nn.functional.cross_entropy,
        optimizer=sgd(model),
        options=options,
        verbose=0,
        **more,
    )


def assert_same(one, other):
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self):
        self.records, self.closed, self.threads = [], 0, set()

    def write_records(self, records):
        self.records += records
        self.threads.add(threading.current_thread().name)

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("every", [1, 5])
def test_fit_has_records_and_the_same_bits(accumulation, every):
    plain, seen = net(), net()
    bare = fit(plain, options_of(accumulation), steps_per_execution=6)
    found = fit(seen, options_of(accumulation, every), steps_per_execution=6)
    assert_same(plain, seen)
    assert found["loss"] == bare["loss"]
    records = found.observations()
    updates = range(0, EPOCHS * STEPS // accumulation, every)
    own = [one for one in records if one.name == NAME]
    assert [one.step for one in own] == [step for step in updates for _ in range(accumulation)]
    assert [one.micro_batch for one in own] == list(range(accumulation)) * len(updates)
    assert found.observations() == []


def test_statistics_in_fit_are_those_of_the_tensors():
    model, reference = net(dropout=0.0), net(dropout=0.0)
    records = fit(model, options_of(every=1, select=NAME)).observations()
    optimizer = sgd(reference)
    for record, (x, y) in zip(records, batches() * EPOCHS, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(x), y).backward()
        expected = statistics_of(reference[0].weight.grad, Moments(), Counts())
        assert record.statistics.norm == pytest.approx(expected.norm, rel=1e-4)
        assert record.statistics.zeros == expected.zeros
        optimizer.step()


@pytest.mark.parametrize("schedule", list(PipelineSchedule))
def test_a_pipelined_fit(schedule):
    def trained(options):
        model = net()
        poptorch.set_pipeline_stage_assignment(model, [0, 0, 1, 1])
        return model, fit(model, options.pipelineSchedule(schedule), steps_per_execution=4)

    plain, _ = trained(options_of(4))
    seen, history = trained(options_of(4, every=1))
    assert_same(plain, seen)
    found = {(one.step, one.micro_batch) for one in history.observations() if one.name == NAME}
    assert found == {(s, m) for s in range(EPOCHS * STEPS // 4) for m in range(4)}


def test_replicas_in_fit():
    def trained(every):
        model = net()
        options = options_of(2, every).replicationFactor(2)
        return model, fit(model, options, steps_per_execution=4)

    plain, _ = trained(None)
    seen, history = trained(1)
    assert_same(plain, seen)
    own = [one for one in history.observations() if one.name == NAME]
    assert {one.replica for one in own} == {0, 1}
    assert len(own) == EPOCHS * STEPS


def test_sinks_among_the_callbacks_of_fit():
    told = []
    others = set(threading.enumerate())  # (models of other tests may still be read)

    class Told:
        def on_epoch_end(self, epoch):
            told.append(epoch)

    sink = Kept()
    history = fit(net(), options_of(every=2, select="Gradient___*"), callbacks=[Told(), sink])
    assert told == [0, 1] and sink.closed == 1
    assert sink.records == history.observations()
    assert {one.step for one in sink.records} == set(range(0, EPOCHS * STEPS, 2))
    own = set(threading.enumerate()) - others
    assert "popsim_torch records" not in {one.name for one in own}
    with pytest.raises(poptorch.Error, match=r"fit: the options observe nothing.*observe\('\*'\)"):
        fit(net(), options_of(), callbacks=Kept())
    with pytest.raises(UsageTypeError, match="not the class"):
        fit(net(), options_of(every=1), callbacks=Kept)


def test_an_executor_that_fits_gives_the_records():
    model = net()
    wrapped = Loss(model)
    training = poptorch.trainingModel(wrapped, options_of(every=3), sgd(model))
    sink = Kept()
    training.add_sink(sink)
    history = poptorch.fit(training, batches(), verbose=0)
    records = training.observations()
    assert {one.step for one in records} == set(range(0, STEPS, 3))
    assert "Gradient___model.net.0.weight" in {one.name for one in records}
    assert history.observations() == []
    training.close_sinks()
    assert len(sink.records) == len(records) and sink.closed == 1


class Loss(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, y):
        out = self.net(x)
        return out, nn.functional.cross_entropy(out, y)


@pytest.mark.parametrize(
    "select", ["Gradient___net.*", "net.*", poptorch.tensors.weights() & ~poptorch.Glob("net.0.*")]
)
def test_a_selection_means_the_same_tensors_in_fit(select):
    def training():
        model = Loss(net())
        return poptorch.trainingModel(model, options_of(every=1, select=select), sgd(model))

    alone, fitted = training(), training()
    alone(*batches()[0])
    poptorch.fit(fitted, batches(), verbose=0)
    names, of_fit = ({one.name for one in each.observations()} for each in (alone, fitted))
    assert names and of_fit == {name.replace("net.", "model.net.") for name in names}


def test_a_recorded_fit(tmp_path):
    def run(rate, path):
        model = Loss(net(dropout=0.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        training = poptorch.trainingModel(model, options_of(), optimizer)
        training.record(path)
        poptorch.fit(training, batches(), verbose=0)
        return poptorch.Run(path)

    one, other = run(0.1, tmp_path / "a.popsim"), run(0.1, tmp_path / "b.popsim")
    assert poptorch.compare(one, other).first is None
    different = run(0.1000001, tmp_path / "c.popsim")
    assert poptorch.compare(one, different).first.step == 0


def test_validation_is_not_observed():
    history = fit(net(), options_of(every=1), validation_data=batches(3))
    records = history.observations()
    own = [one for one in records if one.name == "model.0.weight"]
    assert [one.step for one in own] == list(range(EPOCHS * STEPS))


@pytest.mark.parametrize(
    ("per_execution", "steps"),
    [(1, range(0, STEPS, 2)), (3, [0, 1, 2, 6, 7, 8]), (None, range(STEPS))],
)
def test_every_counts_runs_of_the_device_in_an_evaluation(per_execution, steps):
    inference = poptorch.inferenceModel(net(), options_of(every=2, select="*Relu*"))
    poptorch.predict(inference, batches(), steps_per_execution=per_execution)
    assert [one.step for one in inference.observations()] == list(steps)


@pytest.mark.parametrize("call", [poptorch.evaluate, poptorch.predict])
def test_evaluate_and_predict(call):
    more = {} if call is poptorch.predict else {"loss": nn.functional.cross_entropy}
    inference = poptorch.inferenceModel(net(), options_of(every=1, select="*Relu*"))
    call(inference, batches(), verbose=0, **more)
    records = inference.observations()
    assert len(records) == STEPS
    bare = poptorch.inferenceModel(net(), options_of())
    for model in (net(), bare):
        with pytest.raises(UsageValueError, match="inferenceModel"):
            call(model, batches(), verbose=0, options=options_of(every=1), **more)


def test_an_executor_that_trains_observes_in_fit_only():
    for options in (options_of(every=1), options_of()):
        model, sink = Loss(net()), Kept()
        training = poptorch.trainingModel(model, options, sgd(model))
        poptorch.evaluate(training, batches(), verbose=0)
        with pytest.raises(poptorch.Error, match=r"observe nothing.*in fit only.*inferenceModel"):
            poptorch.evaluate(training, batches(), verbose=0, callbacks=sink)
        assert sink.records == []
        if options._observations:
            assert training.observations() == []


def test_sinks_of_an_evaluation():
    cross_entropy, sink = nn.functional.cross_entropy, Kept()
    model, bare = net(dropout=0.0), net(dropout=0.0)
    options = options_of(every=1, select="*Relu*")
    more = {"loss": cross_entropy, "verbose": 0}
    found = poptorch.evaluate(model, batches(), options=options, callbacks=[sink], **more)
    assert found == poptorch.evaluate(bare, batches(), **more)
    assert [one.step for one in sink.records] == list(range(STEPS)) and sink.closed == 1
    inference, second = poptorch.inferenceModel(model, options), Kept()
    poptorch.evaluate(inference, batches(), callbacks=[second], **more)
    assert second.records == sink.records == inference.observations()
    with pytest.raises(poptorch.Error, match="observe nothing"):
        poptorch.evaluate(inference, batches(), callbacks=[second], options=options_of(), **more)


def looped(model, options, count=STEPS):
    """Return a function that trains in one loop and adds up losses."""
    infeed, optimizer = poptorch.InfeedQueue(batches() * EPOCHS), sgd(model)

    def step(total, x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return total + loss

    @poptorch.function(options=options)
    def train():
        return poptorch.repeat(count, step, torch.zeros(()), infeed)

    return train


def test_a_function():
    plain, seen = net(), net()
    bare, observed = looped(plain, options_of()), looped(seen, options_of(every=4))
    sink = Kept()
    observed.add_sink(sink)
    for _ in range(EPOCHS):
        torch.manual_seed(5)
        assert torch.equal(bare(), observed())
    assert_same(plain, seen)
    table = observed.observing()
    assert table.every == 4 and NAME in table.requests
    records = observed.observations()
    assert [one.step for one in records if one.name == NAME] == [0, 4, 8, 12, 16, 20]
    observed.close_sinks()
    assert len(sink.records) == len(records)
    observed.destroy()
    with pytest.raises(poptorch.Error, match=r"observing: .*destroyed"):
        observed.observing()
    with pytest.raises(poptorch.Error, match="observe nothing"):
        bare.observations()


def test_two_loops_of_a_function_give_their_records():
    model = net()
    x = torch.randn(BATCH, 6)

    @poptorch.function(options=options_of(every=1, select="*Relu*"))
    def both(value):
        first = poptorch.repeat(3, lambda v: model(v).sum() + v, value)
        return poptorch.repeat(2, lambda v: model(v).mean() - v, first)

    both(x)
    assert len(both.programs) == 2
    assert len(both.observations()) == 5
    both(x)
    assert sorted(one.step for one in both.observations()) == [2, 3, 3, 4, 5]


@pytest.mark.parametrize(
    "select", ["Gradient___model.0.weight", ["Gradient___model.0.weight", "*Relu*"]]
)
@pytest.mark.parametrize("trains_first", [False, True])
def test_a_name_is_observed_in_the_loops_that_have_it(trains_first, select, caplog):
    model = net(dropout=0.0)
    optimizer = sgd(model)

    def train(x):
        def step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        poptorch.repeat(4, step)

    def look(x):
        poptorch.repeat(2, lambda v: model(v).sum() + v, x)

    @poptorch.function(options=options_of(every=1, select=select))
    def both(x):
        for part in (train, look) if trains_first else (look, train):
            part(x)
        look(x)

    for size in (BATCH, BATCH + 1):
        both(torch.randn(size, 6))
    records = [one for one in both.observations() if one.name == NAME]
    assert [one.step for one in records] == [0, 1, 2, 3] * 2
    lines = [one.getMessage() for one in caplog.records if NAME in one.getMessage()]
    assert len(lines) == 1 and "matches none" in lines[0] and "'model.0.weight'" in lines[0]


def test_a_name_that_fit_does_not_have():
    with pytest.raises(
        poptorch.Error, match=r"no tensor named 'model\.0\.wieght'.*model\.0\.weight"
    ):
        fit(net(), options_of(every=1, select="model.0.wieght"))


def test_a_while_loop():
    @poptorch.function(options=poptorch.Options().observe("*", every=1))
    def grow(x):
        return poptorch.while_loop(lambda v: v.sum() < 100, lambda v: v * 2, x)

    assert grow(torch.ones(4)).tolist() == [32.0] * 4
    assert {one.step for one in grow.observations()} == set(range(5))


class Trainer:
    """Trains in a method."""

    def __init__(self):
        self.model = net(dropout=0.0)
        self.optimizer = sgd(self.model)

    @poptorch.function(options=options_of(every=1, select="Gradient___*"))
    def train(self, x, count=2):
        """Train a bit."""

        def step():
            self.optimizer.zero_grad()
            self.model(x).sum().backward()
            self.optimizer.step()

        poptorch.repeat(count, step)


def test_a_method():
    trainer, sink = Trainer(), Kept()
    trainer.train.add_sink(sink)
    trainer.train(torch.randn(BATCH, 6), count=3)
    records = trainer.train.observations()
    assert {one.step for one in records} == {0, 1, 2}
    assert trainer.train.observing().every == 1 and not trainer.train.stop()
    assert len(trainer.train.programs) == 1 and Trainer.train.programs == trainer.train.programs
    trainer.train.close_sinks()
    assert sink.records == records and sink.closed == 1
    trainer.train.destroy()
    assert trainer.train.programs == []
    assert trainer.train.__doc__ == "Train a bit." and trainer.train == trainer.train
    assert list(inspect.signature(trainer.train).parameters) == ["x", "count"]


def test_a_recorded_function(tmp_path, caplog):
    options = options_of()
    trained = net()
    train = looped(trained, options)
    train.record(tmp_path / "run.popsim")
    train()
    train.destroy()
    assert len(poptorch.Run(tmp_path / "run.popsim").steps) == STEPS
    assert options._observations == []
    train()
    assert caplog.text.count("is not recorded") == 1


def test_every_counts_runs_of_a_loop_without_an_optimizer():
    model = net(dropout=0.0)

    @poptorch.function(options=options_of(every=2, select="*Relu*"))
    def grow(x):
        return poptorch.repeat(3, lambda v: model(v).sum() + v, x)

    steps = []
    for _ in range(3):
        grow(torch.randn(BATCH, 6))
        steps += [one.step for one in grow.observations()]
    assert steps == [0, 1, 2, 6, 7, 8]


def test_a_condition_ends_a_fit():
    steps = []
    options = options_of()
    options.observe(NAME, every=1, when=lambda record: record.step == 5)
    with pytest.raises(poptorch.RecordError, match=rf"{NAME}.*iteration 5") as caught:
        fit(net(), options, steps_per_execution=2, callbacks=Epochs(steps))
    assert caught.value.record.step == 5
    assert steps == []


class Epochs:
    def __init__(self, steps):
        self.steps = steps

    def on_epoch_end(self, epoch):
        self.steps.append(epoch)


def test_a_function_that_nobody_keeps_passes_on_what_is_left():
    sink = Kept()
    train = looped(net(), options_of(every=1, select=NAME))
    train.add_sink(sink)
    train()
    del train
    gc.collect()
    assert sink.closed == 1 and len(sink.records) == STEPS


def double(options):
    return poptorch.function(options=options)(lambda x: poptorch.repeat(3, lambda v: v * 2, x))


def assert_refuses(options, match):
    for change in (lambda: options.observe("*"), lambda: options.anchorTensor("x", "input")):
        with pytest.raises(UsageAttributeError, match=match):
            change()


def test_options_that_a_recorded_function_would_not_see():
    options = poptorch.Options()
    function = double(options)
    function(torch.ones(3))
    assert_refuses(options, r"recorded already.*destroy\(\)")
    function.destroy()
    options.observe("*", every=1)
    function(torch.ones(3))
    assert {one.step for one in function.observations()} == {0, 1, 2}


def test_options_of_two_functions_refuse_changes_until_both_are_destroyed():
    options = options_of()
    one, other, third = double(options), double(options), double(options)
    for function in (one, other, third):
        function(torch.ones(3))
    one.destroy()
    assert_refuses(options, "recorded already")
    other.destroy()
    other.destroy()
    assert_refuses(options, "recorded already")
    del function, third
    gc.collect()
    options.observe("*", every=1)


def test_options_of_a_model_refuse_changes_after_a_function_is_destroyed():
    options = options_of()
    function = double(options)
    function(torch.ones(3))
    inference = poptorch.inferenceModel(net(), options)
    inference.options.observe("*Relu*", every=1)
    function.destroy()
    assert_refuses(options, "wrapped with these options")
    inference(torch.randn(BATCH, 6))
    assert_refuses(inference.options, "already compiled")
    inference.destroy()
    inference.options.observe("*Gemm*", every=1)


def test_options_of_a_function_that_is_recorded_refuse_changes(tmp_path):
    options = options_of()
    function = double(options)
    with pytest.raises(UsageTypeError):
        function.record(tmp_path / "bad.popsim", 3)
    options.observe("*Mul*", every=1)
    function.record(tmp_path / "run.popsim", "input", every=1)
    assert_refuses(options, "Call it before record")
    function(torch.ones(3))
    assert {one.name for one in function.observations()} == {"input", "Mul:0"}
    function.destroy()
    assert_refuses(options, "Call it before record")


def test_a_condition_in_the_first_call_of_a_function():
    model = net()
    x = torch.randn(BATCH, 6)
    options = options_of()
    options.observe("*Relu*", every=1, when=lambda record: record.step == 1)

    @poptorch.function(options=options)
    def both(value):
        first = poptorch.repeat(3, lambda v: model(v).sum() + v, value)
        return poptorch.repeat(2, lambda v: model(v).mean() - v, first)

    with pytest.raises(poptorch.RecordError) as caught:
        both(x)
    assert (caught.value.record.step, caught.value.record.program) == (1, 0)
    assert both(x).shape == x.shape  # a condition ends a run once
