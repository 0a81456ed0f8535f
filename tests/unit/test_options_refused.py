"""What this version cannot carry out is refused at the call, wrong arguments before that."""

import re

import pytest

from popsim_torch.enums import (
    CommGroupType,
    ConnectionType,
    MeanReductionStrategy,
)
from popsim_torch.errors import (
    Error,
    UsageAssertionError,
    UsageValueError,
)
from popsim_torch.options import Options, TensorLocationSettings


@pytest.fixture
def opts():
    return Options()


def at(opts, path):
    """Return the setter named by a dotted path."""
    for name in path.split("."):
        opts = getattr(opts, name)
    return opts


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("replicationFactor", (2,)),
        ("inputReplicaGrouping", (1, CommGroupType.Orthogonal)),
        ("enableStableNorm", (True,)),
        ("enableSyntheticData", (True,)),
        ("enableExecutableCaching", ("cache",)),
        ("connectionType", (ConnectionType.Never,)),
        ("connectionType", (ConnectionType.OnDemand,)),
        ("useOfflineIpuTarget", ()),
        ("enableProfiling", ()),
        ("enableProfiling", ("reports",)),
        ("logCycleCount", (True,)),
        ("updatableNamedBuffers", (["running_mean"],)),
        ("Training.setAutomaticLossScaling", (True,)),
        ("Training.setConvolutionDithering", (True,)),
        (
            "Training.setMeanAccumulationAndReplicationReductionStrategy",
            (MeanReductionStrategy.PostAndLoss,),
        ),
        ("Precision.enableFloatingPointExceptions", (True,)),
        ("Precision.enableStochasticRounding", (True,)),
        ("TensorLocations.numIOTiles", (64,)),
        ("TensorLocations.setActivationLocation", (TensorLocationSettings().useOnChipStorage(),)),
        ("TensorLocations.setWeightLocation", (TensorLocationSettings().useOnChipStorage(),)),
        ("TensorLocations.setOptimizerLocation", (TensorLocationSettings().useOnChipStorage(),)),
        ("TensorLocations.setAccumulatorLocation", (TensorLocationSettings().useOnChipStorage(),)),
        ("Distributed.configureProcessId", (0, 2)),
        ("_Popart.set", ("autoRecomputation", 5)),
        ("_Popart.set", ("autoRecomputation", "standard")),
        ("_Popart.set", ("enableStochasticRounding", True)),
        ("_Popart.set", ("noSuchSetting", 1)),
        ("_Popart.set", ("convolutionOptions", {"enableConvDithering": "true"})),
        ("_Popart.set", ("matmulOptions", {"partialsType": "half", "planConstraints": "{}"})),
    ],
)
def test_what_is_not_supported_is_refused_at_the_call(opts, path, arguments):
    before = repr(opts)
    with pytest.raises(Error, match="not supported by this version") as caught:
        at(opts, path)(*arguments)
    assert caught.value.message.startswith(f"Options.{path}(")
    assert repr(opts) == before


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("replicationFactor", (1,)),
        ("inputReplicaGrouping", (1, CommGroupType.Consecutive)),
        ("inputReplicaGrouping", (5, CommGroupType.NoGrouping)),
        ("enableStableNorm", (False,)),
        ("enableSyntheticData", (False,)),
        ("enableExecutableCaching", (None,)),
        ("connectionType", (ConnectionType.Always,)),
        ("logCycleCount", (False,)),
        ("updatableNamedBuffers", ([],)),
        ("Training.setAutomaticLossScaling", (False,)),
        ("Training.setConvolutionDithering", (False,)),
        ("Precision.enableFloatingPointExceptions", (False,)),
        ("Precision.enableStochasticRounding", (False,)),
        ("TensorLocations.setActivationLocation", (TensorLocationSettings(),)),
        ("Distributed.configureProcessId", (0, 1)),
        ("_Popart.set", ("rearrangeAnchorsOnHost", False)),
    ],
)
def test_default_of_what_is_not_supported_is_accepted(opts, path, arguments):
    before = repr(opts)
    at(opts, path)(*arguments)
    assert repr(opts) == before


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("replicationFactor", ("2",)),
        ("inputReplicaGrouping", (1.0, CommGroupType.Consecutive)),
        ("inputReplicaGrouping", (1, 1)),
        ("enableStableNorm", (1,)),
        ("enableSyntheticData", (1,)),
        ("enableExecutableCaching", (3,)),
        ("connectionType", (0,)),
        ("useOfflineIpuTarget", (3,)),
        ("enableProfiling", (3,)),
        ("logCycleCount", ("yes",)),
        ("updatableNamedBuffers", ("running_mean",)),
        ("Training.setAutomaticLossScaling", (None,)),
        ("Precision.enableFloatingPointExceptions", (1,)),
        ("Precision.enableStochasticRounding", (1,)),
        ("TensorLocations.numIOTiles", (33,)),
        ("TensorLocations.numIOTiles", (30,)),
        ("TensorLocations.numIOTiles", (194,)),
        ("TensorLocations.setWeightLocation", ({},)),
        ("Distributed.configureProcessId", ("0", 1)),
        ("_Popart.setEngineOptions", ("a",)),
        ("_Popart.setPatterns", (["a"],)),
        ("_Popart.setPatterns", ({"a": 1},)),
        ("_Popart.setPatterns", ({"a": True}, "high")),
    ],
)
def test_wrong_argument_is_an_assertion_error(opts, path, arguments):
    with pytest.raises(UsageAssertionError, match=re.escape(f"Options.{path}(")):
        at(opts, path)(*arguments)


@pytest.mark.parametrize(
    ("size", "kind"),
    [(2, CommGroupType.Consecutive), (0, CommGroupType.Orthogonal), (1, CommGroupType.All)],
)
def test_input_groups_must_fit_the_replicas(opts, size, kind):
    with pytest.raises(UsageValueError, match=r"Options\.inputReplicaGrouping"):
        opts.inputReplicaGrouping(size, kind)


def test_refusal_names_value_reason_and_remedy(opts):
    with pytest.raises(Error) as caught:
        opts.replicationFactor(2)
    assert caught.value.message == (
        "Options.replicationFactor(2): replication is not supported by this version of "
        "popsim_torch yet (it runs one replica). Remove the call or set it to 1."
    )


def test_refusal_names_members_of_enums(opts):
    with pytest.raises(Error, match=r"connectionType\(ConnectionType\.Never\).*Type\.Always\."):
        opts.connectionType(ConnectionType.Never)
