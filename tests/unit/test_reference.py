"""The reference has an entry for every public name (docs/public.py lists them)."""

import re
import runpy
import subprocess
import sys

import pytest

import popsim_torch as poptorch
from tests.unit.docs_extensions import DOCS, LINKS, PUBLIC


def test_every_class_and_function_is_on_a_page():
    assert set(PUBLIC.objects()) - PUBLIC.listed() == set()


def test_no_page_chooses_among_the_members_of_a_class():
    chosen = [
        f"{page.name}: {line}"
        for page in PUBLIC.API.glob("*.md")
        for line in page.read_text().splitlines()
        if line.strip().startswith((":members:", ":exclude-members:", ":no-index:"))
    ]
    assert chosen == []


@pytest.mark.parametrize(
    "name",
    [
        "PoplarExecutor.getTensorNames",
        "PoplarExecutor.__call__",
        "OutfeedQueue.dequeue",
        "OutputMode.EveryN",
        "Options.deviceIterations",
        "Options.device_iterations",
        "Options.Training",
        "options._TrainingOptions.gradientAccumulation",
        "optim.SGD.accum_type",
        "optim.Adam.state_dict",
        "EpochRecord.samples",
        "RecoverableError.message",
    ],
)
def test_inherited_and_stored_members_are_public(name):
    assert f"popsim_torch.{name}" in set(PUBLIC.names())


def test_every_name_that_a_class_of_ours_has_is_public():
    members = set(PUBLIC.members(poptorch.PoplarExecutor))
    shown = {name for name in dir(poptorch.PoplarExecutor) if not name.startswith("_")}
    assert shown <= members


def test_members_of_torch_and_of_python_are_not_listed_again():
    assert "named_parameters" not in set(PUBLIC.members(poptorch.Outfeed))
    assert "to_bytes" not in set(PUBLIC.members(poptorch.OutputMode))


LINKED = LINKS.Names(PUBLIC.names())


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("poptorch.OutputMode.All", "OutputMode.All"),
        ("DataLoaderMode.Async", "DataLoaderMode.Async"),
        ("poptorch.fit", "fit"),
        ("repeat(n, body, inputs, infeed)", "repeat"),
        ("executor.profile(x, y)", "PoplarExecutor.profile"),
        ('model.getAnchoredTensor("every")', "PoplarExecutor.getAnchoredTensor"),
        ("deviceIterations", "Options.deviceIterations"),
        ("poptorch.print(model)", "print"),
    ],
)
def test_code_in_a_guide_leads_to_the_reference(code, name):
    assert LINKED.path(code, in_guide=True) == f"popsim_torch.{name}"


@pytest.mark.parametrize(
    "code", ["print(x)", "torch.optim.SGD", "nn.Sequential", "state_dict", "x.register_hook(f)"]
)
def test_code_of_python_and_torch_is_no_link(code):
    assert LINKED.path(code, in_guide=True) is None


@pytest.mark.parametrize("code", ["function", "repeat(3)", "pipeline"])
def test_a_word_in_a_docstring_is_an_argument(code):
    assert LINKED.path(code, in_guide=False) is None


def test_every_guide_leads_to_the_reference():
    index = (DOCS / "index.md").read_text()
    guides = [name for name in index.split() if (DOCS / f"{name}.md").is_file()]
    without = [
        guide
        for guide in guides
        if "/" not in guide
        and guide not in ("glossary", "names")
        and not any(
            LINKED.path(code, in_guide=True)
            for code in re.findall(r"`([^`\n]+)`", (DOCS / f"{guide}.md").read_text())
        )
    ]
    assert "anchors" in guides
    assert without == []


def test_a_colon_in_the_text_of_an_attribute_does_not_make_a_type_of_it():
    lines = ["Not chosen: training models use ``Final``.", ""]
    runpy.run_path(str(DOCS / "conf.py"))["_break_after_colon"](
        None, "attribute", "OutputMode.Default", None, None, lines
    )
    assert lines == ["Not chosen:", "training models use ``Final``.", ""]


@pytest.mark.slow  # Sphinx takes 10 s for these pages; `make docs` makes the same check.
def test_the_index_of_the_site_has_every_public_name(tmp_path):
    pytest.importorskip("sphinx")
    build = [sys.executable, "-m", "sphinx", "-q", "-b", "dummy", "-D", "master_doc=api/models"]
    build += ["-D", "exclude_patterns=*.md", str(DOCS), str(tmp_path)]
    found = subprocess.run(build, capture_output=True, text=True, check=False)
    missing = [line for line in found.stderr.splitlines() if "has no entry for" in line]
    assert (found.returncode, missing) == (0, [])
