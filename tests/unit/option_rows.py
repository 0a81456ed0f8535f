"""What each setter of ``Options`` accepts, stores and refuses: rows of the contract.

A row names a setter by its dotted path. ``stored`` gives, by dotted key, the values of the options
after the call; ``_Popart.x`` is an entry of ``_Popart.options``.
"""

from typing import Any, NamedTuple

import torch

from popsim_torch.enums import (
    CommGroupType,
    ConnectionType,
    HalfFloatCastingBehavior,
    MeanReductionStrategy,
    OutputMode,
    PipelineSchedule,
    ReductionType,
    SyncPattern,
)
from popsim_torch.options import TensorLocationSettings
from popsim_torch.stages import ShardedExecution

UNSET = object()
SHARDED = ShardedExecution("a")
OFF_CHIP = TensorLocationSettings().useOnChipStorage(False)


class Row(NamedTuple):
    """One call of a setter, and the values that it stores."""

    path: str
    arguments: tuple[Any, ...]
    stored: dict[str, Any]


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
    "_Popart.instrumentWithHardwareCycleCounter": False,
    "_Popart.rearrangeAnchorsOnHost": False,
    "_Popart.syntheticDataMode": UNSET,
    "_Popart.cachePath": UNSET,
    "_Popart.enableEngineCaching": UNSET,
    "_Popart.enableStableNorm": UNSET,
    "_Popart.updatableNamedBuffers": UNSET,
    "_Popart.engineOptions": UNSET,
    "_Popart.enableFloatingPointChecks": UNSET,
    "_Popart.enableStochasticRounding": UNSET,
    "_Popart.partialsTypeMatMuls": UNSET,
    "_Popart.convolutionOptions": UNSET,
    "_Popart.automaticLossScalingSettings.enabled": UNSET,
    "_Popart.patterns": UNSET,
    "_Popart.patterns_level": UNSET,
}

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
    *(Row("pipelineSchedule", (one,), {"pipeline_schedule": one}) for one in PipelineSchedule),
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
    Row("Training.gradientAccumulationDtype", (torch.float16,), {}),
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
    # The types are those of the stored values.
    *((path, (2.0,), AssertionError) for path in ("deviceIterations", "replicationFactor")),
    ("Training.gradientAccumulation", ("2",), AssertionError),
    ("Training.gradientAccumulationDtype", (torch.int32,), TypeError),
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
            "pipelineSchedule",
            "syncPattern",
            "Training.setMeanAccumulationAndReplicationReductionStrategy",
        )
    ),
    ("maxRepeatLogs", ("4",), AssertionError),
    ("useIpuId", ("0",), AssertionError),
    ("randomSeed", (1.0,), AssertionError),
    ("useOfflineIpuTarget", (3,), AssertionError),
    # Values that a setter's own check refuses.
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
    *(
        ("Distributed.configureProcessId", bad, error)
        for bad, error in (((0, "2"), AssertionError), ((2, 2), ValueError), ((-1, 2), ValueError))
    ),
    ("_Popart.setPatterns", ([],), AssertionError),
    ("_Popart.setPatterns", ({"a": 1},), AssertionError),
    ("_Popart.setPatterns", ({}, "2"), AssertionError),
]
