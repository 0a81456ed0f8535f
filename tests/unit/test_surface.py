"""The table of public names (docs/surface.toml) is that of the package."""

import importlib.util
import operator
import sys
from pathlib import Path

import pytest

import popsim_torch as poptorch
from popsim_torch import refused

DOCS = Path(poptorch.__file__).parents[1] / "docs"
# What the package has beside PopTorch's names.
OWN = {"BuildInfo", "build_info", "install", "uninstall"}


def read_groups():
    spec = importlib.util.spec_from_file_location("docs_surface", DOCS / "surface.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.groups())


GROUPS = read_groups()
NAMES = [name for _, names in GROUPS for name in names]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_a_name_is_there(name):
    holder, _, attribute = name.path.rpartition(".")
    owner = operator.attrgetter(holder)(poptorch) if holder else poptorch
    assert hasattr(owner, attribute) or hasattr(owner(), attribute)  # of the class or its objects


def test_every_name_of_the_package_is_listed():
    listed = {name.path for name in NAMES}
    assert set(poptorch.__all__) - OWN <= listed


@pytest.mark.parametrize(
    "path",
    [
        "Options",
        "options._TrainingOptions",
        "options._PrecisionOptions",
        "options._TensorLocationOptions",
        "options._DistributedOptions",
        "TensorLocationSettings",
    ],
)
def test_every_setter_is_listed(path):
    listed = {name.path for name in NAMES}
    holder = operator.attrgetter(path)(poptorch)
    base = set(dir(poptorch.options.base.OptionsGroup))
    setters = {
        name
        for name in dir(holder)
        if name[0] != "_"
        and name not in base
        and callable(getattr(holder, name))
        and name not in ("freeze",)
        and any(letter.isupper() for letter in name)
    }
    assert {f"{path}.{name}" for name in setters} <= listed


@pytest.mark.parametrize("name", refused.__all__)
def test_a_refused_name_says_so_and_what_to_do(name):
    with pytest.raises(poptorch.Error, match=rf"poptorch\.{name}: .* is not supported .*\. [A-Z]"):
        getattr(poptorch, name)(1, key=2)
    assert f"{name}" in {one.path for one in NAMES if one.state == "refused"}


def test_what_is_not_plainly_done_has_a_reason():
    assert all(name.reason for name in NAMES if name.state != "acts")
