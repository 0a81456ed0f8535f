"""Options: how they store, check, freeze, copy and print settings."""

import copy
import pickle
import re

import pytest
import torch

from popsim_torch import options
from popsim_torch.enums import (
    HalfFloatCastingBehavior,
    OutputMode,
)
from popsim_torch.errors import (
    UsageAssertionError,
    UsageAttributeError,
)
from popsim_torch.options import Options, TensorLocationSettings
from popsim_torch.stages import PipelinedExecution, ShardedExecution, Stage


@pytest.fixture
def opts():
    return Options()


def at(opts, path):
    """Return the setter named by a dotted path."""
    for name in path.split("."):
        opts = getattr(opts, name)
    return opts


# Reading and writing


def test_value_is_read_as_an_attribute_and_by_a_call(opts):
    opts.deviceIterations(7)
    assert opts.device_iterations == 7
    assert opts("device_iterations") == 7


def test_calls_chain(opts):
    assert opts.deviceIterations(2).autoRoundNumIPUs().modelName("m") is opts


def test_calls_of_a_group_chain(opts):
    group = opts.Training
    assert group.gradientAccumulation(4).setAutomaticLossScaling(False) is group


def test_value_is_assigned_as_an_attribute(opts):
    opts.device_iterations = 5
    assert opts.device_iterations == 5


def test_assignment_is_checked_like_the_setter(opts):
    with pytest.raises(UsageAssertionError, match="got a float, need a value of type int"):
        opts.device_iterations = 5.0
    opts.replication_factor = 4
    assert opts.replication_factor == 4


def test_assigning_an_unknown_name_is_an_assertion_error(opts):
    with pytest.raises(UsageAssertionError, match=r"Closest name: 'device_iterations'"):
        opts.device_iteration = 5


def test_assigning_an_unknown_private_name_is_an_attribute_error(opts):
    with pytest.raises(UsageAttributeError, match="_hidden"):
        opts._hidden = 5


def test_assigning_to_a_group_is_refused(opts):
    with pytest.raises(UsageAssertionError):
        opts.Training = None


def test_assigning_to_popart_is_refused(opts):
    with pytest.raises(UsageAttributeError):
        opts._Popart.autoRecomputation = 1


def test_reading_an_unknown_name_is_an_attribute_error(opts):
    with pytest.raises(UsageAttributeError, match=r"Closest name: 'deviceIterations'"):
        _ = opts.deviceIteration
    assert not hasattr(opts, "nothing")


def test_reading_a_value_that_was_never_set_says_so(opts):
    with pytest.raises(
        UsageAttributeError,
        match=r"Options\.random_seed has not been set\. Call Options\.randomSeed",
    ):
        _ = opts.random_seed


def test_value_must_have_the_type_of_the_old_one(opts):
    with pytest.raises(UsageAssertionError, match=r"Options\.deviceIterations\(2\.0\)"):
        opts.deviceIterations(2.0)


def test_true_passes_as_an_int(opts):
    assert opts.deviceIterations(True).device_iterations == 1


@pytest.mark.parametrize("value", [0, -3])
def test_range_of_counts_is_not_checked_by_the_setter(opts, value):
    assert opts.deviceIterations(value).device_iterations == value


def test_set_takes_several_values(opts):
    opts.set(device_iterations=3, auto_round_num_ipus=True)
    assert (opts.device_iterations, opts.auto_round_num_ipus) == (3, True)


def test_set_changes_nothing_when_one_value_is_wrong(opts):
    with pytest.raises(UsageAssertionError):
        opts.set(device_iterations=3, log_dir=4)
    assert opts.device_iterations == 1


def test_set_refuses_names_that_do_not_exist(opts):
    with pytest.raises(UsageAssertionError, match="has no option 'mine'"):
        opts.set(mine=1)


def test_create_or_set_adds_a_name(opts):
    opts.createOrSet(mine=1, device_iterations=2)
    assert (opts.mine, opts.device_iterations) == (1, 2)


def test_create_or_set_keeps_the_type_of_what_it_added(opts):
    opts.createOrSet(mine=1)
    with pytest.raises(UsageAssertionError):
        opts.createOrSet(mine="text")


def test_create_or_set_checks_known_names(opts):
    with pytest.raises(UsageAssertionError, match="need a value of type int"):
        opts.createOrSet(replication_factor="2")


def test_update_takes_a_dictionary(opts):
    opts.update({"device_iterations": 2, "mine": "x"})
    assert (opts.device_iterations, opts.mine) == (2, "x")


def test_exists_tells_whether_a_value_is_stored(opts):
    assert opts.exists("device_iterations")
    assert not opts.exists("random_seed")
    assert opts.randomSeed(1).exists("random_seed")


def test_delete_removes_a_value(opts):
    opts.randomSeed(1).deleteIfExists("random_seed").deleteIfExists("never_there")
    assert not opts.exists("random_seed")


def test_delete_takes_a_setting_back_to_its_default(opts):
    assert opts.deviceIterations(4).deleteIfExists("device_iterations").device_iterations == 1


def test_new_options_do_not_share_values():
    Options().anchorTensor("a", "b")
    assert Options().anchored_tensors == {}


# Freezing and copies


def test_frozen_options_refuse_changes(opts):
    opts.freeze()
    with pytest.raises(AttributeError, match="can't modify frozen options"):
        opts.deviceIterations(2)
    with pytest.raises(AttributeError, match="can't modify frozen options"):
        opts.device_iterations = 2
    with pytest.raises(AttributeError, match="can't modify frozen options"):
        opts.deleteIfExists("device_iterations")


SETTERS = {
    "Training.gradientAccumulation": (2,),
    "Precision.halfFloatCasting": (HalfFloatCastingBehavior.Default,),
    "Precision.runningStatisticsAlwaysFloat": (True,),
    "Jit.traceModel": (False,),
    "TensorLocations.setWeightLocation": (TensorLocationSettings(),),
    "Distributed.disable": (),
    "_Popart.set": ("patterns", {}),
    "enableProfiling": (),
    "useOfflineIpuTarget": (),
    "enableExecutableCaching": (None,),
    "useIpuId": (1,),
}


@pytest.mark.parametrize("path", SETTERS)
def test_freezing_reaches_every_group_and_setter(opts, path):
    opts.freeze()
    with pytest.raises(AttributeError, match="can't modify frozen options"):
        at(opts, path)(*SETTERS[path])


def test_frozen_random_seed_does_not_seed_torch(opts):
    opts.freeze()
    torch.manual_seed(5)
    with pytest.raises(AttributeError):
        opts.randomSeed(9)
    assert torch.initial_seed() == 5


def test_check_is_frozen_raises_only_when_frozen(opts):
    opts.checkIsFrozen()
    with pytest.raises(AttributeError):
        opts.freeze().checkIsFrozen()


def test_anchors_can_be_added_to_frozen_options(opts):
    opts.freeze()
    opts.anchorTensor("w", "fc.weight")
    assert list(opts.anchored_tensors) == ["w"]


@pytest.mark.parametrize("twin_of", [Options.clone, copy.deepcopy, copy.copy])
def test_copy_is_not_frozen(opts, twin_of):
    twin = twin_of(opts.freeze())
    twin.deviceIterations(3)
    twin.Training.gradientAccumulation(4)
    twin._Popart.set("patterns", {"x": True})
    assert twin.device_iterations == 3


@pytest.mark.parametrize("twin_of", [Options.clone, copy.deepcopy, copy.copy])
def test_copy_is_independent(opts, twin_of):
    twin = twin_of(opts)
    twin.deviceIterations(3).anchorTensor("a", "b")
    twin.Training.gradientAccumulation(4)
    twin._Popart.setEngineOptions({"a": "b"})
    assert repr(opts) == repr(Options())


def test_copy_leaves_the_original_frozen(opts):
    opts.freeze().clone()
    with pytest.raises(AttributeError):
        opts.Training.gradientAccumulation(2)


def test_options_pickle(opts):
    opts.deviceIterations(4).randomSeed(3).setExecutionStrategy(ShardedExecution("a", Stage("b")))
    opts.anchorTensor("w", "fc.weight", OutputMode.EveryN, 2)
    opts.Training.gradientAccumulation(5)
    twin = pickle.loads(pickle.dumps(opts))
    assert repr(twin) == repr(opts)
    assert twin.anchored_tensors == opts.anchored_tensors


class _Program:
    """Uses options."""


def test_options_refuse_anchors_for_each_object_that_would_not_see_them(opts):
    one, other = _Program(), _Program()
    opts._take_anchors(one, "one says no.")
    opts._take_anchors(other, "other says no.")
    opts._take_anchors(one)
    for change in (lambda: opts.anchorTensor("w", "fc.weight"), lambda: opts.observe("*")):
        with pytest.raises(AttributeError, match="other says no"):
            change()
    for twin in (opts.clone(), pickle.loads(pickle.dumps(opts))):
        twin.anchorTensor("w", "fc.weight").observe("*")
    del other
    opts.anchorTensor("w", "fc.weight").observe("*")


def test_a_function_without_a_condition_would_never_be_called(opts):
    with pytest.raises(TypeError, match=r"no when\. Pass when=lambda record: True"):
        opts.observe("*", then=print)
    opts.observe("*", then="stop").observe("*", when=lambda record: True, then=print)


def test_groups_of_pickled_options_store_into_their_back_end(opts):
    twin = pickle.loads(pickle.dumps(opts))
    twin.Precision.enableStochasticRounding(True)
    assert twin._Popart.options["enableStochasticRounding"] is True


def test_freezing_a_group_alone_leaves_the_others(opts):
    opts.Training.freeze()
    opts._Popart.set("a", 1)
    opts.Precision.enableStochasticRounding(True)
    with pytest.raises(AttributeError):
        opts.Training.setAutomaticLossScaling(True)


def test_pickled_options_stay_frozen(opts):
    twin = pickle.loads(pickle.dumps(opts.freeze()))
    with pytest.raises(AttributeError):
        twin.Training.gradientAccumulation(2)


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("Training", "_TrainingOptions"),
        ("Precision", "_PrecisionOptions"),
        ("Jit", "_JitOptions"),
        ("TensorLocations", "_TensorLocationOptions"),
        ("Distributed", "_DistributedOptions"),
        ("_Popart", "_PopartOptions"),
    ],
)
def test_classes_of_groups_are_found_in_the_module(opts, group, name):
    assert type(getattr(opts, group)) is getattr(options, name)


def test_class_of_a_group_can_be_replaced_by_a_subclass(opts):
    class Mine(options._DistributedOptions):
        @property
        def numProcesses(self):
            return 16

    opts.Distributed.__class__ = Mine
    assert opts.Distributed.numProcesses == 16
    assert opts.Distributed.processId == 0


# Printing and flattening


def test_repr_lists_values_and_groups(opts):
    text = repr(opts.deviceIterations(3))
    assert text.startswith("Options(")
    assert "device_iterations=3" in text
    assert "Training(" in text
    assert "gradient_accumulation=1" in text
    assert "_Popart(instrumentWithHardwareCycleCounter=False" in text


def test_repr_holds_no_object_ids(opts):
    opts._Popart.set("function", len).set("object", object()).set("lambda", lambda: 0)
    opts.setExecutionStrategy(PipelinedExecution("a", Stage("b").ipu(1)))
    opts.anchorTensor("w", "fc.weight")
    assert not re.search("0x[0-9a-f]{4}| at 0", repr(opts))


def test_equal_options_print_alike_whatever_the_order_of_calls():
    first, second = Options(), Options()
    first.useIpuId(1).modelName("m").createOrSet(x=1, y={"a": 1, "b": 2})
    first._Popart.set("patterns", {}).set("cachePath", "c")
    second.createOrSet(y={"b": 2, "a": 1}, x=1).modelName("m").useIpuId(1)
    second._Popart.set("cachePath", "c").set("patterns", {})
    assert repr(first) == repr(second)


def test_to_dict_flattens_strategy_options_and_groups(opts):
    flat = opts.outputMode(OutputMode.All).deviceIterations(3).toDict()
    assert flat["device_iterations"] == 3
    assert flat["output_mode"] == OutputMode.All
    assert flat["gradient_accumulation"] == 1
    assert flat["num_distributed_processes"] == 1
    assert flat["rearrangeAnchorsOnHost"] is False
    assert flat["execution_mode"] == 0


def test_to_dict_needs_an_output_mode(opts):
    with pytest.raises(UsageAssertionError, match="output mode is still Default"):
        opts.toDict()


def test_to_dict_refuses_a_key_of_two_groups(opts):
    opts.outputMode(OutputMode.All).createOrSet(gradient_accumulation=3)
    with pytest.raises(UsageAssertionError, match="two groups hold the key 'gradient_accum"):
        opts.toDict()


def test_to_dict_offers_a_progress_bar_titled_graph_compilation(opts, capsys):
    draw = opts.outputMode(OutputMode.All).toDict()["compilation_progress_bar_fn"]
    draw(1, 2)
    draw(2, 2)
    captured = capsys.readouterr()
    assert "Graph compilation: 100%" in captured.err
    assert captured.out == ""


def test_to_dict_offers_no_progress_bar_when_it_is_off(opts):
    opts.outputMode(OutputMode.All).showCompilationProgressBar(False)
    assert "compilation_progress_bar_fn" not in opts.toDict()
