"""What each setter of Options and its groups accepts, stores and refuses."""

import logging

import pytest
import torch

from popsim_torch.enums import (
    AutoStage,
    HalfFloatCastingBehavior,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
    SyncPattern,
)
from popsim_torch.errors import (
    UsageAssertionError,
    UsageTypeError,
    UsageValueError,
)
from popsim_torch.options import Options, TensorLocationSettings
from popsim_torch.stages import PipelinedExecution, ShardedExecution


@pytest.fixture
def opts():
    return Options()


def at(opts, path):
    """Return the setter named by a dotted path."""
    for name in path.split("."):
        opts = getattr(opts, name)
    return opts


# Output mode and anchors


def test_output_mode_is_stored_as_a_plain_int(opts):
    assert type(opts.outputMode(OutputMode.Sum).output_mode) is int
    assert opts.output_mode == OutputMode.Sum


def test_output_mode_is_default_until_set(opts):
    assert opts.defaultOutputMode()
    assert not opts.outputMode(OutputMode.Final).defaultOutputMode()


@pytest.mark.parametrize("mode", [2, "All", None])
def test_output_mode_must_be_the_enum(opts, mode):
    with pytest.raises(UsageAssertionError, match=r"use one of OutputMode\.Final"):
        opts.outputMode(mode)


@pytest.mark.parametrize("period", [None, 0, -2, 1.5])
def test_every_n_needs_a_positive_period(opts, period):
    with pytest.raises(UsageAssertionError, match=r"EveryN needs an int above 0"):
        opts.outputMode(OutputMode.EveryN, period)


def test_every_n_keeps_its_period(opts):
    opts.outputMode(OutputMode.EveryN, output_return_period=3)
    assert (opts.output_mode, opts.output_return_period) == (OutputMode.EveryN, 3)


def test_period_of_another_mode_is_ignored_with_a_log_line(opts, caplog):
    with caplog.at_level(logging.INFO, "poptorch::python"):
        opts.outputMode(OutputMode.All, 3)
    assert opts.output_return_period == 1
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_assigned_output_mode_must_be_a_member(opts):
    with pytest.raises(UsageValueError, match=r"use OutputMode\.Final"):
        opts.output_mode = 77


def test_anchor_without_a_mode_takes_that_of_the_model(opts):
    assert opts.anchorTensor("w", "fc.weight") is opts
    assert opts.anchored_tensors == {"w": ["fc.weight", True, OutputMode.Default, 1]}


def test_anchor_keeps_its_mode_and_period(opts):
    opts.anchorTensor("w", "fc.weight", OutputMode.EveryN, 4)
    assert opts.anchored_tensors["w"] == ["fc.weight", False, OutputMode.EveryN, 4]


def test_anchor_needs_a_period_for_every_n(opts):
    with pytest.raises(UsageAssertionError, match=r"EveryN needs an int above 0\. Pass output_ret"):
        opts.anchorTensor("w", "fc.weight", output_mode=OutputMode.EveryN)
    assert not opts.anchored_tensors


def test_anchor_period_counts_for_every_n_only(opts):
    opts.anchorTensor("w", "fc.weight", OutputMode.All, 4)
    assert opts.anchored_tensors["w"][3] == 1


def test_anchor_accepts_the_older_spellings(opts):
    opts.anchorTensor("w", "fc.weight", anchor_mode=OutputMode.EveryN, anchor_return_period=4)
    assert opts.anchored_tensors["w"][2:] == [OutputMode.EveryN, 4]


@pytest.mark.parametrize(
    "arguments",
    [
        {"output_mode": OutputMode.All, "anchor_mode": OutputMode.All},
        {
            "output_mode": OutputMode.EveryN,
            "output_return_period": 1,
            "anchor_return_period": 1,
        },
    ],
)
def test_anchor_refuses_both_spellings(opts, arguments):
    with pytest.raises(UsageTypeError, match="two spellings of one argument"):
        opts.anchorTensor("w", "fc.weight", **arguments)


def test_anchor_of_the_same_name_replaces_the_first(opts):
    opts.anchorTensor("w", "a")
    opts.anchorTensor("w", "b")
    assert [request[0] for request in opts.anchored_tensors.values()] == ["b"]


def test_anchor_mode_must_be_the_enum(opts):
    with pytest.raises(UsageAssertionError):
        opts.anchorTensor("w", "fc.weight", 2)


def test_anchor_names_must_be_strings(opts):
    with pytest.raises(UsageAssertionError, match="the short name has to be a string"):
        opts.anchorTensor(3, "fc.weight")
    with pytest.raises(UsageAssertionError, match=r"a int selects no tensors\. Pass a name"):
        opts.anchorTensor("w", 3)
    with pytest.raises(UsageAssertionError, match="an empty list selects nothing"):
        opts.anchorTensor("w", [])


# Other supported settings


def test_random_seed_seeds_torch_too(opts):
    opts.randomSeed(1234)
    assert opts.random_seed == 1234
    assert torch.initial_seed() == 1234


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63, 2**64 - 1])
def test_random_seed_takes_what_torch_takes(opts, seed):
    opts.randomSeed(seed)
    assert opts.random_seed == seed
    assert torch.initial_seed() == seed % 2**64


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64, 10**30])
def test_random_seed_out_of_range(opts, seed):
    torch.manual_seed(5)
    with pytest.raises(UsageValueError, match=rf"randomSeed\({seed}\).*-2\*\*63 to 2\*\*64 - 1"):
        opts.randomSeed(seed)
    assert not opts.exists("random_seed")
    assert torch.initial_seed() == 5


@pytest.mark.parametrize(
    ("path", "stored"),
    [
        ("deviceIterations", "device_iterations"),
        ("randomSeed", "random_seed"),
        ("useIpuId", "ipu_id"),
        ("maxRepeatLogs", "max_repeat_logs"),
        ("replicationFactor", "replication_factor"),
    ],
)
def test_true_counts_as_one(opts, path, stored):
    getattr(opts, path)(True)
    assert type(opts(stored)) is int
    assert opts(stored) == 1


def test_periods_of_true_count_as_one(opts):
    opts.outputMode(OutputMode.EveryN, True)
    opts.anchorTensor("w", "fc.weight", OutputMode.EveryN, True)
    for period in (opts.output_return_period, opts.anchored_tensors["w"][3]):
        assert type(period) is int
        assert period == 1


def test_random_seed_must_be_an_int(opts):
    with pytest.raises(UsageAssertionError, match=r"Options\.randomSeed\('1'\)"):
        opts.randomSeed("1")


def test_execution_strategy_is_pipelined_by_default(opts):
    assert type(opts.execution_strategy) is PipelinedExecution
    assert opts.execution_strategy.auto_stage is AutoStage.SameAsIpu


def test_execution_strategy_can_be_changed_back_and_forth(opts):
    opts.setExecutionStrategy(ShardedExecution())
    opts.setExecutionStrategy(strategy := PipelinedExecution("a"))
    assert opts.execution_strategy is strategy


@pytest.mark.parametrize("strategy", [PipelinedExecution, AutoStage.SameAsIpu, None])
def test_execution_strategy_must_be_an_instance(opts, strategy):
    with pytest.raises(UsageAssertionError, match=r"Options\.setExecutionStrategy"):
        opts.setExecutionStrategy(strategy)


def test_memory_proportion_is_stored_by_ipu_number(opts):
    assert opts.setAvailableMemoryProportion({"IPU0": 0.3, "IPU12": 5}) is None
    assert opts.available_memory_proportion == {0: 0.3, 12: 5}


@pytest.mark.parametrize("bad", [{"0": 0.1}, {"IPU": 0.1}, {"IPUx": 0.1}, {0: 0.1}, [("IPU0", 1)]])
def test_memory_proportion_needs_ipu_names(opts, bad):
    with pytest.raises(UsageAssertionError, match=r"Options\.setAvailableMemoryProportion"):
        opts.setAvailableMemoryProportion(bad)


def test_max_repeat_logs_none_means_no_limit(opts):
    assert opts.max_repeat_logs == 4
    assert opts.maxRepeatLogs(None).max_repeat_logs == 2**64 - 1
    assert opts.maxRepeatLogs(7).max_repeat_logs == 7


def test_location_excludes_are_replaced_and_appended(opts):
    assert len(opts.source_location_excludes) == 3
    opts.sourceLocationExcludes(["a"]).appendToLocationExcludes("b", "c")
    assert opts.source_location_excludes == ["a", "b", "c"]


def test_location_excludes_must_be_strings(opts):
    with pytest.raises(UsageAssertionError):
        opts.sourceLocationExcludes([1])
    with pytest.raises(UsageAssertionError):
        opts.appendToLocationExcludes("a", 1)


def test_module_namescope_is_on_until_disabled(opts):
    assert opts.module_namescope_enabled is True
    assert opts.disableModuleNamescope().module_namescope_enabled is False


def test_sync_pattern_must_be_the_enum(opts):
    assert opts.syncPattern(SyncPattern.SinglePipeline).sync_pattern == 1
    with pytest.raises(UsageAssertionError):
        opts.syncPattern(1)


@pytest.mark.parametrize(
    ("setter", "good", "name"),
    [
        ("broadcastBuffers", False, "broadcast_buffers"),
        ("autoRoundNumIPUs", True, "auto_round_num_ipus"),
        ("showCompilationProgressBar", False, "show_compilation_progress_bar"),
        ("relaxOptimizerAttributesChecks", True, "relax_optimizer_checks"),
        ("useIpuId", 3, "ipu_id"),
        ("modelName", "mine", "model_name"),
        ("logDir", "logs", "log_dir"),
    ],
)
def test_plain_setter_stores_its_argument_and_checks_its_type(opts, setter, good, name):
    assert getattr(opts, setter)(good) is opts
    assert opts(name) == good
    with pytest.raises(UsageAssertionError):
        getattr(opts, setter)(object())


# Training, Precision, Jit


@pytest.mark.parametrize("kind", [ReductionType.Mean, ReductionType.Sum])
def test_reduction_type_is_mean_or_sum(opts, kind):
    training = opts.Training.accumulationAndReplicationReductionType(kind)
    assert training.accumulation_and_replication_reduction_type == kind


@pytest.mark.parametrize("kind", [ReductionType.NoReduction, 1, "Mean", None])
def test_reduction_type_refuses_anything_else(opts, kind):
    with pytest.raises(UsageValueError, match=r"use ReductionType\.Mean or"):
        opts.Training.accumulationAndReplicationReductionType(kind)


def test_mean_reduction_strategy_is_post_by_default(opts):
    name = "meanAccumulationAndReplicationReductionStrategy"
    assert opts.Training(name) == MeanReductionStrategy.Post


@pytest.mark.parametrize("strategy", [MeanReductionStrategy.Post, MeanReductionStrategy.Running])
def test_mean_reduction_strategy_is_stored(opts, strategy):
    opts.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    assert opts.Training.meanAccumulationAndReplicationReductionStrategy == strategy


def test_mean_reduction_strategy_must_be_the_enum(opts):
    with pytest.raises(UsageAssertionError):
        opts.Training.setMeanAccumulationAndReplicationReductionStrategy(1)


def test_gradient_accumulation_must_be_an_int(opts):
    with pytest.raises(
        UsageAssertionError, match=r"Options\.Training\.gradientAccumulation\(2\.0\)"
    ):
        opts.Training.gradientAccumulation(2.0)


@pytest.mark.parametrize(
    ("path", "argument"),
    [
        ("Precision.halfFloatCasting", HalfFloatCastingBehavior.HalfUpcastToFloat),
        ("Precision.runningStatisticsAlwaysFloat", True),
        ("Jit.traceModel", False),
    ],
)
def test_deprecated_setter_warns(opts, caplog, path, argument):
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        at(opts, path)(argument)
    assert f"Options.{path} is deprecated and has no effect" in caplog.text


def test_running_statistics_setter_needs_a_bool(opts):
    with pytest.raises(UsageValueError):
        opts.Precision.runningStatisticsAlwaysFloat(1)


def test_trace_model_cannot_be_turned_on(opts):
    with pytest.raises(UsageValueError, match="Remove the call"):
        opts.Jit.traceModel(True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, "float"])
def test_partials_type_is_float_or_half(opts, dtype):
    with pytest.raises(UsageValueError, match=r"use torch\.float or torch\.half"):
        opts.Precision.setPartialsType(dtype)


@pytest.mark.parametrize(("dtype", "name"), [(torch.half, "half"), (torch.float, "float")])
def test_partials_type_is_stored_printed_and_copied(opts, dtype, name):
    assert opts.Precision.setPartialsType(dtype) is opts.Precision
    for twin in (opts, opts.clone()):
        assert twin._Popart.matmul_partials == twin._Popart.convolution_partials == name
        assert f"partialsTypeMatMuls={name!r}" in repr(twin)


def test_groups_of_a_copy_store_into_the_copy(opts):
    twin = opts.clone()
    twin.Precision.setPartialsType(torch.half)
    twin.Training.setAutomaticLossScaling(True)
    assert "partialsTypeMatMuls" in twin._Popart.options
    assert "automaticLossScalingSettings.enabled" in twin._Popart.options
    assert repr(opts) == repr(Options())


def test_dithering_and_partials_add_up(opts):
    opts.Precision.setPartialsType(torch.half)
    opts.Training.setConvolutionDithering(True)
    assert opts._Popart.options["convolutionOptions"] == {
        "partialsType": "half",
        "enableConvDithering": "true",
    }


# Caching and profiling


def test_turning_caching_off_keeps_the_directory(opts, tmp_path):
    opts.enableExecutableCaching(tmp_path).enableExecutableCaching(None)
    assert opts._Popart.options["cachePath"] == str(tmp_path)
    assert opts._Popart.options["enableEngineCaching"] is False


def test_profiling_adds_to_the_engine_options(opts, tmp_path):
    opts._Popart.setEngineOptions({"a": "b", "autoReport.all": "false"})
    assert opts.enableProfiling(tmp_path) is opts
    assert opts._Popart.options["engineOptions"] == {
        "a": "b",
        "debug.allowOutOfMemory": "true",
        "autoReport.directory": str(tmp_path),
        "autoReport.all": "true",
    }


@pytest.mark.parametrize(
    ("text", "lines"), [('{"autoReport.all":"true"}', 1), ('{"opt.x":"1"}', 0), ("", 0)]
)
def test_profiling_warns_of_reports_in_the_environment(opts, monkeypatch, caplog, text, lines):
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", text)
    opts.enableProfiling()
    assert caplog.text.count("POPLAR_ENGINE_OPTIONS") == lines


# TensorLocationSettings


def test_location_settings_chain_and_store_plain_numbers():
    settings = (
        TensorLocationSettings()
        .minElementsForOffChip(10)
        .minElementsForReplicatedTensorSharding(20)
        .useOnChipStorage(False)
        .useReplicatedTensorSharding()
        .useIOTilesToLoad()
        .useIOTilesToStore(False)
    )
    assert settings.toDict() == {
        "minElementsForOffChip": 10,
        "minElementsForReplicatedTensorSharding": 20,
        "onChip": 0,
        "useReplicatedTensorSharding": 1,
        "useIOTilesToLoad": 1,
        "useIOTilesToStore": 0,
    }


def test_location_settings_forget_the_storage_choice():
    assert TensorLocationSettings().useOnChipStorage().useOnChipStorage(None).toDict() == {}


@pytest.mark.parametrize(
    ("method", "bad"),
    [
        ("minElementsForOffChip", 1.0),
        ("minElementsForReplicatedTensorSharding", "1"),
        ("useOnChipStorage", 1),
        ("useReplicatedTensorSharding", None),
        ("useIOTilesToLoad", 1),
        ("useIOTilesToStore", 0),
    ],
)
def test_location_settings_check_their_arguments(method, bad):
    with pytest.raises(UsageAssertionError):
        getattr(TensorLocationSettings(), method)(bad)


# Distributed and the back end


def test_distributed_reads_the_environment_of_a_launcher(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    distributed = Options().Distributed
    assert (distributed.processId, distributed.numProcesses) == (3, 4)
    distributed.disable()
    assert (distributed.processId, distributed.numProcesses) == (0, 1)


def test_distributed_reads_named_variables(opts, monkeypatch):
    monkeypatch.setenv("MY_SIZE", "1")
    opts.Distributed.setEnvVarNames("MY_SIZE", "MY_RANK")
    assert opts.Distributed.numProcesses == 1


def test_distributed_variables_must_hold_numbers(opts, monkeypatch):
    monkeypatch.setenv("MY_SIZE", "many")
    with pytest.raises(UsageValueError, match="MY_SIZE is 'many', not an int"):
        opts.Distributed.setEnvVarNames("MY_SIZE", "MY_RANK")


@pytest.mark.parametrize(("process", "count"), [(1, 1), (-1, 1), (0, 0)])
def test_process_id_must_be_in_range(opts, process, count):
    with pytest.raises(UsageValueError, match="need 0 <= process id"):
        opts.Distributed.configureProcessId(process, count)


def test_process_properties_are_read_only(opts):
    with pytest.raises(AttributeError):
        opts.Distributed.numProcesses = 2


def test_popart_begins_with_two_settings(opts):
    assert opts._Popart.options == {
        "instrumentWithHardwareCycleCounter": False,
        "rearrangeAnchorsOnHost": False,
    }


@pytest.mark.parametrize("key", ["convolutionOptions", "matmulOptions"])
def test_popart_adds_entries_to_those_of_earlier_calls(opts, key):
    opts._Popart.set(key, {"partialsType": "half"})
    opts._Popart.set(key, {"availableMemoryProportion": "0.1"})
    assert opts._Popart.options[key] == {
        "partialsType": "half",
        "availableMemoryProportion": "0.1",
    }
    assert "'partialsType': 'half'" in repr(opts.clone())
    opts._Popart.set(key, {"partialsType": "float"})
    assert opts._Popart.options[key]["partialsType"] == "float"


@pytest.mark.parametrize(
    ("settings", "matmul", "convolution"),
    [
        ({}, None, None),
        ({"partialsTypeMatMuls": "half"}, "half", None),
        (
            {"matmulOptions": {"partialsType": "float"}, "partialsTypeMatMuls": "half"},
            "float",
            None,
        ),
        ({"matmulOptions": {}, "partialsTypeMatMuls": "half"}, "half", None),
        ({"convolutionOptions": {"partialsType": "half"}}, None, "half"),
    ],
)
def test_popart_says_which_partials_its_settings_choose(opts, settings, matmul, convolution):
    for key, value in settings.items():
        opts._Popart.set(key, value)
    assert opts._Popart.matmul_partials == matmul
    assert opts._Popart.convolution_partials == convolution


def test_popart_partials_can_be_set_by_text(opts, tmp_path):
    opts.from_json('{"_Popart.set": ["partialsTypeMatMuls", "half"]}')
    path = tmp_path / "options"
    path.write_text('_Popart.set("convolutionOptions", {"partialsType": "half"})')
    opts.loadFromFile(str(path))
    assert opts._Popart.matmul_partials == opts._Popart.convolution_partials == "half"


@pytest.mark.parametrize("key", ["reportOptions", "exportPoplarComputationGraph", "dotChecks"])
def test_popart_stores_settings_without_effect(opts, key):
    assert opts._Popart.set(key, {"a": "b"}) is opts._Popart
    assert opts._Popart.options[key] == {"a": "b"}


def test_popart_stores_engine_options_and_patterns(opts):
    opts._Popart.setEngineOptions({"a": "b"}).setPatterns({"PadSum": False}, level=1)
    assert opts._Popart.options["engineOptions"] == {"a": "b"}
    assert opts._Popart.options["patterns"] == {"PadSum": False}
    assert opts._Popart.options["patterns_level"] == 1


def test_popart_warns_that_its_log_dir_is_ignored(opts, caplog):
    opts._Popart.set("logDir", "logs")
    assert "Use Options.logDir" in caplog.text
