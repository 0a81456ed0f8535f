"""The settings of PopTorch's back end that ``Options`` may hold: their names, kinds and ranges.

This file also says which of them take effect, and which are refused and why. Package private.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_BOOL = """
    broadcast_buffers auto_round_num_ipus use_model separate_backward_phase serial_phases_execution

    aliasZeroCopy
    automaticLossScalingSettings.enabled
    batchSerializationSettings.concatOnExecutionPhaseChange
    batchSerializationSettings.concatOnPipelineStageChange
    batchSerializationSettings.concatOnVirtualGraphChange
    compileEngine constantWeights
    createImplicitPipeliningFwdOnlyProgram
    decomposeGradSum delayVarUpdates disableGradAccumulationTensorStreams
    disableOptimizerStateTensorStreams dotOpNames
    enableConstantFoldingOfMultipleConsumers enableDistributedReplicatedGraphs enableEngineCaching
    enableExplicitIR
    enableExplicitMainLoops enableFloatingPointChecks enableFullyConnectedPass
    enableGradientAccumulation enableInplaceAmbiguityCheck enableInplaceAmbiguityChecking
    enableLoadAndOffloadRNGState enableMergeExchange
    enableNonStableSoftmax enableOutlining enableOutliningCopyCostPruning enablePipelining
    enablePrefetchDatastreams enableReplicatedGraphs enableSerializedMatmuls enableStableNorm
    enableStochasticRounding enableSupportedDataTypeCasting enableVariablesCaching
    ensureFp32LossScaleTensor
    explicitRecomputation exportPoplarComputationGraph exportPoplarVertexGraph
    groupHostSync groupNormStridedChannelGrouping
    instrumentWithHardwareCycleCounter
    opxAliasChecking opxModifyChecking
    rearrangeAnchorsOnHost rearrangeStreamsOnHost
    replicatedCollectivesSettings.mergeAllGatherCollectives
    replicatedCollectivesSettings.mergeAllReduceCollectives
    replicatedCollectivesSettings.mergeReduceScatterCollectives
    replicatedCollectivesSettings.prepareScheduleForMergingCollectives
    scheduleNonWeightUpdateGradientConsumersEarly separateCallOpPdfs
    strictOpVersions useHostCopyOps
"""

_INT = """
    replication_factor input_group_size input_cgt device_iterations max_repeat_logs output_mode
    output_return_period connection_type sync_pattern ipu_id ipu_version random_seed
    gradient_accumulation accumulation_and_replication_reduction_type
    meanAccumulationAndReplicationReductionStrategy num_distributed_processes
    distributed_process_id execution_mode tensors_liveness patterns_level

    accumulateOuterFragmentSettings.schedule
    accumulationAndReplicationReductionType accumulationFactor autoRecomputation
    autodiffSettings.stitchStrategy
    automaticLossScalingSettings.gradientTensorTrackingMethod
    automaticLossScalingSettings.updatePeriod
    batchSerializationSettings.batchSchedule batchSerializationSettings.factor
    batchSerializationSettings.method batchSerializationSettings.transformContext
    compilationProgressTotal
    defaultBufferingDepth defaultPrefetchBufferingDepth
    executionPhaseSettings.phases executionPhaseSettings.stages
    finalDotOp firstDotOp globalReplicaOffset globalReplicationFactor
    looseThresholdAtPeak
    mergeVarUpdate mergeVarUpdateMemThreshold numIOTiles
    subgraphCopyingStrategy swapLimitScheduler syntheticDataMode
    transitiveClosureOptimizationThreshold virtualGraphMode
"""

_FLOAT = """
    automaticLossScalingSettings.binEdgeLocation
    automaticLossScalingSettings.thresholdUpperCountProportion
    outlineSequenceBreakCost outlineThreshold timeLimitScheduler
"""

_STR = """
    log_dir model_name

    cachePath customCodeletCompileFlags exportPoplarComputationGraph exportPoplarVertexGraph
    kahnTieBreaker logDir partialsTypeMatMuls saveInitializersToFile
    serializedPoprithmsShiftGraphsDir
"""

_LIST = """
    accumulateOuterFragmentSettings.excludedVirtualGraphs
    automaticLossScalingSettings.toTrackTensors
    customCodelets dotChecks hardwareInstrumentations updatableNamedBuffers
"""

_TEXT_DICTS = """
    convolutionOptions engineOptions gclOptions lstmOptions matmulOptions reportOptions
"""

_DICT = f"""
    anchored_tensors available_memory_proportion ipuof_configs location_accumulator
    location_activation location_optimizer location_weight

    patterns {_TEXT_DICTS}
"""

KEYS: dict[str, frozenset[str]] = {
    kind: frozenset(names.split())
    for kind, names in (
        ("bool", _BOOL),
        ("int", _INT),
        ("float", _FLOAT),
        ("str", _STR),
        ("list", _LIST),
        ("dict", _DICT),
    )
}
"""The names under which a value of each kind may be stored; names of ``Options`` come first."""

TEXT_DICTS = frozenset(_TEXT_DICTS.split())
"""The settings that are dictionaries from strings to strings."""

PARTIALS = ("float", "half")
"""The values of ``partialsTypeMatMuls``, and of ``partialsType`` in the options of products."""

NUM_MEMBERS: dict[str, int] = {
    "accumulateOuterFragmentSettings.schedule": 4,
    "accumulationAndReplicationReductionType": 3,
    "autoRecomputation": 5,
    "autodiffSettings.stitchStrategy": 5,
    "automaticLossScalingSettings.gradientTensorTrackingMethod": 3,
    "batchSerializationSettings.batchSchedule": 5,
    "batchSerializationSettings.method": 3,
    "batchSerializationSettings.transformContext": 3,
    "mergeVarUpdate": 4,
    "subgraphCopyingStrategy": 2,
    "syntheticDataMode": 3,
    "virtualGraphMode": 4,
}
"""The number of members of each enum of the back end, whose values are passed as ints."""


@dataclass(frozen=True)
class Limit:
    """A setting that changes computed values, and of which popsim_torch supports one value.

    Attributes:
        value: The supported value; if it is a string, the key of ``Options.toDict`` with that
            value.
        reason: What popsim_torch does, and what to do instead.
    """

    value: Any
    reason: str


LIMITS: dict[str, Limit] = {
    "accumulationFactor": Limit(
        "gradient_accumulation", "call Options.Training.gradientAccumulation instead."
    ),
    "accumulationAndReplicationReductionType": Limit(
        "accumulation_and_replication_reduction_type",
        "call Options.Training.accumulationAndReplicationReductionType instead.",
    ),
    "automaticLossScalingSettings.toTrackTensors": Limit(
        [], "automatic loss scaling looks at the gradients of all parameters. Leave it out."
    ),
}
"""The settings that are refused with another value. ``OVERRULED`` has those that only cause a
warning. ``ensureFp32LossScaleTensor`` is refused with a float16 loss, and causes a warning with
others.

Those that take effect: ``autoRecomputation``, ``automaticLossScalingSettings`` (``enabled``,
``binEdgeLocation``, ``thresholdUpperCountProportion``, ``updatePeriod``), ``convolutionOptions``
and ``matmulOptions`` (``partialsType``), ``cachePath``, ``enableEngineCaching``,
``enableFloatingPointChecks``, ``enableNonStableSoftmax`` (not inside of losses and of
``scaled_dot_product_attention``), ``enableStochasticRounding``, ``engineOptions`` (the reports of
``Options.enableProfiling``), ``groupNormStridedChannelGrouping``,
``instrumentWithHardwareCycleCounter``, ``partialsTypeMatMuls``, ``syntheticDataMode``,
``updatableNamedBuffers``.

Two settings change rounding on a real machine, but nothing here: ``enableStableNorm`` (variances
always come from deviations from the mean) and ``decomposeGradSum`` (gradients of a tensor are
always added one by one). The other settings change no values: they concern time, memory, dumps and
reports.
"""

_ONE_REPLICA = "Options.Distributed and replicationFactor say so"

OVERRULED: dict[str, Limit] = {
    "automaticLossScalingSettings.gradientTensorTrackingMethod": Limit(
        0, "automatic loss scaling looks at the gradients of all parameters"
    ),
    "enableDistributedReplicatedGraphs": Limit(False, _ONE_REPLICA),
    "enableGradientAccumulation": Limit(
        "gradient_accumulation", "Options.Training.gradientAccumulation says so"
    ),
    "enableReplicatedGraphs": Limit(False, _ONE_REPLICA),
    "globalReplicaOffset": Limit(0, _ONE_REPLICA),
    "globalReplicationFactor": Limit(1, _ONE_REPLICA),
}
"""Settings whose other values would change computed values. They have no effect, and a warning says
so once. Programs set them in addition to the option that takes effect, or without need.
"""
