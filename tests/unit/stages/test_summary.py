"""The table of the stages of a model."""

import pytest
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import UsageValueError
from popsim_torch.stages.summary import print_pipeline_stage_assignment_summary


def model():
    layers = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Linear(3, 2)
    )
    poptorch.set_pipeline_stage_assignment(layers, [0, [0, 1], 1])
    return layers


def lines(*args, **kwargs):
    found = []
    print_pipeline_stage_assignment_summary(*args, print_fn=found.append, **kwargs)
    return found


TABLE = """\
____________________________________________________________
Layer (type)                            Pipeline stage
============================================================
0 (Linear)                              0
1 (Sequential)
  1.0 (Linear)                          0
  1.1 (ReLU)                            1
2 (Linear)                              1
============================================================
"""


def test_two_columns_of_60_characters(capsys):
    print_pipeline_stage_assignment_summary(model())
    assert capsys.readouterr().out == TABLE


def test_lines_go_to_a_function():
    assert lines(model()) == TABLE.splitlines()


def test_another_width():
    found = lines(model(), 40)
    assert found[0] == "_" * 40
    assert found[1].index("Pipeline stage") == 25


def test_what_is_too_long_is_cut():
    assert lines(nn.Sequential(nn.Sigmoid()), 30)[3] == "0 (Sigmoid)    -"
    assert lines(model(), 30)[5] == "  1.0 (Linear) 0"
    assert lines(nn.Sequential(nn.Softmax2d()), 30)[3] == "0 (Softmax2d)  -"
    assert lines(nn.Sequential(nn.CrossEntropyLoss()), 30)[3] == "0 (CrossEntrop -"


def test_a_layer_without_a_stage():
    assert lines(nn.Sequential(nn.ReLU()))[3].split() == ["0", "(ReLU)", "-"]


def test_details_add_parameters_and_bytes():
    found = [line.split() for line in lines(model(), details=True)]
    assert found[3] == ["0", "(Linear)", "0", "6", "24"]
    assert found[-3:-1] == [["Stage", "0", "0", "15", "60"], ["Stage", "1", "1", "8", "32"]]


@pytest.mark.parametrize("width, details", [(29, False), (53, True), ("60", False)])
def test_a_width_that_is_too_small(width, details):
    with pytest.raises(UsageValueError, match="is too small for the columns"):
        lines(model(), width, details=details)
