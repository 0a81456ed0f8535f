"""Stages given to the layers of a model: three forms, their rules, and later changes."""

import copy
import pickle

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import Error, UsageTypeError, UsageValueError
from popsim_torch.stages.assignment import assigned_stages
from tests.options import make_options

X = torch.ones(1, 2)
get, reset = poptorch.get_pipeline_stage_assignment, poptorch.reset_pipeline_stage_assignment
assign = poptorch.set_pipeline_stage_assignment


def linear():
    return nn.Linear(2, 2)


def flat():
    return nn.Sequential(linear(), nn.ReLU(), linear())


def nested():
    return nn.Sequential(linear(), nn.Sequential(linear(), nn.ReLU()), linear())


def stages(model):
    """Return the stages of layers, a list for a nested model."""

    def of(records):
        return [of(record.nested) if record.nested else record.stage for record in records]

    return of(get(model))


# The list


def test_each_layer_tells_its_stage(recorder):
    model = flat()
    assign(model, [0, 0, 1])
    model(X)
    assert recorder.events == [0, 0, 1]


def test_a_model_that_is_simply_called_has_no_stages():
    model = flat()
    expected = model(X)
    assign(model, [0, 0, 1])
    assert torch.equal(model(X), expected)


def test_a_model_without_an_assignment_has_no_stages():
    assert stages(flat()) == [None] * 3


def test_a_stage_that_is_open_counts_more(recorder):
    model = flat()
    assign(model, [0, 0, 1])
    with poptorch.PipelineStage(2):
        model(X)
    assert recorder.events == [2]


def test_a_new_assignment_replaces_the_old_one():
    model = flat()
    assign(model, [0, 1, 2])
    assign(model, [0, 0, 1])
    assert stages(model) == [0, 0, 1]
    assert len(model._forward_pre_hooks) == 1


def test_an_assignment_replaces_the_stages_layers_were_built_in():
    with poptorch.PipelineStage(1):
        model = nested()
    assert stages(model) == [1, [1, 1], 1]
    assign(model, [0, 0, 1])
    assert stages(model) == [0, [0, 0], 1]


def test_any_module_has_layers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.nothing, self.second = linear(), None, linear()

    model = Model()
    assign(model, [0, 1])
    assert [(record.name, record.stage) for record in get(model)] == [("first", 0), ("second", 1)]


def test_an_executor_stands_for_its_model():
    model = flat()
    assign(poptorch.inferenceModel(model, make_options()), [0, 0, 1])
    assert stages(model) == [0, 0, 1]


def test_copies_have_the_assignment(recorder):
    model = flat()
    assign(model, [0, 0, 1])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert stages(twin) == [0, 0, 1]
        recorder.events.clear()
        twin(X)
        assert recorder.events == [0, 0, 1]


@pytest.mark.parametrize(
    "given, error, message",
    [
        ((0, 0, 1), UsageTypeError, r"the assignment is a tuple. Pass a list"),
        (5, UsageTypeError, r"the assignment is a int. Pass a list"),
        ([0, 1], UsageValueError, r"2 stages for the 3 layers of Sequential: 0, 1, 2\."),
        ([0] * 4, UsageValueError, r"4 stages for the 3 layers"),
        ([1, 1, 1], UsageValueError, r"layer '0' \(Linear\) is the first and has stage 1"),
        ([0, 2, 2], UsageValueError, r"layer '1' \(ReLU\) has stage 2 after a layer of stage 0"),
        ([0, 1, 0], UsageValueError, r"layer '2' \(Linear\) has stage 0 .* 1: 1 or 2|stage 1"),
        ([0, "1", 1], UsageTypeError, r"layer '1' \(ReLU\): the stage '1' is a str"),
        ([0, True, 1], UsageTypeError, r"layer '1' \(ReLU\): the stage True is a bool"),
        ([0, -1, 1], UsageValueError, r"layer '1' \(ReLU\): the stage -1 is negative"),
        (
            [0, [0], 1],
            UsageValueError,
            r"layer '1' \(ReLU\) has no layers, but its entry is a list",
        ),
    ],
)
def test_the_rules_of_a_list(given, error, message):
    model = flat()
    assign(model, [0, 1, 1])
    with pytest.raises(error, match=message):
        assign(model, given)
    assert stages(model) == [0, 1, 1]


def test_what_is_no_model():
    with pytest.raises(UsageTypeError, match="got a int"):
        assign(3, [0])
    with pytest.raises(UsageValueError, match="Linear has no layers"):
        assign(linear(), [0])


def test_a_layer_that_stands_in_two_places():
    relu = nn.ReLU()
    model = nn.Sequential(linear(), relu, linear(), relu)
    with pytest.raises(UsageValueError, match="'1' and '3' are one ReLU, and have the stages"):
        assign(model, [0, 0, 1, 1])
    assign(model, [0, 0, 0, 0])
    assert stages(model) == [0, 0, 0, 0]


# Nested models


def test_a_nested_model_has_nested_records():
    model = nested()
    assign(model, [0, [0, 1], 1])
    record = get(model)[1]
    assert [inner.name for inner in record.nested] == ["1.0", "1.1"]
    assert [inner.stage for inner in record.nested] == [0, 1]
    assert record.layer is model[1] and record.stage == 0


def test_an_int_moves_a_nested_model():
    model = nested()
    assign(model, [0, 1, 1])
    assert stages(model) == [0, [1, 1], 1]


@pytest.mark.parametrize(
    "given, message",
    [
        ([0, [0], 1], r"1 stages for the 2 layers of layer '1' \(Sequential\): 1.0, 1.1"),
        ([0, [2, 2], 2], r"layer '1.0' \(Linear\) has stage 2 after a layer of stage 0"),
        ([0, [0, 1], 0], r"layer '2' \(Linear\) has stage 0 after a layer of stage 1"),
    ],
)
def test_the_rules_of_a_nested_list(given, message):
    with pytest.raises(UsageValueError, match=message):
        assign(nested(), given)


# Records


def test_records_are_edited_and_set_again():
    model = nested()
    assign(model, [0, 0, 0])
    records = get(model)
    records[1].nested[1].stage = 1
    records[2].stage = 1
    assign(model, records)
    assert stages(model) == [0, [0, 1], 1]
    records[1].stage = 1
    assign(model, records)
    assert stages(model) == [0, [1, 1], 1]


def test_editing_records_alone_changes_nothing():
    model = flat()
    assign(model, [0, 0, 0])
    get(model)[2].stage = 1
    assert stages(model) == [0, 0, 0]


def records_of(model, edit):
    records = get(model)
    edit(records)
    return records


@pytest.mark.parametrize(
    "edit, error, message",
    [
        (lambda r: r.pop(), UsageValueError, r"no record of layer '2' \(Linear\) in its place"),
        (lambda r: r.reverse(), UsageValueError, r"no record of layer '0' \(Linear\)"),
        (
            lambda r: r.append(r[0]),
            UsageValueError,
            r"record of '0' \(Linear\) belongs to no layer",
        ),
        (lambda r: r.append(1), UsageTypeError, r"1 is among the records"),
        (lambda r: setattr(r[1], "stage", None), UsageValueError, r"'1' \(ReLU\) has no stage"),
        (lambda r: setattr(r[1], "stage", 2), UsageValueError, r"'1' \(ReLU\) has stage 2 after"),
        (lambda r: setattr(r[1], "stage", "a"), UsageTypeError, r"the stage 'a' is a str"),
    ],
)
def test_the_rules_of_records(edit, error, message):
    model = flat()
    assign(model, [0, 0, 0])
    with pytest.raises(error, match=message):
        assign(model, records_of(model, edit))
    assert stages(model) == [0, 0, 0]


# Names


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(linear(), nn.ReLU()) for _ in range(3))
        self.head = linear()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_patterns_of_names(recorder):
    model = Encoder()
    assign(model, {"*": 0, "blocks.[12]": 1, "head": 2})
    model(X)
    assert recorder.events == [0, 1, 1, 2]


def test_the_last_pattern_counts():
    model = Encoder()
    assign(model, {"*": 0, "blocks.2.*": 1, "head": 1})
    assert stages(model) == [[[0, 0], [0, 0], [1, 1]], 1]


def test_what_is_inside_of_a_layer_has_its_stage():
    model = Encoder()
    assign(model, {"blocks": 0, "head": 1})
    assert assigned_stages(model) == [("blocks", 0), ("head", 1)]


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"blocks": 0}, UsageValueError, r"no pattern matches layer 'head' \(Linear\)"),
        ({"*": 0, "haed": 1}, UsageValueError, r"'haed' matches no layer .*Closest name: 'head'"),
        (
            {"*": 0, "head": 2},
            UsageValueError,
            r"stages 0, 2. Stages are numbered from 0 without a gap",
        ),
        ({"*": 1}, UsageValueError, r"stages 1. Stages are numbered from 0"),
        ({"*": "0"}, UsageTypeError, r"'\*': the stage '0' is a str"),
        ({0: 0}, UsageTypeError, r"the key 0 is not a string"),
        ({}, UsageValueError, r"no pattern matches layer 'blocks'"),
    ],
)
def test_the_rules_of_names(given, error, message):
    with pytest.raises(error, match=message):
        assign(Encoder(), given)


# Changes


def test_reset_takes_all_stages():
    with poptorch.PipelineStage(0):
        model = nested()
    assign(model, [0, [0, 1], 1])
    reset(model)
    assert stages(model) == [None, [None, None], None]
    assert not any(layer._forward_pre_hooks for layer in model.modules())


@pytest.mark.parametrize(
    "change, what",
    [
        (lambda m: m.append(nn.Tanh()), "'3' is new"),
        (lambda m: m.pop(1), "'1' is gone"),
        (lambda m: m.insert(0, m.pop(2)), "their order has changed"),
        (lambda m: m.__setitem__(1, nn.Tanh()), "'1' is new, '1' is gone"),
    ],
)
def test_a_changed_layer_list_needs_a_new_assignment(change, what, recorder):
    model = flat()
    assign(model, [0, 0, 1])
    change(model)
    for use in (get, lambda model: model(X)):
        with pytest.raises(Error, match=f"layers of Sequential have changed .*: {what}. Call set"):
            use(model)
    assign(model, [0] * len(model))
    assert stages(model) == [0] * len(model)


class Training:
    """A training executor, and the expected results of training on one stage."""

    def __init__(self, optimizer):
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 8), linear_out())
        self.model = Loss(self.layers)
        self.options = make_options(2, 4, seed=3)
        self.executor = poptorch.trainingModel(
            self.model, self.options, optimizer(self.model.parameters(), lr=0.01)
        )
        torch.manual_seed(1)
        self.x, self.y = torch.randn(16, 4), torch.randint(0, 3, (16,))

    def call(self):
        """Train, and return the loss and the order of its computation."""
        loss = self.executor(self.x, self.y)[1]
        return loss, self.executor.compiled.executable.actions().split()[:3]


def linear_out():
    return nn.Linear(8, 3)


class Loss(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, y):
        out = self.layers(x)
        return out, nn.functional.cross_entropy(out, y)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, poptorch.optim.AdamW])
def test_a_change_compiles_anew_and_training_goes_on(optimizer):
    plain, changed = Training(optimizer), Training(optimizer)
    orders = []
    for assignment in (None, [0, 0, 1, 1], {"*": 0}, "reset", [0, 1, 1, 1]):
        if assignment == "reset":
            reset(changed.layers)
        elif assignment is not None:
            assign(changed.layers, assignment)
        loss, order = changed.call()
        assert torch.equal(loss, plain.call()[0])
        orders.append(order[1])
    assert orders == ["0B0", "1F0", "0B0", "0B0", "1F0"]
    for name, value in plain.model.state_dict().items():
        assert torch.equal(changed.model.state_dict()[name], value)


def test_the_same_assignment_compiles_nothing():
    training = Training(torch.optim.SGD)
    assign(training.layers, [0, 0, 1, 1])
    training.call()
    program = training.executor.compiled
    assign(training.layers, [0, 0, 1, 1])
    assign(flat(), [0, 0, 1])
    training.call()
    assert training.executor.compiled is program


def test_an_assignment_that_cannot_run_leaves_the_executor_usable():
    plain, changed = Training(torch.optim.Adam), Training(torch.optim.Adam)
    for training in (plain, changed):
        training.call()
    assign(changed.layers, [0, 1, 2, 3])
    with pytest.raises(Error, match="greater than or equal to the number of pipeline stages"):
        changed.call()
    assign(changed.layers, [0, 0, 0, 1])
    assert torch.equal(changed.call()[0], plain.call()[0])


def test_an_inference_model_follows_too():
    model = flat()
    inference = poptorch.inferenceModel(model, make_options(2))
    expected = inference(torch.ones(2, 2))
    assign(model, [0, 0, 1])
    assert torch.equal(inference(torch.ones(2, 2)), expected)
    assert "1F0" in inference.compiled.executable.actions()


def test_layers_that_run_in_another_order():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.second, self.first = linear(), linear()

        def forward(self, x):
            return self.second(self.first(x))

    model = Backwards()
    assign(model, [0, 1])
    with pytest.raises(Error, match="Pipeline stages must not decrease along the data flow"):
        poptorch.inferenceModel(model, make_options(3))(torch.ones(3, 2))
