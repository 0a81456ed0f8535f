"""Stages, phases, the strategies made of them and the checks of a pipeline."""

import logging

import pytest

from popsim_torch.enums import AutoStage, Liveness
from popsim_torch.errors import (
    Error,
    UsageAssertionError,
)
from popsim_torch.stages import (
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    check_pipeline,
    count_stages,
)

# Stages and strategies


def test_stage_lists_its_blocks():
    assert Stage("a", "b").blocks == ("a", "b")


def test_stage_ipu_returns_the_stage():
    stage = Stage("a")
    assert stage.ipu(2) is stage
    assert stage.ipu_id == 2


@pytest.mark.parametrize("bad", [1, None, ["a"]])
def test_stage_takes_only_strings(bad):
    with pytest.raises(UsageAssertionError, match="Pass strings only"):
        Stage("a", bad)


def test_stage_ipu_may_be_0():
    assert Stage("a").ipu(0).ipu_id == 0


@pytest.mark.parametrize("bad", ["0", 1.0, -1])
def test_stage_ipu_takes_only_an_ipu_number(bad):
    with pytest.raises(UsageAssertionError, match=r"Stage\.ipu"):
        Stage("a").ipu(bad)


def test_phase_of_block_ids_is_one_stage():
    assert Phase("a", "b").stage(0).blocks == ("a", "b")


def test_phase_of_stages_keeps_them():
    stages = Stage("a"), Stage("b")
    assert Phase(*stages).stages == stages


@pytest.mark.parametrize("items", [(), (Stage("a"), "b"), (1,), (["a"],)])
def test_phase_takes_only_stages_or_only_block_ids(items):
    with pytest.raises(UsageAssertionError, match="Phase"):
        Phase(*items)


def test_phase_ipus_are_given_in_order():
    phase = Phase(Stage("a"), Stage("b")).ipus(3, 1)
    assert [stage.ipu_id for stage in phase.stages] == [3, 1]


def test_phase_needs_one_ipu_per_stage():
    with pytest.raises(UsageAssertionError, match=r"got 1 IPU id\(s\) for 2 stage\(s\)"):
        Phase(Stage("a"), Stage("b")).ipus(0)


@pytest.mark.parametrize("strategy", [PipelinedExecution, ShardedExecution])
def test_strategy_without_arguments_takes_stages_from_ipus(strategy):
    assert strategy().auto_stage is AutoStage.SameAsIpu


def test_strategy_takes_stages_in_every_form():
    strategy = PipelinedExecution("a", ["b", "c"], Stage("d").ipu(5))
    assert [stage.blocks for stage in strategy.stages] == [("a",), ("b", "c"), ("d",)]


def test_strategy_finds_the_stage_of_a_block():
    strategy = PipelinedExecution("a", ["b", "c"])
    assert strategy.stage("c") is strategy.stages[1]


def test_strategy_does_not_know_other_blocks():
    with pytest.raises(UsageAssertionError, match=r"Unknown Block 'frnt'.*Closest name: 'front'"):
        PipelinedExecution("front", "back").stage("frnt")


def test_block_cannot_be_in_two_stages():
    with pytest.raises(UsageAssertionError, match="block 'b' is in the stages 0 and 2"):
        PipelinedExecution(["a", "b"], "c", Stage("b"))


@pytest.mark.parametrize("args", [(3,), (None,), (AutoStage.SameAsIpu, "a"), ([1],)])
def test_strategy_refuses_other_arguments(args):
    with pytest.raises(UsageAssertionError):
        PipelinedExecution(*args)


def test_sharded_execution_is_a_pipelined_one():
    assert issubclass(ShardedExecution, PipelinedExecution)


@pytest.mark.parametrize(("strategy", "mode"), [(PipelinedExecution, 0), (ShardedExecution, 1)])
def test_strategy_reports_its_execution_mode(strategy, mode):
    assert strategy().backend_options() == {"execution_mode": mode}


def test_strategies_print_their_content():
    strategy = ShardedExecution("a", Stage("b", "c").ipu(1))
    assert repr(strategy) == "ShardedExecution(Stage('a'), Stage('b', 'c').ipu(1))"
    assert repr(PipelinedExecution()) == "PipelinedExecution(AutoStage.SameAsIpu)"


PHASED = pytest.mark.parametrize("strategy", [SerialPhasedExecution, ParallelPhasedExecution])


@PHASED
def test_phases_come_in_every_form(strategy):
    stages = [Stage("c"), Stage("d")]
    phased = strategy(Phase("a"), ["b1", "b2"], stages, Stage("e"), "f")
    blocks = [[stage.blocks for stage in phase.stages] for phase in phased.phases]
    assert blocks == [[("a",)], [("b1", "b2")], [("c",), ("d",)], [("e",)], [("f",)]]
    assert phased.phase(2).stage(1) is stages[1]
    assert phased.stage("d") is stages[1]


@PHASED
def test_phases_may_come_in_one_list(strategy):
    phases = [Phase("a"), Phase("b")]
    assert strategy(phases).phases == tuple(phases)


@PHASED
@pytest.mark.parametrize("phases", [(), (3,), ([Stage("a"), "b"],), ([Phase("a"), "b"],)])
def test_phases_of_another_form_are_refused(strategy, phases):
    with pytest.raises(UsageAssertionError):
        strategy(*phases)


@PHASED
def test_block_cannot_be_in_two_phases(strategy):
    with pytest.raises(UsageAssertionError, match="block 'a' is in the stages 0 and 1"):
        strategy("a", ["b", "a"])


@PHASED
def test_phased_execution_reports_its_settings(strategy):
    phased = strategy("a").useSeparateBackwardPhase().setTensorsLiveness(Liveness.OffChipAfterFwd)
    assert phased.backend_options() == {
        "execution_mode": 2,
        "separate_backward_phase": True,
        "tensors_liveness": 1,
        "serial_phases_execution": strategy is SerialPhasedExecution,
    }


def test_parallel_phases_send_tensors_off_chip():
    phased = ParallelPhasedExecution("a").sendTensorsOffChipAfterFwd()
    assert phased.backend_options()["tensors_liveness"] == Liveness.OffChipAfterFwd
    phased.sendTensorsOffChipAfterFwd(False)
    assert phased.backend_options()["tensors_liveness"] == Liveness.AlwaysLive


@pytest.mark.parametrize("liveness", list(Liveness))
def test_two_modes_of_liveness_are_for_serial_phases_only(liveness):
    assert SerialPhasedExecution("a").setTensorsLiveness(liveness)
    if liveness in (Liveness.AlwaysLive, Liveness.OffChipAfterFwd):
        assert ParallelPhasedExecution("a").setTensorsLiveness(liveness)
    else:
        with pytest.raises(UsageAssertionError, match=r"use one of Liveness\.AlwaysLive, Liv"):
            ParallelPhasedExecution("a").setTensorsLiveness(liveness)


@pytest.mark.parametrize(
    ("call", "bad"),
    [("useSeparateBackwardPhase", 1), ("setTensorsLiveness", 1), ("sendTensorsOffChipAfterFwd", 0)],
)
def test_phased_setters_check_their_argument(call, bad):
    with pytest.raises(UsageAssertionError, match=call):
        getattr(ParallelPhasedExecution("a"), call)(bad)


@pytest.mark.parametrize(
    ("liveness", "separate", "ids", "count"),
    [
        (Liveness.AlwaysLive, False, [0, 1, 2], 3),
        (Liveness.AlwaysLive, True, [0, 1, 2], 4),
        (Liveness.OffChipAfterFwd, False, [0, 1, 2], 6),
        (Liveness.OffChipAfterFwdNoOverlap, True, [0, 2, 4], 8),
        (Liveness.OffChipAfterEachPhase, False, [0, 4, 8], 12),
    ],
)
def test_phases_are_numbered_as_on_a_machine(liveness, separate, ids, count):
    phased = SerialPhasedExecution("a", "b", "c").setTensorsLiveness(liveness)
    phased.useSeparateBackwardPhase(separate)
    assert [phased.phase_id(i) for i in range(3)] == ids
    assert phased.num_phases == count


def test_phased_execution_prints_its_content():
    phased = SerialPhasedExecution("a", [Stage("b").ipu(1)])
    assert repr(phased) == "SerialPhasedExecution(Phase(Stage('a')), Phase(Stage('b').ipu(1)))"


# The checks of a pipeline


@pytest.mark.parametrize(
    ("ipu_ids", "expected"),
    [
        ([], 1),
        ([0], 1),
        ([1], 2),
        ([0, 0, 1, 1], 2),
        ([0, 1, 0], 3),
        ([0, 1, 2, 3], 4),
        ([2, 1, 1, 2], 4),
    ],
)
def test_stages_count_changes_of_the_ipu(ipu_ids, expected):
    assert count_stages(ipu_ids) == expected


def check(ipu_ids, strategy=None, training=True, accumulation=1, iterations=1, auto_round=False):
    return check_pipeline(
        count_stages(ipu_ids),
        ipu_ids,
        strategy or PipelinedExecution(),
        training,
        accumulation,
        iterations,
        auto_round,
    )


def test_one_stage_needs_nothing():
    assert check([0]) == 1


def test_model_without_blocks_takes_one_ipu():
    assert check([]) == 1


def test_pipelined_training_needs_a_micro_batch_for_each_forward_and_backward_stage():
    with pytest.raises(
        Error,
        match=r"Options\(\)\.Training\.gradientAccumulation\(6\) must be greater than or equal to "
        r"the number of pipeline stages \(7\): 4 stages of the model and the 3 that training adds",
    ):
        check([0, 1, 2, 3], accumulation=6)


def test_pipelined_training_runs_with_enough_micro_batches():
    assert check([0, 1, 2, 3], accumulation=7) == 4


def test_device_iterations_do_not_fill_a_training_pipeline():
    with pytest.raises(Error, match=r"Options\(\)\.Training\.gradientAccumulation\(1\)"):
        check([0, 1], accumulation=1, iterations=100)


def test_pipelined_inference_needs_a_device_iteration_for_each_stage():
    with pytest.raises(
        Error,
        match=r"Options\(\)\.deviceIterations\(3\) must be greater than or equal to .* \(4\)",
    ):
        check([0, 1, 2, 3], training=False, iterations=3)


def test_pipelined_inference_runs_with_enough_device_iterations():
    assert check([0, 1, 2, 3], training=False, iterations=4) == 4


@pytest.mark.parametrize("training", [True, False])
def test_sharded_execution_has_no_minimum(training):
    assert check([0, 1], ShardedExecution(), training) == 2


def test_number_of_ipus_must_be_a_power_of_two():
    with pytest.raises(
        Error,
        match=r"specifies the use of 3 IPUs \(highest IPU id 2\).* reserve a minimum of 4\."
        r" .* on 2 or 4 IPUs, or call .*autoRoundNumIPUs\(True\)",
    ):
        check([0, 2])


def test_number_of_ipus_is_rounded_up_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert check([0, 1, 2], accumulation=5, auto_round=True) == 4
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_power_of_two_is_rounded_without_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert check([0, 1], accumulation=3, auto_round=True) == 2
    assert caplog.records == []


def test_64_ipus_are_enough_for_a_process():
    assert check([63], accumulation=3) == 64


def test_more_than_64_ipus_are_refused():
    with pytest.raises(Error, match=r"Too many IPUs requested \(128\): one process can use 64"):
        check([127], accumulation=3)
