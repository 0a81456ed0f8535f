"""``Options.machine``: names, precedence, copies, files; and memory that does not suffice."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.unit.executor.nets import Net, batch, infer, train

NAMES = {"ipu1": 1, "mk1": 1, "ipu2": 2, "mk2": 2, "ipu21": 21, "bow": 21}
NO_ROOM = "Out of memory: Cannot fit all variable data onto one or more tiles."


def device(options=None):
    return poptorch.estimate(Net(), batch()[0], options=options).device


@pytest.mark.parametrize("name", NAMES)
def test_the_names_of_the_generations(name):
    found = device(poptorch.Options().machine(name))
    assert found.version == NAMES[name]
    assert found.tiles == (1216 if NAMES[name] == 1 else 1472)


def test_the_machine_without_a_setting():
    assert (device().version, device().tiles) == (2, 1472)


def test_the_setting_comes_before_the_target_and_the_target_before_the_variable(monkeypatch):
    monkeypatch.setenv("POPTORCH_IPU_MODEL_VERSION", "ipu1")
    assert device().version == 1
    options = poptorch.Options().useOfflineIpuTarget(21)
    assert device(options).version == 21
    assert device(options.machine("ipu2")).version == 2


def test_a_small_machine(monkeypatch):
    assert device(poptorch.Options().machine(tiles=64)).tiles == 64
    monkeypatch.setenv("POPTORCH_SMALL_IPU_MODEL", "1")
    assert device().tiles == 4
    assert device(poptorch.Options().machine(tiles=64)).tiles == 64
    assert device(poptorch.Options().machine()).tiles == 1472


def test_fewer_tiles_take_longer():
    def cycles(tiles):
        options = poptorch.Options().machine(tiles=tiles, out_of_memory="ignore")
        return poptorch.estimate(nn.Linear(512, 512), torch.zeros(64, 512), options=options).cycles

    assert cycles(16) > cycles(256) > cycles(1472) * 0.99


def test_the_last_call_counts_as_a_whole():
    options = poptorch.Options().machine("bow", tiles=64, ipus=2).machine("mk1")
    assert options._simulated == poptorch.Options().machine("mk1")._simulated


def test_copies_and_files_have_the_machine():
    options = poptorch.Options().machine("bow", tiles=64, out_of_memory="raise")
    wanted = options._simulated
    for twin in (options.clone(), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert twin._simulated == wanted
        assert repr(twin) == repr(options)
    assert "tiles" in repr(options)
    assert "machine" not in repr(poptorch.Options())
    twin = options.clone().machine()
    assert twin._simulated != options._simulated == wanted


def test_a_saved_model_has_the_machine(tmp_path):
    model = train(Net(), poptorch.Options().machine("bow", tiles=640))
    model(*batch())
    model.save(tmp_path / "model.poptorch")
    loaded = poptorch.load(tmp_path / "model.poptorch")
    loaded(*batch())
    assert loaded.estimate().device == model.estimate().device
    assert loaded.estimate().device.tiles == 640


def test_json_and_settings_files_choose_it(tmp_path):
    options = poptorch.Options()
    options.from_json('{"machine": "bow"}')
    assert options._simulated.version == 21
    (tmp_path / "settings").write_text('machine("mk1", tiles=8)\n')
    options.loadFromFile(tmp_path / "settings")
    assert (options._simulated.version, options._simulated.tiles) == (1, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"version": "ipu3"}, r"machine\('ipu3'\): use one of 'ipu1'"),
        ({"version": 2}, r"machine\(2\): use one of"),
        ({"tiles": 0}, r"tiles=0\): pass 1 to 1472"),
        ({"version": "mk1", "tiles": 1217}, r"pass 1 to 1216"),
        ({"tiles": 1.5}, r"tiles=1.5\): pass an int"),
        ({"ipus": True}, r"ipus=True\): pass an int"),
        ({"ipus": 65}, r"pass 1 to 64"),
        ({"out_of_memory": "stop"}, r"out_of_memory='stop'\): use one of 'warn'"),
    ],
)
def test_a_wrong_setting_is_an_error_and_changes_nothing(arguments, message):
    options = poptorch.Options().machine("bow")
    before = options._simulated
    with pytest.raises(poptorch.Error, match=message):
        options.machine(**arguments)
    assert options._simulated == before


def test_frozen_options_do_not_change():
    options = poptorch.Options().freeze()
    with pytest.raises(AttributeError, match="frozen"):
        options.machine()


# --- Memory -------------------------------------------------------------------------------------


def large(**settings):
    return infer(nn.Linear(4096, 4096), poptorch.Options().machine(tiles=64, **settings))


def x():
    return torch.zeros(2, 4096)


def test_a_model_that_does_not_fit_is_a_warning_and_runs(caplog):
    model = large()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert model(x()).shape == (2, 4096)
    assert caplog.text.count(NO_ROOM) == 1
    assert "Simulated" in caplog.text
    assert model.estimate().verdict == "does not fit"


def test_a_model_that_does_not_fit_is_an_error_if_the_options_say_so(caplog):
    model = large(out_of_memory="raise")
    for use in (model, model.compile):
        with caplog.at_level(logging.ERROR), pytest.raises(poptorch.Error) as caught:
            use(x())
        assert caught.value.type == "popart_exception"
        assert NO_ROOM in caught.value.message
    assert NO_ROOM in caplog.text
    assert not model.isCompiled()
    assert model.estimate(x()).verdict == "does not fit"


@pytest.mark.parametrize("asked", [True, False])
def test_nothing_is_said_of_a_model_that_fits_or_nobody_asks_about(asked, caplog):
    model = infer(Net(), poptorch.Options().machine()) if asked else infer(nn.Linear(4096, 4096))
    with caplog.at_level(logging.WARNING):
        model(batch()[0] if asked else x())
    assert "memory" not in caplog.text


def test_memory_is_ignored_if_the_options_say_so(caplog):
    with caplog.at_level(logging.WARNING):
        large(out_of_memory="ignore")(x())
    assert "memory" not in caplog.text


def test_a_machine_with_too_few_ipus():
    net = Net()
    net.fc2 = poptorch.BeginBlock(net.fc2, ipu_id=1)
    for settings in ({}, {"out_of_memory": "ignore"}):
        options = poptorch.Options().deviceIterations(2).machine(ipus=1, **settings)
        with pytest.raises(poptorch.Error, match=r"machine\(ipus=1\): the model takes 2 IPUs"):
            infer(net, options)(batch(12)[0])
        with pytest.raises(poptorch.Error, match=r"machine\(ipus=1\): the model takes 2 IPUs"):
            poptorch.estimate(net, batch(12)[0], options=options)
    options = poptorch.Options().deviceIterations(2).machine(ipus=2)
    assert poptorch.estimate(net, batch(12)[0], options=options).device.num_ipus == 2
