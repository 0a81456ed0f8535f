"""``summary``: a model as a tree of modules. The expected numbers were calculated by hand."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import Error, UsageValueError


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.fc2 = nn.Linear(8, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        out = self.fc2(torch.relu(self.fc1(x)))
        return out, self.loss(out, y)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4, bias=False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.shared(torch.tanh(self.shared(x)))


class Pipeline(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = poptorch.BeginBlock(nn.Linear(4, 8), ipu_id=0)
        self.second = poptorch.BeginBlock(nn.Linear(8, 2), ipu_id=1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


BATCH = torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64)


def training():
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return poptorch.trainingModel(model, optimizer=optimizer)


def by_path(summary):
    return {row.path: row for row in summary.rows}


def shapes(row):
    return [one.shape for one in row.outputs]


def test_a_perceptron():
    rows = by_path(poptorch.summary(Perceptron(), BATCH))
    assert list(rows) == ["", "fc1", "fc2", "loss"]
    assert [row.depth for row in rows.values()] == [0, 1, 1, 1]
    assert [row.type_name for row in rows.values()] == [
        *("Perceptron", "Linear", "Linear", "CrossEntropyLoss"),
    ]
    assert [shapes(row) for row in rows.values()] == [[(6, 3), ()], [(6, 8)], [(6, 3)], [()]]
    assert [row.parameters for row in rows.values()] == [67, 40, 27, 0]
    assert [row.parameter_bytes for row in rows.values()] == [268, 160, 108, 0]
    assert rows["fc1"].activation_bytes == 4 * 6 * 8
    assert rows["fc2"].activation_bytes == 4 * 6 * 3
    assert rows["loss"].activation_bytes == 4 * (6 * 3 + 1)  # logarithms and their mean
    assert rows[""].activation_bytes == 4 * (2 * 6 * 8 + 2 * 6 * 3 + 1)  # with the ReLU
    assert rows["fc1"].outputs[0].name == "fc1/Gemm:0"


def test_a_convolution_network():
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout()),
        *(nn.Flatten(), nn.Linear(64, 10)),
    ).eval()
    rows = by_path(poptorch.summary(model, torch.zeros(2, 1, 8, 8)))
    assert [shapes(row) for row in rows.values()] == [
        *([(2, 10)], [(2, 4, 8, 8)], [(2, 4, 8, 8)], [(2, 4, 4, 4)], [], [(2, 64)], [(2, 10)]),
    ]
    assert rows[""].parameters == 4 * 9 + 4 + 640 + 10
    assert rows["0"].activation_bytes == rows["1"].activation_bytes == 4 * 2 * 4 * 8 * 8
    assert rows["2"].activation_bytes == 2 * 4 * 2 * 4 * 4 * 4  # values and their places


def test_a_module_that_is_called_twice():
    rows = by_path(poptorch.summary(Twice(), torch.zeros(6, 4)))
    assert shapes(rows["shared"]) == [(6, 4), (6, 4)]
    assert [one.name for one in rows["shared"].outputs] == ["shared/MatMul:0", "shared/MatMul:0/1"]
    assert rows["shared"].parameters == 16
    assert rows["shared"].activation_bytes == 2 * 4 * 6 * 4
    assert (rows["unused"].outputs, rows["unused"].stages, rows["unused"].parameters) == ((), (), 6)


def test_a_pipeline_of_two_stages():
    options = poptorch.Options().deviceIterations(2)
    rows = by_path(poptorch.summary(Pipeline(), torch.zeros(6, 4), options=options))
    assert [row.stages for row in rows.values()] == [(0, 1), (0,), (1,)]
    assert shapes(rows["first"]) == [(3, 8)]  # of one micro-batch
    assert [row.type_name for row in rows.values()] == ["Pipeline", "Linear", "Linear"]


def test_frozen_parameters_are_told_apart():
    model = Perceptron()
    model.fc1.requires_grad_(False)
    summary = poptorch.summary(model, BATCH)
    assert [row.trainable for row in summary.rows] == [27, 0, 27, 0]
    assert "Parameters: 67 (27 trainable, 40 not)" in str(summary)


def test_new_values_of_buffers_are_no_output():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())
    assert shapes(poptorch.summary(model, torch.zeros(6, 4)).rows[1]) == [(6, 4)]


def test_names_are_those_that_can_be_anchored():
    executor = training()
    executor.compile(*BATCH)
    rows = by_path(executor.summary())
    names = [name for row in rows.values() for name in row.names]
    assert sorted(names) == sorted(executor.getTensorNames())
    assert {"fc1.weight", "fc1/Gemm:0", "Gradient___fc1.weight"} < set(rows["fc1"].names)
    assert "Relu:0" in rows[""].names


def test_neither_the_model_nor_the_executor_changes():
    executor = training()
    before = {name: value.clone() for name, value in executor.model.state_dict().items()}
    assert executor.summary(*BATCH).rows[0].parameters == 67
    assert not executor.isCompiled()
    assert not executor.isAttachedToDevice()
    after = executor.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    executor(*BATCH)
    assert poptorch.summary(executor).rows == executor.summary(*BATCH).rows


def test_a_queue_can_be_used_afterwards():
    queue = poptorch.MaybeOutfeedQueue()
    model = nn.Sequential(nn.Linear(4, 2), poptorch.MaybeOutfeed(queue, name="out"))
    executor = poptorch.inferenceModel(model)
    executor.summary(torch.zeros(6, 4))
    out = executor(torch.ones(6, 4))
    assert torch.equal(queue.dequeue()["out"][0], out)


def test_the_printed_tree():
    assert str(poptorch.summary(Twice(), torch.zeros(6, 4), width=100)).splitlines() == [
        "Module             Output shape  Parameters  Bytes  Activations  Stage  Anchor",
        "-" * 89,
        "Twice              (6, 4)        22          88     288          0      shared/MatMul:0/1",
        "  shared (Linear)  2 x (6, 4)    16          64     192          0      shared/MatMul:0",
        "  unused (Linear)  -             6           24     -            -      -",
        "",
        "Parameters: 22 (22 trainable, 0 not)",
        "Bytes of parameters: 88",
        "Bytes of activations of a micro-batch: 288",
    ]


@pytest.mark.parametrize("width", [60, 75, 88])
def test_no_line_of_the_table_is_wider_than_asked_for(width):
    text = str(poptorch.summary(Perceptron(), BATCH, width=width))
    table, _, totals = text.partition("\n\n")
    assert max(map(len, table.splitlines())) <= width
    assert "67 trainable" in totals


def test_depth_cuts_the_printed_tree():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 2)), nn.ReLU())
    summary = poptorch.summary(model, torch.zeros(6, 4), depth=1)
    assert len(summary.rows) == 4
    assert "Linear" not in str(summary)
    assert str(summary).count("Sequential") == 2


def test_scopes_of_the_user_lie_around_and_inside_of_modules():
    class Scoped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Twice()
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            with poptorch.NameScope("outer"):
                x = self.body(x)
                with poptorch.NameScope("inner"):
                    return self.head(x)

    rows = by_path(poptorch.summary(Scoped(), torch.zeros(6, 4)))
    assert shapes(rows["body.shared"]) == [(6, 4), (6, 4)]
    assert [one.name for one in rows["head"].outputs] == ["outer/inner/head/Gemm:0"]


def test_a_tied_weight_counts_once_in_the_model():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    rows = poptorch.summary(model, torch.zeros(3, dtype=torch.int64)).rows
    assert [row.parameters for row in rows] == [40, 40, 40]
    assert shapes(rows[1]) == [(3, 4)]


def test_inputs_that_are_returned_are_outputs_of_the_model():
    row = poptorch.summary(nn.Identity(), torch.zeros(6, 4)).rows[0]
    assert [(one.name, one.shape) for one in row.outputs] == [("input", (6, 4))]


def test_a_size_is_no_argument():
    with pytest.raises(TypeError, match=r"Pass tensors, .*: summary\(model, torch.zeros\(6, 4\)\)"):
        poptorch.summary(nn.Linear(4, 2), (6, 4))


def test_without_arguments_it_says_what_is_missing():
    with pytest.raises(Error, match=r"no arguments to compile it for\. Pass the arguments of"):
        poptorch.summary(Perceptron())


def test_arguments_have_to_be_like_those_of_the_first_call():
    executor = training()
    executor.compile(*BATCH)
    with pytest.raises(Error, match="Shape mismatch for x"):
        executor.summary(torch.zeros(5, 4), BATCH[1])


@pytest.mark.parametrize("wrong", [{"depth": -1}, {"depth": True}, {"width": 10}])
def test_numbers_are_checked(wrong):
    with pytest.raises(UsageValueError, match=r"must be an integer of \d+ or more"):
        poptorch.summary(Perceptron(), BATCH, **wrong)


def test_an_executor_brings_its_options():
    with pytest.raises(UsageValueError, match=r"Leave options out"):
        poptorch.summary(training(), BATCH, options=poptorch.Options())


def test_something_else_than_a_model_is_refused():
    with pytest.raises(Error, match=r"summary: the model must be a torch\.nn\.Module"):
        poptorch.summary(torch.zeros(1), BATCH)
