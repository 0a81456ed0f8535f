"""The contract of ``Options``: defaults, and what setters accept, store and refuse."""

import re
from typing import Any

import pytest

from popsim_torch.enums import (
    CommGroupType,
    Liveness,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
)
from popsim_torch.options import Options
from popsim_torch.stages import ParallelPhasedExecution, SerialPhasedExecution, ShardedExecution
from tests.unit.option_rows import DEFAULTS, REFUSED, ROWS, UNSET

ALWAYS = {name for name, value in DEFAULTS.items() if value is not UNSET and "." not in name}


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


SETTERS_WITHOUT_RESULT = ("setAvailableMemoryProportion", "anchorTensor")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("POPTORCH_CACHE_DIR", "POPTORCH_DEFAULT_OPTIONS", "POPLAR_ENGINE_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
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
        # Setters without their own row: they add to another setter's value, or do the same.
        "appendToLocationExcludes",
        "setEnvVarNames",
        "setTimeout",  # (tests/unit/test_several_processes.py)
        "observe",  # (tests/parity/observing)
        "watch",  # (tests/parity/watch)
        "machine",  # (tests/machine/test_machine_options.py)
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


def test_every_setter_that_looks_at_its_arguments_refuses_some():
    without_arguments = {"Distributed.disable", "disableModuleNamescope"}
    takes_anything = {"Precision.halfFloatCasting", "_Popart.set"}
    refusing = {path for path, _, _ in REFUSED}
    assert {row.path for row in ROWS} - refusing == without_arguments | takes_anything
    assert refusing <= {row.path for row in ROWS} | {"appendToLocationExcludes"}


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
