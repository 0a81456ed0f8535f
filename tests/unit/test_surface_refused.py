"""Each name that the table calls refused raises an error with a reason when it is used."""

import re

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.options.back_end import validate_options
from popsim_torch.options.back_end_keys import KEYS, LIMITS, NUM_MEMBERS
from tests.options import make_options
from tests.unit.surface_table import Net, entries, paths

X = torch.ones(2, 4)


def compiled(options):
    model = poptorch.trainingModel(Net(), options)
    model.compile(X)
    return model


def set_back_end(key, value):
    options = make_options(1, 2)
    options._Popart.set(key, value)
    compiled(options)


OTHER_VALUES = {
    "accumulationFactor": 7,
    "accumulationAndReplicationReductionType": 0,
    "automaticLossScalingSettings.toTrackTensors": ["a"],
}
# How to use each name, and the words of the error.
USES = {
    f'Options._Popart.options["{key}"]': (
        lambda key=key, value=value: set_back_end(key, value),
        re.escape(LIMITS[key].reason),
    )
    for key, value in OTHER_VALUES.items()
}


@pytest.mark.parametrize("path", USES)
def test_a_refused_name_is_an_error_with_its_reason(path):
    use, message = USES[path]
    with pytest.raises(poptorch.Error, match=message):
        use()


def test_every_refused_name_has_a_test():
    tested_elsewhere = {
        path
        for path in paths("refused")
        if path.startswith(("optim.", "PoplarExecutor.getTensorNames"))
    }
    assert {*USES} | tested_elsewhere == set(paths("refused"))


# Settings of the back end

SAMPLES = {"bool": True, "int": 1, "float": 0.5, "str": "float", "list": ["a"], "dict": {"a": "b"}}
SETTINGS = "Options._Popart.options"


@pytest.mark.parametrize("key", entries(SETTINGS))
def test_a_setting_of_the_back_end_takes_values_of_its_kind_and_no_others(key):
    kinds = [kind for kind, keys in KEYS.items() if key in keys]
    assert kinds
    for kind in kinds:
        assert validate_options({key: SAMPLES[kind]}) is None
    other = next(kind for kind in KEYS if kind not in kinds)
    with pytest.raises(poptorch.Error, match=f"Unknown {other} option {re.escape(key)}"):
        validate_options({key: SAMPLES[other]})


def test_accepted_settings_of_the_back_end_change_no_value():
    """All settings together: weights after two updates have the same bits as without them."""
    options = make_options(2, 2)
    for key in entries(SETTINGS, "accepted"):
        kind = next(kind for kind, keys in KEYS.items() if key in keys)
        value = SAMPLES[kind]
        if key in NUM_MEMBERS:
            value = NUM_MEMBERS[key] - 1
        options._Popart.set(key, value)
    weights = []
    for chosen in (options, make_options(2, 2)):
        net = Net()
        poptorch.trainingModel(net, chosen)(torch.linspace(-1, 1, 32).reshape(8, 4))
        weights.append(net.weight.detach().clone())
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], torch.ones(4, 3))


def test_settings_that_are_refused_with_another_value_are_those_with_limits():
    assert set(OTHER_VALUES) == set(LIMITS)
