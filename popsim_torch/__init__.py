"""PopTorch programs on a simulated IPU: ``import popsim_torch as poptorch``."""

from popsim_torch import enums, ops, optim, options, poptorch_core, profiling, testing
from popsim_torch.alias import install, uninstall
from popsim_torch.annotations import (
    MultiConv,
    dynamic_slice,
    dynamic_update,
    serializedMatMul,
    set_overlap_for_input,
    set_overlap_for_output,
)
from popsim_torch.arguments import ICustomArgParser, registerCustomArgParser
from popsim_torch.attributes import Attribute, accessAttributes
from popsim_torch.compile_hooks import registerPostCompileHook, registerPreCompileHook
from popsim_torch.control_flow import cond, for_loop
from popsim_torch.custom_ops import custom_op, custom_op_include, register_custom_op
from popsim_torch.dataloader import AsynchronousDataAccessor, DataLoader
from popsim_torch.enums import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    HalfFloatCastingBehavior,
    Liveness,
    MatMulSerializationMode,
    MeanReductionStrategy,
    MultiConvPlanType,
    OutputMode,
    OverlapMode,
    ReductionType,
    SharingStrategy,
    SyncPattern,
    VariableRetrievalMode,
)
from popsim_torch.errors import (
    ConfigFileError,
    Error,
    RecoverableError,
    UnrecoverableError,
    createPoptorchError,
)
from popsim_torch.feeds import (
    InfeedQueue,
    OutfeedMode,
    OutfeedQueue,
    dataset_benchmark,
    infeed_benchmark,
)
from popsim_torch.hardware import ipuHardwareIsAvailable, ipuHardwareVersion
from popsim_torch.host_call import CPU
from popsim_torch.loading import load
from popsim_torch.logs import setLogLevel
from popsim_torch.model import PoplarExecutor, inferenceModel, trainingModel
from popsim_torch.ops import (
    NameScope,
    getIpuTensorId,
    identity_loss,
    ipu_print_tensor,
    isRunningOnIpu,
    nop,
    recomputationCheckpoint,
    set_available_memory,
)
from popsim_torch.options import Options, TensorLocationSettings
from popsim_torch.processor import BuildInfo, build_info
from popsim_torch.searches import ctc_beam_search_decoder, fps, nearest
from popsim_torch.stages import (
    BeginBlock,
    Block,
    BlockFunction,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    module_repr,
    print,
    removeBlocks,
)
from popsim_torch.version import __version__

__all__ = [
    "CPU",
    "AsynchronousDataAccessor",
    "Attribute",
    "AutoStage",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "BuildInfo",
    "CommGroupType",
    "ConfigFileError",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "HalfFloatCastingBehavior",
    "ICustomArgParser",
    "InfeedQueue",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConv",
    "MultiConvPlanType",
    "NameScope",
    "Options",
    "OutfeedMode",
    "OutfeedQueue",
    "OutputMode",
    "OverlapMode",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PoplarExecutor",
    "RecoverableError",
    "ReductionType",
    "SerialPhasedExecution",
    "ShardedExecution",
    "SharingStrategy",
    "Stage",
    "SyncPattern",
    "TensorLocationSettings",
    "UnrecoverableError",
    "VariableRetrievalMode",
    "__version__",
    "accessAttributes",
    "build_info",
    "cond",
    "createPoptorchError",
    "ctc_beam_search_decoder",
    "custom_op",
    "custom_op_include",
    "dataset_benchmark",
    "dynamic_slice",
    "dynamic_update",
    "enums",
    "for_loop",
    "fps",
    "getIpuTensorId",
    "identity_loss",
    "infeed_benchmark",
    "inferenceModel",
    "install",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "load",
    "module_repr",
    "nearest",
    "nop",
    "ops",
    "optim",
    "options",
    "poptorch_core",
    "print",
    "profiling",
    "recomputationCheckpoint",
    "registerCustomArgParser",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "register_custom_op",
    "removeBlocks",
    "serializedMatMul",
    "setLogLevel",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "testing",
    "trainingModel",
    "uninstall",
]
