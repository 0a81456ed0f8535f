"""The mirrored enums have exactly the members and values of PopTorch's."""

from enum import Enum

import pytest

import popsim_torch as poptorch
from popsim_torch import enums

MEMBERS = {
    "OutputMode": {"Final": 0, "EveryN": 1, "All": 2, "Sum": 3, "Default": 4},
    "DataLoaderMode": {"Sync": 0, "Async": 1, "AsyncRebatched": 2},
    "SharingStrategy": {"SharedMemory": 0, "FileSystem": 1, "Fork": 2, "ForkServer": 3},
    "ReductionType": {"Sum": 0, "Mean": 1, "NoReduction": 2},
    "MeanReductionStrategy": {"Running": 0, "Post": 1, "PostAndLoss": 2},
    "ConnectionType": {"Always": 0, "OnDemand": 1, "Never": 2},
    "SyncPattern": {"Full": 0, "SinglePipeline": 1, "ReplicaAndLadder": 2},
    "HalfFloatCastingBehavior": {"FloatDowncastToHalf": 0, "HalfUpcastToFloat": 1, "Default": 2},
    "AutoStage": {"SameAsIpu": 0, "AutoIncrement": 1},
    "Liveness": {
        "AlwaysLive": 0,
        "OffChipAfterFwd": 1,
        "OffChipAfterFwdNoOverlap": 2,
        "OffChipAfterEachPhase": 3,
    },
    "OverlapMode": {
        "NoOverlap": "no_overlap",
        "OverlapAccumulationLoop": "overlap_accumulation_loop",
        "OverlapDeviceIterationLoop": "overlap_device_iteration_loop",
    },
    "PipelineSchedule": {"Grouped": 0, "Interleaved": 1, "Sequential": 2, "Default": 3},
    "MatMulSerializationMode": {
        "InputChannels": "input_channels",
        "ReducingDim": "reducing_dim",
        "OutputChannels": "output_channels",
        "Disabled": "none",
    },
    "MultiConvPlanType": {"Parallel": 0, "Serial": 1},
    "CommGroupType": {"All": 0, "Consecutive": 1, "Orthogonal": 2, "NoGrouping": 3},
    "VariableRetrievalMode": {"OnePerGroup": 0, "AllReplicas": 2},
    "OutfeedOptimizerMode": {"AFTER_COMPUTE": "after_compute", "BEFORE_APPLY": "before_apply"},
}
WITH_TEXT = ("OverlapMode", "MatMulSerializationMode", "OutfeedOptimizerMode")


@pytest.mark.parametrize("name", MEMBERS)
def test_members_have_the_values_programs_rely_on(name):
    enum = getattr(enums, name)
    assert {member.name: member.value for member in enum} == MEMBERS[name]


@pytest.mark.parametrize("name", MEMBERS)
def test_only_the_enums_with_text_values_are_not_integers(name):
    expected = Enum if name in WITH_TEXT else enums.NamedIntEnum
    assert getattr(enums, name).__mro__[1] is expected


@pytest.mark.parametrize("name", [*MEMBERS, "OutfeedMode"])
def test_members_print_their_names(name):
    for member in getattr(poptorch, name):
        full = f"{name}.{member.name}"
        assert str(member) == f"{member}" == full
        assert f"{member:>50}" == full.rjust(50)
        assert repr(member) == f"<{full}: {member.value!r}>"


def test_public_list_names_every_enum():
    assert sorted(enums.__all__) == sorted(MEMBERS)
