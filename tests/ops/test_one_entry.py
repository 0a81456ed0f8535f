"""An op is one entry: the build finds it, and the tests that walk all ops make a sample of it."""

import importlib.util
import re
from pathlib import Path

import pytest

from popsim_torch.passes.op_table import op_table
from tests.ops.derived import derived_sample
from tests.ops.test_thread_invariance import assert_invariant

ROOT = Path(__file__).parents[2]

ENTRY = """
#include "ops/op_def.h"

namespace popsim::ops {

extern const OpDef kNegate{
    .name = "negate",
    .schema = "negate(Tensor{floats} x) -> Tensor",
    .family = "layout",
};

}  // namespace popsim::ops
"""


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("popsim_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def listed(header: str) -> dict[str, list[str]]:
    """Return the entries of each list of a header."""
    parts = re.split(r"#define (POPSIM_\w+)\(X\)", header)[1:]
    return {
        name: re.findall(r"X\((\w+)\)", body)
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def test_the_build_lists_every_op_of_the_table(build):
    lists = listed(build.list_ops(ROOT))
    camel = {"k" + "".join(map(str.capitalize, name.split("_"))) for name in op_table()}
    assert {entry for entries in lists.values() for entry in entries} == camel


@pytest.mark.parametrize(
    ("family", "name"),
    [("layout", "POPSIM_OPS_OF_TARGETS"), ("host", "POPSIM_COMMON_OPS")],
)
def test_a_file_with_an_entry_is_all_that_the_build_needs(build, tmp_path, family, name):
    file = tmp_path / "csrc" / "ops" / family / "negate.cpp"
    file.parent.mkdir(parents=True)
    file.write_text(ENTRY)
    before = {"POPSIM_OPS_OF_TARGETS": [], "POPSIM_COMMON_OPS": []}
    assert listed(build.list_ops(tmp_path)) == {**before, name: ["kNegate"]}


def test_an_entry_in_a_comment_is_none(build, tmp_path):
    (tmp_path / "csrc" / "ops").mkdir(parents=True)
    (tmp_path / "csrc" / "ops" / "old.cpp").write_text("// extern const OpDef kOld{\n")
    assert "kOld" not in build.list_ops(tmp_path)


@pytest.mark.parametrize("kind", ["copy", "cumsum", "softmax", "softmax_grad"])
def test_a_sample_that_follows_from_the_entry(kind):
    sample = derived_sample(op_table()[kind])
    for dtype in sample.dtypes:
        assert_invariant(lambda dtype=dtype: sample.compile(dtype).run, [(1, 1), (2, 2)])


def test_an_entry_that_a_sample_does_not_follow_from():
    with pytest.raises(ValueError, match=r"embedding_grad needs a sample in op_samples\.py"):
        derived_sample(op_table()["embedding_grad"])
