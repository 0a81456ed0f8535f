"""The rows of the contract of ``Options``: defaults, what is accepted and stored, what is refused.

A row names a setter by its dotted path. ``stored`` gives, by dotted key, what the options hold
after the call; ``_Popart.x`` is an entry of ``_Popart.options``.
"""

import re
from typing import Any, NamedTuple

import pytest
import torch

from popsim_torch.enums import (
    CommGroupType,
    ConnectionType,
    HalfFloatCastingBehavior,
    Liveness,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
    SyncPattern,
)
from popsim_torch.options import Options, TensorLocationSettings
from popsim_torch.stages import ParallelPhasedExecution, SerialPhasedExecution, ShardedExecution

UNSET = object()
SHARDED = ShardedExecution("a")
OFF_CHIP = TensorLocationSettings().useOnChipStorage(False)


class Row(NamedTuple):
    """One way to call a setter, and what is stored then."""

    path: str
    arguments: tuple[Any, ...]
    stored: dict[str, Any]


def read(options: Options, key: str) -> Any:
    """Return what is stored under a dotted key, or ``UNSET``."""
    group, _, name = key.partition(".") if "." in key else ("", "", key)
    if group == "_Popart":
        return options._Popart.options.get(name, UNSET)
    owner = getattr(options, group) if group else options
    try:
        return owner(name)
    except AttributeError:
        return UNSET


def call(options: Options, path: str, arguments: tuple[Any, ...]) -> Any:
    """Call the setter at a dotted path."""
    target: Any = options
    for name in path.split("."):
        target = getattr(target, name)
    return target(*arguments)


DEFAULTS = {
    "replication_factor": 1,
    "input_group_size": 1,
    "input_cgt": CommGroupType.Consecutive,
    "broadcast_buffers": True,
    "device_iterations": 1,
    "log_dir": ".",
    "max_repeat_logs": 4,
    "auto_round_num_ipus": False,
    "anchored_tensors": {},
    "output_mode": OutputMode.Default,
    "output_return_period": 1,
    "connection_type": ConnectionType.Always,
    "sync_pattern": SyncPattern.Full,
    "available_memory_proportion": {},
    "use_model": UNSET,
    "ipu_id": UNSET,
    "ipu_version": UNSET,
    "model_name": UNSET,
    "random_seed": UNSET,
    "Training.gradient_accumulation": 1,
    "Training.accumulation_and_replication_reduction_type": ReductionType.Mean,
    "Training.meanAccumulationAndReplicationReductionStrategy": MeanReductionStrategy.Post,
    "Distributed.num_distributed_processes": 1,
    "Distributed.distributed_process_id": 0,
    "Distributed.ipuof_configs": {},
    "TensorLocations.numIOTiles": UNSET,
    "TensorLocations.location_activation": UNSET,
    "TensorLocations.location_weight": UNSET,
    "TensorLocations.location_optimizer": UNSET,
    "TensorLocations.location_accumulator": UNSET,
}
ALWAYS = {name for name, value in DEFAULTS.items() if value is not UNSET and "." not in name}

ROWS = [
    # 2. Top-level options
    Row("deviceIterations", (4,), {"device_iterations": 4}),
    Row("deviceIterations", (0,), {"device_iterations": 0}),
    Row("replicationFactor", (4,), {"replication_factor": 4}),
    Row("replicationFactor", (-1,), {"replication_factor": -1}),
    Row(
        "inputReplicaGrouping",
        (1, CommGroupType.Orthogonal),
        {"input_group_size": 1, "input_cgt": CommGroupType.Orthogonal},
    ),
    Row(
        "inputReplicaGrouping",
        (7, CommGroupType.NoGrouping),
        {"input_group_size": 1, "input_cgt": CommGroupType.Consecutive},
    ),
    Row("broadcastBuffers", (), {"broadcast_buffers": True}),
    Row("broadcastBuffers", (False,), {"broadcast_buffers": False}),
    *(
        Row("outputMode", (mode,), {"output_mode": mode, "output_return_period": 1})
        for mode in OutputMode
        if mode != OutputMode.EveryN
    ),
    Row("outputMode", (OutputMode.EveryN, 3), {"output_mode": 1, "output_return_period": 3}),
    Row("outputMode", (OutputMode.All, 3), {"output_mode": 2, "output_return_period": 1}),
    Row(
        "anchorTensor",
        ("s", "long"),
        {"anchored_tensors": {"s": ["long", True, OutputMode.Default, 1]}},
    ),
    Row(
        "anchorTensor",
        ("s", "long", OutputMode.EveryN, 2),
        {"anchored_tensors": {"s": ["long", False, OutputMode.EveryN, 2]}},
    ),
    Row(
        "anchorTensor",
        ("s", "long", OutputMode.Sum, 2),
        {"anchored_tensors": {"s": ["long", False, OutputMode.Sum, 1]}},
    ),
    Row("setExecutionStrategy", (SHARDED,), {"execution_strategy": SHARDED}),
    Row("autoRoundNumIPUs", (), {"auto_round_num_ipus": True}),
    Row(
        "setAvailableMemoryProportion", ({"IPU0": 0.3},), {"available_memory_proportion": {0: 0.3}}
    ),
    Row("setAvailableMemoryProportion", ({"IPU1": 9},), {"available_memory_proportion": {1: 9}}),
    Row("randomSeed", (42,), {"random_seed": 42}),
    Row("enableStableNorm", (True,), {"_Popart.enableStableNorm": True}),
    Row("enableSyntheticData", (True,), {"_Popart.syntheticDataMode": 2}),
    Row("enableSyntheticData", (False,), {"_Popart.syntheticDataMode": 0}),
    Row(
        "enableExecutableCaching",
        ("dir",),
        {"_Popart.cachePath": "dir", "_Popart.enableEngineCaching": True},
    ),
    Row(
        "enableExecutableCaching",
        (None,),
        {"_Popart.cachePath": UNSET, "_Popart.enableEngineCaching": False},
    ),
    Row("useIpuModel", (True,), {"use_model": True}),
    Row("useIpuModel", (False,), {"use_model": False}),
    *(Row("connectionType", (kind,), {"connection_type": kind}) for kind in ConnectionType),
    *(
        Row(
            "useOfflineIpuTarget",
            (version,),
            {"ipu_version": version, "connection_type": ConnectionType.Never},
        )
        for version in (1, 2, 21)
    ),
    Row("useOfflineIpuTarget", (), {"ipu_version": 2}),
    Row("useIpuId", (3,), {"ipu_id": 3}),
    *(Row("syncPattern", (pattern,), {"sync_pattern": pattern}) for pattern in SyncPattern),
    Row("modelName", ("name",), {"model_name": "name"}),
    Row(
        "enableProfiling",
        (),
        {
            "_Popart.engineOptions": {
                "debug.allowOutOfMemory": "true",
                "autoReport.directory": ".",
                "autoReport.all": "true",
            }
        },
    ),
    Row("logCycleCount", (True,), {"_Popart.instrumentWithHardwareCycleCounter": True}),
    Row("logDir", ("logs",), {"log_dir": "logs"}),
    Row("maxRepeatLogs", (9,), {"max_repeat_logs": 9}),
    Row("maxRepeatLogs", (None,), {"max_repeat_logs": 2**64 - 1}),
    Row("showCompilationProgressBar", (False,), {"show_compilation_progress_bar": False}),
    Row("sourceLocationExcludes", (["a"],), {"source_location_excludes": ["a"]}),
    Row("relaxOptimizerAttributesChecks", (), {"relax_optimizer_checks": True}),
    Row("disableModuleNamescope", (), {"module_namescope_enabled": False}),
    Row("updatableNamedBuffers", (["b"],), {"_Popart.updatableNamedBuffers": ["b"]}),
    # 3. Training
    Row("Training.gradientAccumulation", (8,), {"Training.gradient_accumulation": 8}),
    *(
        Row(
            "Training.accumulationAndReplicationReductionType",
            (kind,),
            {"Training.accumulation_and_replication_reduction_type": kind},
        )
        for kind in (ReductionType.Mean, ReductionType.Sum)
    ),
    *(
        Row(
            "Training.setMeanAccumulationAndReplicationReductionStrategy",
            (strategy,),
            {"Training.meanAccumulationAndReplicationReductionStrategy": strategy},
        )
        for strategy in MeanReductionStrategy
    ),
    Row(
        "Training.setAutomaticLossScaling",
        (True,),
        {"_Popart.automaticLossScalingSettings.enabled": True},
    ),
    Row(
        "Training.setConvolutionDithering",
        (True,),
        {"_Popart.convolutionOptions": {"enableConvDithering": "true"}},
    ),
    # 4. Precision and Jit
    Row(
        "Precision.enableFloatingPointExceptions",
        (True,),
        {"_Popart.enableFloatingPointChecks": True},
    ),
    Row("Precision.enableStochasticRounding", (True,), {"_Popart.enableStochasticRounding": True}),
    *(
        Row(
            "Precision.setPartialsType",
            (dtype,),
            {
                "_Popart.partialsTypeMatMuls": name,
                "_Popart.convolutionOptions": {"partialsType": name},
            },
        )
        for dtype, name in ((torch.float, "float"), (torch.half, "half"))
    ),
    Row("Precision.halfFloatCasting", (HalfFloatCastingBehavior.Default,), {}),
    Row("Precision.runningStatisticsAlwaysFloat", (True,), {}),
    Row("Jit.traceModel", (False,), {}),
    # 5. TensorLocations
    Row("TensorLocations.numIOTiles", (32,), {"TensorLocations.numIOTiles": 32}),
    Row("TensorLocations.numIOTiles", (192,), {"TensorLocations.numIOTiles": 192}),
    *(
        Row(
            f"TensorLocations.set{kind}Location",
            (OFF_CHIP,),
            {f"TensorLocations.location_{kind.lower()}": {"onChip": 0}},
        )
        for kind in ("Activation", "Weight", "Optimizer", "Accumulator")
    ),
    # 6. Distributed and _Popart
    Row(
        "Distributed.configureProcessId",
        (1, 4),
        {"Distributed.distributed_process_id": 1, "Distributed.num_distributed_processes": 4},
    ),
    Row(
        "Distributed.disable",
        (),
        {"Distributed.distributed_process_id": 0, "Distributed.num_distributed_processes": 1},
    ),
    Row("_Popart.set", ("no such key", 1.5), {"_Popart.no such key": 1.5}),
    Row("_Popart.setEngineOptions", ({"a": "b"},), {"_Popart.engineOptions": {"a": "b"}}),
    Row(
        "_Popart.setPatterns",
        ({"PadSum": False},),
        {"_Popart.patterns": {"PadSum": False}, "_Popart.patterns_level": 2},
    ),
    Row("_Popart.setPatterns", ({}, 1), {"_Popart.patterns": {}, "_Popart.patterns_level": 1}),
]

REFUSED = [
    # Types are those of the stored values.
    *((path, (2.0,), AssertionError) for path in ("deviceIterations", "replicationFactor")),
    ("Training.gradientAccumulation", ("2",), AssertionError),
    *(
        (path, (1,), AssertionError)
        for path in (
            "broadcastBuffers",
            "autoRoundNumIPUs",
            "enableStableNorm",
            "enableSyntheticData",
            "useIpuModel",
            "logCycleCount",
            "showCompilationProgressBar",
            "relaxOptimizerAttributesChecks",
            "Training.setAutomaticLossScaling",
            "Training.setConvolutionDithering",
            "Precision.enableFloatingPointExceptions",
            "Precision.enableStochasticRounding",
            "modelName",
            "logDir",
            "enableExecutableCaching",
            "enableProfiling",
            "_Popart.setEngineOptions",
            "sourceLocationExcludes",
            "appendToLocationExcludes",
            "updatableNamedBuffers",
            # Enums.
            "outputMode",
            "connectionType",
            "syncPattern",
            "Training.setMeanAccumulationAndReplicationReductionStrategy",
        )
    ),
    ("maxRepeatLogs", ("4",), AssertionError),
    ("useIpuId", ("0",), AssertionError),
    ("randomSeed", (1.0,), AssertionError),
    ("useOfflineIpuTarget", (3,), AssertionError),
    # Values that a check of the setter's own refuses.
    ("inputReplicaGrouping", (1, CommGroupType.All), ValueError),
    ("inputReplicaGrouping", (2, CommGroupType.Consecutive), ValueError),
    ("inputReplicaGrouping", (0, CommGroupType.Orthogonal), ValueError),
    ("outputMode", (OutputMode.EveryN,), AssertionError),
    ("outputMode", (OutputMode.EveryN, 0), AssertionError),
    ("anchorTensor", ("s", "long", 2), AssertionError),
    ("setExecutionStrategy", (ShardedExecution,), AssertionError),
    *(("setAvailableMemoryProportion", (bad,), AssertionError) for bad in ({"0": 1.0}, {0: 1.0})),
    *(
        ("Training.accumulationAndReplicationReductionType", (bad,), ValueError)
        for bad in (ReductionType.NoReduction, 1, "Mean")
    ),
    *(("Precision.setPartialsType", (bad,), ValueError) for bad in (torch.int8, "half", None)),
    ("Precision.runningStatisticsAlwaysFloat", (1,), ValueError),
    ("Jit.traceModel", (True,), ValueError),
    *(("TensorLocations.numIOTiles", (n,), AssertionError) for n in (30, 33, 194, 64.0)),
    *(
        (f"TensorLocations.set{kind}Location", ({},), AssertionError)
        for kind in ("Activation", "Weight", "Optimizer", "Accumulator")
    ),
    ("_Popart.setPatterns", ([],), AssertionError),
    ("_Popart.setPatterns", ({"a": 1},), AssertionError),
    ("_Popart.setPatterns", ({}, "2"), AssertionError),
]

SETTERS_WITHOUT_RESULT = ("setAvailableMemoryProportion", "anchorTensor")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("POPTORCH_CACHE_DIR", "POPTORCH_DEFAULT_OPTIONS", "POPLAR_ENGINE_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("key", DEFAULTS)
def test_default(key):
    value = read(Options(), key)
    assert value == DEFAULTS[key]
    assert type(value) is not CommGroupType
    if key.startswith("Training.") and key != "Training.gradient_accumulation":
        assert isinstance(value, (ReductionType, MeanReductionStrategy))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.path}{row.arguments}")
def test_accepted_values_are_stored(row):
    options = Options()
    result = call(options, row.path, row.arguments)
    stored = {key: read(options, key) for key in row.stored}
    assert stored == row.stored
    if row.path not in SETTERS_WITHOUT_RESULT:
        group = row.path.rpartition(".")[0]
        assert result is (getattr(options, group) if group else options)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.path}{row.arguments}")
def test_frozen_options_refuse_every_setter_but_anchors(row):
    options = Options().freeze()
    if row.path == "anchorTensor":
        call(options, row.path, row.arguments)
        return
    before = repr(options)
    with pytest.raises(AttributeError, match="can't modify frozen options"):
        call(options, row.path, row.arguments)
    assert repr(options) == before


@pytest.mark.parametrize(("path", "arguments", "error"), REFUSED, ids=str)
def test_refused_values_change_nothing(path, arguments, error):
    options = Options()
    before = repr(options)
    with pytest.raises(error, match=re.escape(path.rpartition(".")[2])):
        call(options, path, arguments)
    assert repr(options) == before


def test_every_setter_has_a_row():
    not_setters = {
        "checkIsFrozen",
        "clone",
        "createOrSet",
        "defaultOutputMode",
        "deleteIfExists",
        "exists",
        "freeze",
        "from_json",
        "loadFromFile",
        "set",
        "toDict",
        "update",
        # Without a row of their own: they add to, or do the same as, another one's.
        "appendToLocationExcludes",
        "setEnvVarNames",
    }
    options = Options()
    groups = {"": options, **options._parts()}
    found = {
        f"{prefix}.{name}" if prefix else name
        for prefix, group in groups.items()
        for name in dir(type(group))
        if not name.startswith("_")
        and callable(getattr(type(group), name))
        and not isinstance(getattr(type(group), name), property)
        and hasattr(getattr(type(group), name), "__code__")
    }
    beside_rows = {path for path in found if path.rpartition(".")[2] in not_setters}
    assert found - (beside_rows - {"_Popart.set"}) == {row.path for row in ROWS}


def test_repr_lists_exactly_the_stored_keys():
    listed = re.findall(r"(?<![.\w])(\w+)=", repr(Options()).split("Training(")[0])
    assert set(listed) == ALWAYS


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        (ShardedExecution(), {"execution_mode": 1}),
        (
            SerialPhasedExecution("a").setTensorsLiveness(Liveness.OffChipAfterEachPhase),
            {
                "execution_mode": 2,
                "separate_backward_phase": False,
                "tensors_liveness": 3,
                "serial_phases_execution": True,
            },
        ),
        (
            ParallelPhasedExecution("a").useSeparateBackwardPhase(),
            {
                "execution_mode": 2,
                "separate_backward_phase": True,
                "tensors_liveness": 0,
                "serial_phases_execution": False,
            },
        ),
    ],
    ids=str,
)
def test_flat_options_hold_the_strategy_and_all_keys(strategy, mode):
    options = Options().outputMode(OutputMode.All).setExecutionStrategy(strategy)
    flat = options.toDict()
    flat.pop("compilation_progress_bar_fn")
    others = {name.rpartition(".")[2] for name, value in DEFAULTS.items() if value is not UNSET}
    assert set(flat) == {
        *others,
        *mode,
        "instrumentWithHardwareCycleCounter",
        "rearrangeAnchorsOnHost",
    }
    assert {key: flat[key] for key in mode} == mode
