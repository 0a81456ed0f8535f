"""``poptorch.estimate`` and ``executor.estimate``: what they take, and what they leave alone."""

import copy
import json
import logging
import pickle

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options
from tests.unit.executor.nets import Net, batch, infer, train


def test_a_module_an_executor_and_a_compiled_executor_cost_the_same():
    x, y = batch()
    net = Net()
    of_module = poptorch.estimate(
        net, (x, y), options=make_options(), optimizer=poptorch.optim.SGD(net.parameters(), lr=0.1)
    )
    model = train(Net())
    before = model.estimate(x, y)
    assert not model.isCompiled()
    model(x, y)
    compiled = model.estimate()
    assert of_module.as_dict() == before.as_dict() == compiled.as_dict()
    assert model.estimate(x, y).as_dict() == compiled.as_dict()
    assert poptorch.estimate(model, (x, y)).as_dict() == compiled.as_dict()


def test_keyword_arguments_and_a_single_argument():
    x, _ = batch()
    as_dict = poptorch.estimate(Net(), x).as_dict()
    assert poptorch.estimate(Net(), (x,)).as_dict() == as_dict
    assert poptorch.estimate(Net(), kwargs={"x": x}).as_dict() == as_dict
    assert infer(Net()).estimate(x=x).as_dict() == as_dict


def test_options_are_not_frozen_and_not_changed():
    options = poptorch.Options().deviceIterations(3)
    shown = repr(options)
    poptorch.estimate(Net(), batch()[0], options=options)
    assert repr(options) == shown
    options.deviceIterations(4)  # not frozen


def test_the_items_of_a_call_follow_the_options():
    options = make_options(2, 3).replicationFactor(2)
    net = Net()
    found = poptorch.estimate(
        net, batch(24), options=options, optimizer=torch.optim.Adam(net.parameters())
    )
    assert found.batch == type(found.batch)(2, 2, 3, 2, 24)
    assert found.device.num_ipus == 2


def test_more_iterations_take_more_cycles_in_a_call_and_as_many_in_an_update():
    def found(iterations):
        net, options = Net(), make_options(iterations)
        optimizer = torch.optim.Adam(net.parameters())
        return poptorch.estimate(net, batch(6 * iterations), options=options, optimizer=optimizer)

    one, four = found(1), found(4)
    assert one.cycles < four.cycles < 4 * one.cycles
    # (an anchor that only the last iteration writes is a part of one update)
    assert four.update_cycles == pytest.approx(one.update_cycles, rel=0.1)


def test_values_do_not_depend_on_estimates():
    results = []
    for estimates in (False, True):
        torch.manual_seed(0)
        net = Net()
        options = poptorch.Options().randomSeed(1)
        if estimates:
            options.machine("bow", tiles=100).logCycleCount(True)
        model = train(net, options)
        x, y = torch.ones(6, 4), torch.zeros(6, dtype=torch.int64)
        if estimates:
            model.estimate(x, y)
        output = model(x, y)[0]
        if estimates:
            model.estimate()
        results.append([output, model(x, y)[0], *map(torch.clone, net.parameters())])
    assert all(map(torch.equal, *results))


def test_an_estimate_says_that_it_is_simulated_and_how_good_it_is():
    found = poptorch.estimate(Net(), batch()[0])
    assert "simulated" in repr(found)
    text = str(found)
    assert text.startswith("Simulated")
    assert "grades" in text
    assert sum(found.grades.values()) == pytest.approx(1)
    assert found.without_formula == ()
    assert found.verdict == "fits"
    json.dumps(found.as_dict())


def test_an_estimate_can_be_pickled_and_copied():
    found = poptorch.estimate(Net(), batch()[0])
    for twin in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert twin.as_dict() == found.as_dict()


def test_half_precision_takes_less_time_and_memory():
    def found(dtype):
        model = nn.Linear(1024, 1024, dtype=dtype)
        return poptorch.estimate(model, torch.zeros(256, 1024, dtype=dtype))

    half, single = found(torch.float16), found(torch.float32)
    assert half.cycles < single.cycles
    assert half.peak_bytes < single.peak_bytes


def test_stages_run_on_ipus_of_their_own():
    net = Net()
    net.fc2 = poptorch.BeginBlock(net.fc2, ipu_id=1)
    options = poptorch.Options().deviceIterations(4)
    found = poptorch.estimate(net, batch(24)[0], options=options)
    assert [ipu.stages for ipu in found.ipus] == [(0,), (1,)]
    assert [(link.source, link.target) for link in found.links] == [(0, 1)]


def test_a_wrapped_model_is_estimated_while_its_weights_are_on_the_device():
    net, (x, y) = Net(), batch()
    model = train(net)
    model(x, y)
    found = poptorch.estimate(net, x)
    assert found.cycles > 0
    assert model._device.weights.ahead  # nothing was copied
    assert infer(model).estimate(x).as_dict() == found.as_dict()


def test_the_function_gives_estimates_of_its_loops():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    queue = poptorch.InfeedQueue([batch() for _ in range(8)])

    def step(x, y):
        loss = net(x, y)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @poptorch.function
    def training():
        poptorch.repeat(8, step, infeed=queue)

    assert training.estimates() == ()
    training()
    (found,) = training.estimates()
    assert found.training
    assert found.batch.device_iterations == 8
    assert found.cycles > 8 * sum(op.cycles for op in found.ops if op.phase != "setup") * 0.9


def test_a_loop_that_a_value_ends_has_the_iterations_of_its_runs():
    @poptorch.function
    def square(times):
        return poptorch.while_loop(
            lambda i, _: i < times, lambda i, y: (i + 1, y @ y), (torch.tensor(0), torch.eye(64))
        )

    def estimated():
        by_iterations = {one.batch.device_iterations: one for one in square.estimates()}
        return max(by_iterations), by_iterations[max(by_iterations)].cycles

    square(torch.tensor(5))
    few, cycles = estimated()
    assert few == 5
    square(torch.tensor(15))
    many, more = estimated()
    assert many == 10  # the mean
    assert cycles < more < 2 * cycles


def test_a_loop_of_a_model_that_only_a_value_ends_counts_as_one_iteration():
    class Powers(nn.Module):
        def forward(self, x):
            zero = torch.zeros((), dtype=torch.int32, device=x.device)
            loop = torch._higher_order_ops.while_loop
            return loop(lambda i, y: y.sum() < 9, lambda i, y: (i + 1, y @ y), (zero, x))[1]

    class Once(nn.Module):
        def forward(self, x):
            return poptorch.for_loop(1, lambda y: [y @ y], [x])[0]

    found = poptorch.estimate(Powers(), torch.eye(64))
    once = poptorch.estimate(Once(), torch.eye(64))
    assert once.cycles < found.cycles < 2 * once.cycles
    (loop,) = (op for op in found.ops if op.kind == "loop")
    assert loop.grade == "C"


# --- Mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "message"),
    [
        ((3, torch.zeros(1)), {}, poptorch.Error, "must be a torch.nn.Module, got int"),
        ((Net(), batch()[0]), {"options": 3}, poptorch.Error, "poptorch.Options, got int"),
        ((Net(), batch()[0]), {"optimizer": 3}, poptorch.Error, "optimizer.*got int"),
        ((Net(),), {}, poptorch.Error, "x"),
        ((Net(), batch()[0], {"z": 3}), {}, AssertionError, "z"),
    ],
)
def test_a_wrong_argument_is_named(arguments, settings, error, message):
    with pytest.raises(error, match=message):
        poptorch.estimate(*arguments, **settings)


def test_an_executor_has_options_of_its_own():
    for given in (
        {"options": poptorch.Options()},
        {"optimizer": torch.optim.Adam([nn.Parameter()])},
    ):
        with pytest.raises(poptorch.Error, match="of its own"):
            poptorch.estimate(infer(Net()), batch()[0], **given)


def test_an_estimate_for_inference_has_no_accumulation():
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    with pytest.raises(poptorch.Error, match=r"gradientAccumulation is 2.*optimizer="):
        poptorch.estimate(Net(), batch()[0], options=options)


def test_an_executor_that_is_not_compiled_needs_arguments():
    with pytest.raises(poptorch.Error, match=r"estimate: .*Pass the arguments of a call"):
        infer(Net()).estimate()


def test_arguments_of_another_shape_are_refused_once_the_model_is_compiled():
    model = infer(Net())
    model(batch()[0])
    with pytest.raises(poptorch.Error, match="Shape mismatch"):
        model.estimate(batch(8)[0])


def test_compilation_does_not_estimate_unless_it_is_asked_to(monkeypatch):
    def refuse(request):
        raise AssertionError("an estimate")

    monkeypatch.setattr("popsim_torch.executor.costs.estimate_program", refuse)
    model = infer(Net())
    model(batch()[0])
    model = infer(Net(), poptorch.Options().machine())
    with pytest.raises(AssertionError, match="an estimate"):
        model(batch()[0])


def test_an_estimate_writes_no_warning_of_its_own(caplog):
    with caplog.at_level(logging.WARNING):
        poptorch.estimate(Net(), batch()[0])
    assert caplog.text == ""
