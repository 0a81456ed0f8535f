"""The Python examples of READMEs and of the pages run as they are printed, and print what they say.

The examples of a page run in a separate process: no other test sees their operators.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import run_forked
from tests.sweeps import sampled
from tests.tutorials.running import copy_tutorials
from tests.unit import examples

ROOT = Path(__file__).parents[2]
PAGES = {
    str(page.relative_to(ROOT)): page
    for page in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("**/*.md")),
        *sorted((ROOT / "tutorials").glob("*/README.md")),
    ]
    if any(one.language == "python" for one in examples.examples(page))
}
TUTORIALS = [page for page in PAGES if page.startswith("tutorials")]
FIRST_PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("index", "getting_started", "training", "anchors")),
]


def run(page, folder, *flags):
    """Run the examples of a page in a folder; return exit code and errors."""
    env = {**os.environ, "MPLBACKEND": "Agg"}
    program = [examples.__file__, str(page), *flags]
    if '__name__ == "__main__"' in page.read_text():  # only a main process may start others
        command = [sys.executable, "-W", "error", *program]
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
    else:
        done = run_forked(program, cwd=folder, env=env, strict=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "page", sampled([page for page in PAGES if page not in TUTORIALS], FIRST_PAGES)
)
def test_the_examples_of_a_page_run_as_printed(page, tmp_path):
    code, errors = run(PAGES[page], tmp_path)
    assert code == 0, errors


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS)
def test_the_examples_of_a_tutorial_run_as_printed(page, tmp_path):
    copied = copy_tutorials(tmp_path) / Path(page).relative_to("tutorials")
    # Its example needs the library that its command compiles.
    flags = ["--commands"] if "custom_op" in page else []
    code, errors = run(copied, copied.parent, *flags)
    assert code == 0, errors


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", TUTORIALS)
def test_the_commands_of_a_tutorial_run_as_printed(page, tmp_path, monkeypatch):
    copied = copy_tutorials(tmp_path) / Path(page).relative_to("tutorials")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    for example in examples.examples(copied):
        if example.language == "bash":
            examples.run_commands(example.code, copied.parent)


def written(folder, *blocks):
    """Return a page with blocks of Python, and with what the last one prints."""
    page = folder / "page.md"
    page.write_text("".join(f"```python\n{block}```\n\n" for block in blocks) + "```text\n3\n```\n")
    return page


def test_a_block_may_continue_those_above(tmp_path):
    page = written(tmp_path, "x = 3\n", f"{examples.CONTINUES}print(x)\n")
    assert run(page, tmp_path)[0] == 0


@pytest.mark.parametrize("block", ["print(x)\n", f"{examples.CONTINUES}print(x + 1)\n"])
def test_a_hidden_import_and_another_output_fail(block, tmp_path):
    assert run(written(tmp_path, "x = 3\n", block), tmp_path)[0] != 0


def test_no_page_has_examples_with_prompts():
    prompted = [
        str(page.relative_to(ROOT))
        for page in (ROOT / "docs").glob("**/*.md")
        if re.search(r"^>>> |\{doctest\}|\{testcode\}", page.read_text(), re.MULTILINE)
    ]
    assert prompted == []


TRAIN = """
import argparse
import poptorch, torch

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
model = torch.nn.Linear(2, 1)
inference = poptorch.inferenceModel(model)
print("epochs", parser.parse_args().epochs, tuple(inference(torch.ones(1, 2)).shape))
"""


@pytest.mark.parametrize("page", ["README.md", "docs/getting_started.md"])
def test_the_command_that_runs_a_program_runs_as_printed(page, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    commands = [one.code for one in examples.examples(ROOT / page) if one.language == "bash"]
    (command,) = [one for one in commands if "run train.py" in one]
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": os.pathsep.join(folders)}
    done = subprocess.run(
        ["bash", "-e", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.stdout == "epochs 3 (1, 1)\n", done.stderr
