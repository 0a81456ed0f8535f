"""Which settings of the back end are checked and logged, and what wrapping a model refuses."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import logs
from popsim_torch.enums import MeanReductionStrategy, OutputMode
from popsim_torch.errors import Error, UsageAssertionError
from popsim_torch.options import Options
from popsim_torch.options.back_end import log_computed, validate_options
from popsim_torch.options.back_end_keys import KEYS, LIMITS, NUM_MEMBERS, TEXT_DICTS
from tests.options import make_options


@pytest.fixture
def opts():
    return make_options(1, 1).outputMode(OutputMode.All)


def compile_with(options):
    model = poptorch.inferenceModel(nn.Linear(2, 2), options)
    model.compile(torch.ones(1, 2))
    return model


# Which settings exist


SAMPLES = {
    "bool": True,
    "int": 1,
    "float": 0.5,
    "str": "float",
    "list": ["a"],
    "dict": {"a": "b"},
}


@pytest.mark.parametrize("kind", KEYS)
def test_every_setting_takes_values_of_its_kind(kind):
    assert validate_options(dict.fromkeys(KEYS[kind], SAMPLES[kind])) is None


@pytest.mark.parametrize("kind", KEYS)
def test_no_setting_takes_values_of_another_kind(kind):
    for other in set(KEYS) - {kind}:
        for key in KEYS[kind] - KEYS[other]:
            with pytest.raises(
                Error, match=f"Unknown {other} option {key}: .* It takes a .*{kind}"
            ):
                validate_options({key: SAMPLES[other]})


def test_what_options_hold_by_themselves_exists(opts):
    opts.useIpuModel(True).useIpuId(1).useOfflineIpuTarget().modelName("m").randomSeed(2)
    opts.setAvailableMemoryProportion({"IPU0": 0.5})
    opts.anchorTensor("s", "long")
    opts.enableProfiling().enableExecutableCaching("dir").enableSyntheticData(True)
    opts.enableStableNorm(True).updatableNamedBuffers(["b"]).logCycleCount(True)
    opts.Precision.setPartialsType(torch.half).enableFloatingPointExceptions(True)
    opts.Precision.enableStochasticRounding(True)
    opts.Training.setAutomaticLossScaling(True).setConvolutionDithering(True)
    opts.TensorLocations.numIOTiles(32)
    opts.TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage())
    opts._Popart.setPatterns({"PadSum": False})
    opts.setExecutionStrategy(poptorch.SerialPhasedExecution("a"))
    assert validate_options(opts.toDict()) is None


def test_programs_may_set_every_name_of_the_contract(opts):
    """Names that were missing once; the table of names is that of ``_Popart.set``."""
    settings = opts._Popart
    settings.set("autodiffSettings.stitchStrategy", 1)
    settings.set("automaticLossScalingSettings.gradientTensorTrackingMethod", 0)
    settings.set("serializedPoprithmsShiftGraphsDir", "somewhere")
    settings.set("looseThresholdAtPeak", 1000)
    for name in ("disableOptimizerStateTensorStreams", "enableInplaceAmbiguityChecking"):
        settings.set(name, True)
    for name in ("enableDistributedReplicatedGraphs", "enableReplicatedGraphs"):
        settings.set(name, False)
    settings.set("enableGradientAccumulation", False)
    x = torch.ones(1, 2)
    model = poptorch.inferenceModel(nn.Linear(2, 2), opts)
    torch.testing.assert_close(model(x), model.model(x).detach())


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("enableGradientAccumulation", True, "Options.Training.gradientAccumulation says so"),
        ("enableReplicatedGraphs", True, "Options.Distributed and replicationFactor say so"),
        (
            "enableDistributedReplicatedGraphs",
            True,
            "Options.Distributed and replicationFactor say so",
        ),
        ("globalReplicationFactor", 2, "Options.Distributed and replicationFactor say so"),
        (
            "automaticLossScalingSettings.gradientTensorTrackingMethod",
            1,
            "automatic loss scaling looks at the gradients of all parameters",
        ),
    ],
)
def test_what_another_option_decides_is_told_once(opts, monkeypatch, caplog, name, value, reason):
    monkeypatch.setattr(logs, "_warned", set())
    opts._Popart.set(name, value)
    for _ in range(2):
        compile_with(opts)
    told = [record.message for record in caplog.records if "has no effect" in record.message]
    (line,) = told
    assert line.startswith(f"Options._Popart.set('{name}', {value}) has no effect: {reason}")


def test_unknown_setting_gets_the_closest_name():
    with pytest.raises(
        Error, match=r"Unknown bool option enableOutlinig: True\. Closest name: 'enableOutlining'"
    ):
        validate_options({"enableOutlinig": True})


def test_enum_members_are_ints():
    validate_options({"output_mode": OutputMode.All})
    with pytest.raises(Error, match="Unknown int option nope"):
        validate_options({"nope": OutputMode.All})


@pytest.mark.parametrize("value", [None, torch.half, object(), b"a"])
def test_value_of_an_unknown_type_is_refused(value):
    with pytest.raises(
        Error, match=rf"Unknown value type {type(value).__name__} for option enableOutlining"
    ):
        validate_options({"enableOutlining": value})


@pytest.mark.parametrize("key", NUM_MEMBERS)
def test_enum_out_of_range_is_refused(key):
    for value in (-1, NUM_MEMBERS[key]):
        with pytest.raises(Error, match=f"Value {value} of option {key} is out of range"):
            validate_options({key: value})


@pytest.mark.parametrize("key", sorted(TEXT_DICTS))
def test_dictionaries_of_text_hold_nothing_else(key):
    with pytest.raises(Error, match=rf"Unknown value type int for option {key}\['a'\]"):
        validate_options({key: {"a": 1}})


@pytest.mark.parametrize("items", [[1, "a"], {"a"}, ("a",)])
def test_lists_sets_and_tuples_are_lists(items):
    validate_options({"customCodelets": items})


def test_lists_hold_ints_and_strings():
    with pytest.raises(Error, match="Unknown value type in option customCodelets"):
        validate_options({"customCodelets": [1.0]})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partialsTypeMatMuls", "double"),
        ("matmulOptions", {"partialsType": "HALF"}),
        ("convolutionOptions", {"partialsType": ""}),
    ],
)
def test_unknown_partials_type_is_refused(key, value):
    with pytest.raises(Error, match=r"Unknown partials type .* Use 'float' or 'half'"):
        validate_options({key: value})


# The log


def test_each_setting_is_logged(caplog):
    with caplog.at_level(logging.DEBUG, "poptorch:cpp"):
        validate_options(
            {
                "enableOutlining": True,
                "autoRecomputation": 3,
                "customCodelets": {"b", "a"},
                "engineOptions": {"k": "v"},
            }
        )
    assert [record.getMessage() for record in caplog.records] == [
        "poptorch.Options set enableOutlining to value true",
        "poptorch.Options set autoRecomputation to value 3",
        "poptorch.Options added a to customCodelets",
        "poptorch.Options added b to customCodelets",
        "poptorch.Options set engineOptions[k] to v",
    ]
    assert {record.levelname for record in caplog.records} == {"DEBUG"}


@pytest.mark.parametrize("choice", [None, True, False])
def test_choice_of_the_software_model_is_logged_when_it_was_made(opts, caplog, choice):
    if choice is not None:
        opts.useIpuModel(choice)
    with caplog.at_level(logging.INFO, "poptorch:cpp"):
        compile_with(opts)
    expected = {None: [], True: ["Enabled"], False: ["Disabled"]}[choice]
    lines = [r.getMessage() for r in caplog.records if "Ipu model" in r.getMessage()]
    assert lines == [f"From the user configuration: Ipu model: {text}" for text in expected]


def test_overridden_settings_are_warned_of(opts, caplog):
    opts._Popart.set("enablePipelining", True)
    compile_with(opts)
    (record,) = (r for r in caplog.records if r.name == "poptorch:cpp")
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "Options._Popart.set('enablePipelining', True) overrides what follows from the model, 0"
    )


def test_what_follows_from_phases_is_logged(opts, caplog):
    opts.setExecutionStrategy(poptorch.SerialPhasedExecution("a", "b"))
    location = poptorch.TensorLocationSettings().useOnChipStorage()
    opts.TensorLocations.setWeightLocation(location).setActivationLocation(location)
    with caplog.at_level(logging.DEBUG, "poptorch:cpp"):
        log_computed(opts, pipelined=False)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("DEBUG", "enablePipelining set to value 0"),
        ("DEBUG", "executionPhaseSettings.phases set to value 2"),
        ("DEBUG", "executionPhaseSettings.stages set to value 1"),
        ("DEBUG", "location_optimizer set to value useOnChipStorage(False)"),
        ("DEBUG", "location_accumulator set to value useOnChipStorage(False)"),
    ]


# Compiling


def test_setting_and_wrapping_check_nothing_and_compiling_does(opts):
    opts._Popart.set("noSuchSetting", 1)
    model = poptorch.inferenceModel(nn.Linear(2, 2), opts)
    with pytest.raises(Error, match="Unknown int option noSuchSetting"):
        model(torch.ones(1, 2))


def test_settings_written_past_the_setter_are_checked(opts):
    opts._Popart.options["enableOutlining"] = "no"
    with pytest.raises(Error, match="Unknown str option enableOutlining"):
        compile_with(opts)


def test_own_keys_of_the_user_are_unknown(opts):
    with pytest.raises(Error, match="Unknown str option mine"):
        compile_with(opts.createOrSet(mine="x"))


def test_key_of_two_groups_is_refused(opts):
    opts._Popart.set("gradient_accumulation", 2)
    with pytest.raises(UsageAssertionError, match="two groups hold the key"):
        compile_with(opts)


OTHER_VALUES = {bool: True, float: 0.25, int: 7, list: ["a"]}


@pytest.mark.parametrize("key", LIMITS)
def test_settings_that_would_change_values_are_refused(opts, key):
    limit = LIMITS[key]
    ours = opts.toDict()[limit.value] if isinstance(limit.value, str) else limit.value
    other = 0 if isinstance(ours, poptorch.ReductionType) else OTHER_VALUES[type(ours)]
    opts._Popart.set(key, other)
    with pytest.raises(Error, match="not supported by this version") as caught:
        compile_with(opts)
    assert caught.value.message.startswith(f"Options._Popart.set({key!r}, {other!r})")
    assert caught.value.message.endswith(limit.reason)


@pytest.mark.parametrize("key", LIMITS)
def test_settings_that_say_what_is_done_anyway_are_accepted(opts, key):
    limit = LIMITS[key]
    opts._Popart.set(
        key, opts.toDict()[limit.value] if isinstance(limit.value, str) else limit.value
    )
    assert compile_with(opts).isCompiled()


class Weighted(nn.Module):
    """A model with a loss of a given dtype."""

    def __init__(self, *dtypes):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.dtypes = dtypes

    def forward(self, x):
        losses = [(self.weight * x).sum().to(dtype) for dtype in self.dtypes]
        return poptorch.identity_loss(losses[-1], "none")


def train(options, *dtypes):
    model = Weighted(*dtypes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    poptorch.trainingModel(model, options, optimizer)(torch.ones(1, 2))
    return model.weight.detach().clone()


def loop_over_losses(options, *dtypes):
    model = Weighted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def body(x):
        optimizer.zero_grad()
        for dtype in dtypes:
            (model.weight * x).sum().to(dtype).backward()
        optimizer.step()
        return x

    x = torch.ones(2)
    poptorch.function(lambda: poptorch.repeat(1, body, x), options=options)()
    return model.weight.detach().clone()


@pytest.mark.parametrize("run", [train, loop_over_losses])
def test_a_float32_scale_of_a_float32_loss_is_told_once_and_changes_nothing(
    opts, monkeypatch, caplog, run
):
    monkeypatch.setattr(logs, "_warned", set())
    expected = run(opts.clone(), torch.float32)
    opts._Popart.set("ensureFp32LossScaleTensor", True)
    for _ in range(2):
        assert torch.equal(run(opts.clone(), torch.float32), expected)
    (line,) = (one.message for one in caplog.records if "LossScale" in one.message)
    assert line == (
        "Options._Popart.set('ensureFp32LossScaleTensor', True) has no effect: the loss is "
        "float32, and so is its scale."
    )


@pytest.mark.parametrize(
    ("run", "dtypes"),
    [
        (train, [torch.float16]),
        (loop_over_losses, [torch.float16]),
        (loop_over_losses, [torch.float16, torch.float32]),
    ],
)
def test_a_float32_scale_of_a_float16_loss_is_refused(opts, run, dtypes):
    opts._Popart.set("ensureFp32LossScaleTensor", True)
    with pytest.raises(Error, match=r"a float32 scale of a float16 loss is not supported .* yet"):
        run(opts, *dtypes)


def test_a_model_without_a_loss_may_ask_for_a_float32_scale(opts, caplog):
    opts._Popart.set("ensureFp32LossScaleTensor", True)
    assert compile_with(opts).isCompiled()
    assert not caplog.records


HINTS = {
    "enableStableNorm": True,
    "decomposeGradSum": True,
    "enableOutlining": False,
    "numIOTiles": 64,
    "patterns": {"PadSum": True},
    "reportOptions": {"showVarStorage": "true"},
}


def test_hints_change_no_value(opts):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3))
    x = torch.randn(4, 6)
    hinted = opts.clone()
    for key, value in HINTS.items():
        hinted._Popart.set(key, value)
    hinted.setAvailableMemoryProportion({"IPU0": 0.1})
    hinted.syncPattern(poptorch.SyncPattern.SinglePipeline)
    location = poptorch.TensorLocationSettings().useOnChipStorage(False)
    hinted.TensorLocations.setWeightLocation(location).setActivationLocation(location)
    hinted.Training.setConvolutionDithering(True)
    plain = poptorch.inferenceModel(model, opts)(x)
    assert torch.equal(poptorch.inferenceModel(model, hinted)(x), plain)


class Normed(nn.Module):
    def __init__(self, affine):
        super().__init__()
        self.norm = nn.GroupNorm(3, 6, affine=affine)
        if affine:
            nn.init.normal_(self.norm.weight)
            nn.init.normal_(self.norm.bias)

    def forward(self, x):
        out = self.norm(x)
        return out, poptorch.identity_loss((out * out * out), "sum")


def regrouped(net, x):
    """Return the result of a group norm whose channels were rearranged by hand."""
    order = [0, 3, 1, 4, 2, 5]
    out = nn.functional.group_norm(x[:, order], 3, eps=net.norm.eps)[:, np.argsort(order)]
    if net.norm.affine:
        shape = (6, *(1 for _ in x.shape[2:]))
        out = out * net.norm.weight.view(shape) + net.norm.bias.view(shape)
    return out


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("rest", [(), (5,), (2, 3)])
def test_groups_of_group_norm_can_be_strided(opts, affine, rest):
    torch.manual_seed(0)
    net = Normed(affine)
    x = torch.randn(2, 6, *rest) if rest else torch.randn(2, 6)
    plain = poptorch.inferenceModel(net, opts)(x)[0]
    expected = regrouped(net, x).detach()
    opts = opts.clone()
    opts._Popart.set("groupNormStridedChannelGrouping", True)
    out = poptorch.inferenceModel(net, opts)(x)[0]
    torch.testing.assert_close(out, expected)
    assert not torch.allclose(out, plain)


def test_strided_groups_train(opts):
    torch.manual_seed(0)
    net = Normed(True)
    x = torch.randn(2, 6, 4)
    out = regrouped(net, x)
    gradients = torch.autograd.grad((out * out * out).sum(), list(net.norm.parameters()))
    expected = [p.detach() - 0.1 * g for p, g in zip(net.norm.parameters(), gradients, strict=True)]
    opts._Popart.set("groupNormStridedChannelGrouping", True)
    model = poptorch.trainingModel(net, opts, poptorch.optim.SGD(net.parameters(), lr=0.1))
    model(x)
    for ours, theirs in zip(net.norm.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "softmax",
    [
        lambda x: torch.softmax(x, 1),
        lambda x: x.softmax(dim=-1),
        lambda x: nn.functional.softmax(x, dim=1),
        nn.Softmax(1),
        lambda x: x.half().softmax(1, dtype=torch.float32),
    ],
)
def test_softmax_can_be_the_unstable_one(opts, softmax):
    class Net(nn.Module):
        def forward(self, x):
            return softmax(x)

    small, large = torch.tensor([[1.0, 2.0, 0.5]]), torch.tensor([[1.0, 200.0, 0.5]])
    plain = poptorch.inferenceModel(Net(), opts)
    torch.testing.assert_close(plain(large), torch.softmax(large, 1))
    opts = opts.clone()
    opts._Popart.set("enableNonStableSoftmax", True)
    unstable = poptorch.inferenceModel(Net(), opts)
    torch.testing.assert_close(unstable(small), torch.softmax(small, 1))
    assert unstable(large).isnan().any()


@pytest.mark.parametrize("entry", ["long", ["long"], ["long", False, 77, 1], None])
def test_anchors_written_past_the_setter_are_checked(opts, entry):
    opts.anchored_tensors["s"] = entry
    with pytest.raises(Error, match=r"Options\.anchored_tensors\['s'\] is "):
        compile_with(opts)


def test_names_that_are_no_strings_are_unknown(opts):
    opts._Popart.set(5, True)
    assert "5=True" in repr(opts)
    with pytest.raises(Error, match="Unknown bool option 5"):
        compile_with(opts)


# Wrapping


def test_inference_with_gradient_accumulation_recommends_device_iterations():
    options = Options()
    options.Training.gradientAccumulation(2)
    with pytest.raises(Error, match=r"poptorch\.Options\(\)\.Training\.gradientAccumulation") as e:
        poptorch.inferenceModel(nn.Linear(2, 2), options)
    assert "poptorch.Options().deviceIterations" in e.value.message


@pytest.mark.parametrize(
    "strategy", [poptorch.ShardedExecution(), poptorch.SerialPhasedExecution("a")], ids=str
)
def test_only_pipelines_are_recommended_device_iterations(strategy):
    options = Options().setExecutionStrategy(strategy)
    options.Training.gradientAccumulation(2)
    with pytest.raises(Error, match=r"gradientAccumulation must be 1, got 2") as caught:
        poptorch.inferenceModel(nn.Linear(2, 2), options)
    assert "deviceIterations" not in caught.value.message


def test_deprecated_mean_strategy_is_post_on_one_replica():
    results = []
    for strategy in (MeanReductionStrategy.Post, MeanReductionStrategy.PostAndLoss):
        torch.manual_seed(0)
        layer = nn.Linear(3, 1)
        options = make_options(1, 4)
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
        model = poptorch.trainingModel(WithLoss(layer), options)
        model(torch.randn(4, 3))
        results.append(layer.weight.detach().clone())
    assert torch.equal(*results)


class WithLoss(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return poptorch.identity_loss(self.layer(x), "sum")
