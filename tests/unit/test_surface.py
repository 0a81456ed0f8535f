"""The table of public names (docs/surface.toml) matches the package: nothing missing or extra.

The meaning of the three states is tested by kind of name: here for attributes and arguments, in
``test_surface_*.py`` for optimizers, settings of the back end, environment variables, tensors,
tracepoints, and everything that is refused.
"""

import inspect
import re
from collections import Counter
from enum import Enum

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.options.back_end_keys import KEYS
from tests.unit.option_rows import ROWS
from tests.unit.surface_table import LISTED, NAMES, TABLE, find, parts, paths

# Names that need their own test.
ELSEWHERE = (
    "os.environ",
    "PoplarExecutor.getTensorNames",
    "PoplarExecutor.<parameter>.replicaGrouping",
    "profiling.Channel.tracepoint",
    "Options._Popart.options",
)
STATES = {name.path: name.state for name in NAMES}
ATTRIBUTES = [
    name.path
    for name in NAMES
    if parts(name.path)[1:] == (None, None) and parts(name.path).owner not in ELSEWHERE[:3]
]
ARGUMENTS = [name.path for name in NAMES if parts(name.path).argument]
ENTRIES = [
    name.path for name in NAMES if parts(name.path).entry and not name.path.startswith(ELSEWHERE)
]


def arguments(function):
    """Return the arguments of a function or class, including those that it passes on to torch."""
    found = inspect.signature(function).parameters
    taken = {name for name, one in found.items() if one.kind != one.VAR_KEYWORD}
    if inspect.isclass(function) and len(taken) < len(found):
        for base in function.__mro__[1:]:
            if base.__module__.startswith("torch."):
                taken |= set(inspect.signature(base).parameters)
    return taken - {"self", "args", "kwargs"}


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_an_attribute_is_there(path):
    assert find(path) is not None


@pytest.mark.parametrize("path", ARGUMENTS)
def test_an_argument_is_taken(path):
    owner, argument, _ = parts(path)
    assert argument in arguments(find(owner))


@pytest.mark.parametrize("path", ENTRIES)
def test_an_entry_is_there(path):
    owner, _, entry = parts(path)
    mapping = find(owner)
    assert entry in (mapping() if callable(mapping) else mapping)


def test_every_name_has_a_test():
    others = [path for path in LISTED if path.startswith(ELSEWHERE)]
    assert len(set(ATTRIBUTES) | set(ARGUMENTS) | set(ENTRIES) | set(others)) == len(LISTED)


def test_no_name_is_listed_twice():
    assert [path for path, count in Counter(name.path for name in NAMES).items() if count > 1] == []


def test_what_is_not_plainly_done_has_a_reason():
    assert [name.path for name in NAMES if name.state != "supported" and not name.reason] == []


def test_the_page_shows_every_name():
    page = TABLE.as_markdown()
    assert [path for path in LISTED if f"`{path}`" not in page] == []
    assert f"Of {len(NAMES)} names: " in page


# Nothing of the package is missing


def test_every_name_of_the_package_is_listed():
    assert set(poptorch.__all__) <= LISTED


@pytest.mark.parametrize("enum", poptorch.enums.__all__)
def test_every_member_of_an_enum_is_listed(enum):
    kind = getattr(poptorch.enums, enum)
    assert issubclass(kind, Enum)
    assert {enum, f"enums.{enum}", *(f"{enum}.{member.name}" for member in kind)} <= LISTED


@pytest.mark.parametrize(
    "path",
    [
        *(f"optim.{kind}" for kind in ("SGD", "Adam", "AdamW", "RMSprop", "LAMB")),
        "AsynchronousDataAccessor",
        "trainingModel",
        "inferenceModel",
        "load",
        "ipu_print_tensor",
        "custom_op",
        "identity_loss",
        "set_available_memory",
        "serializedMatMul",
        "dynamic_slice",
        "dynamic_update",
        "set_overlap_for_input",
        "set_overlap_for_output",
        "recomputationCheckpoint",
        "nop",
        "ctc_beam_search_decoder",
        "fps",
        "nearest",
        "NameScope",
        "Block",
        "Block.start",
        "BeginBlock",
        "BlockFunction",
        "removeBlocks",
        "Options.outputMode",
        "PoplarExecutor.save",
    ],
)
def test_every_argument_is_listed(path):
    assert {f"{path}({argument})" for argument in arguments(find(path))} <= LISTED


def test_every_argument_of_a_loader_is_listed():
    own = set(inspect.signature(poptorch.DataLoader).parameters) - {"kwargs"}
    assert {f"DataLoader({argument})" for argument in own} <= LISTED


@pytest.mark.parametrize(
    "path",
    [
        "PoplarExecutor",
        "DataLoader",
        "AsynchronousDataAccessor",
        "MultiConv",
        "TensorLocationSettings",
    ],
)
def test_every_method_is_listed(path):
    # Attributes that classes have only for popsim_torch are in lower case.
    methods = {
        name
        for name, member in inspect.getmembers(getattr(poptorch, path))
        if callable(member) and any(letter.isupper() for letter in name) and name[0] != "_"
    }
    assert {f"{path}.{name}" for name in methods - {"toDict"}} <= LISTED


def test_every_setting_of_the_back_end_is_listed():
    stored = {
        parts(path).owner.rpartition(".")[2] for path in LISTED if path.startswith("Options.")
    }
    stored |= {parts(path).entry for path in LISTED if path.startswith("Options.toDict")}
    in_options = {key for key in set().union(*KEYS.values()) if key in stored}
    others = set().union(*KEYS.values()) - in_options
    assert {f'Options._Popart.options["{key}"]' for key in others} <= LISTED


GROUPS = {
    "": "Options",
    "Training": "options._TrainingOptions",
    "Precision": "options._PrecisionOptions",
    "Jit": "options._JitOptions",
    "TensorLocations": "options._TensorLocationOptions",
    "Distributed": "options._DistributedOptions",
    "_Popart": "options._PopartOptions",
}


def test_every_setter_is_listed_and_called_by_the_contract_of_options():
    """``test_options_contract.py`` calls each setter with values that are accepted and refused."""
    called = set()
    for row in ROWS:
        group, _, setter = row.path.rpartition(".")
        called.add(f"{GROUPS[group]}.{setter}")
    assert called <= LISTED
    camel_case = {
        name.path
        for name in NAMES
        for group in GROUPS.values()
        if parts(name.path)[1:] == (None, None)
        and name.path.rpartition(".")[0] == group
        and callable(getattr(find(group), name.path.rpartition(".")[2], None))
        and name.path.rpartition(".")[2] not in dir(poptorch.options.base.OptionsGroup)
    }
    beside_rows = {"appendToLocationExcludes", "setEnvVarNames", "setTimeout"}
    beside_rows |= {"machine", "observe", "watch"}
    beside_rows |= {
        "clone",
        "defaultOutputMode",
        "from_json",
        "loadFromFile",
    }  # (these set nothing)
    missing = {path.rpartition(".")[2] for path in camel_case - called}
    assert missing <= beside_rows


def state_of_stored(key):
    """Return the state of a stored value or of a setting of the back end, None if not listed."""
    group, _, name = key.partition(".")
    path = f'Options._Popart.options["{name}"]' if group == "_Popart" else f"Options.{key}"
    return STATES.get(path)


@pytest.mark.parametrize("path", sorted({row.path for row in ROWS}))
def test_a_setter_acts_if_something_that_it_stores_does(path):
    group, _, setter = path.rpartition(".")
    stored = {state_of_stored(key) for row in ROWS if row.path == path for key in row.stored}
    stored.discard(None)
    if path == "Training.setConvolutionDithering":  # An entry of convolutionOptions, not all of it.
        assert stored == {"supported"}
    elif stored:
        state = STATES[f"{GROUPS[group]}.{setter}"]
        assert (state == "accepted") == (stored == {"accepted"})


def test_settings_of_locations_are_stored():
    settings = poptorch.TensorLocationSettings()
    listed = {path.rpartition(".")[2] for path in LISTED if path.startswith("TensorLocationSet")}
    listed.discard("TensorLocationSettings")
    for setter in listed:
        value = 4 if setter.startswith("minElements") else True
        assert getattr(settings, setter)(value) is settings
    assert len(settings.toDict()) == len(listed) == 6


@pytest.mark.parametrize(
    "path",
    [path for path in paths("accepted") if path in ATTRIBUTES and inspect.isroutine(find(path))],
)
def test_what_is_only_accepted_says_so(path):
    assert re.search("no effect|nothing|no value", inspect.getdoc(find(path)))


def test_an_accepted_operation_changes_nothing():
    x = torch.randn(3)
    assert torch.equal(poptorch.set_available_memory(x, 0.3), x)
    with poptorch.Attribute(__outline={"layer": "a"}):
        assert poptorch.accessAttributes("__outline") == {"layer": "a"}
