"""Programs that import ``poptorch`` run unchanged."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import popsim_torch
from popsim_torch import __main__ as commands
from popsim_torch import alias, runner

ROOT = Path(popsim_torch.__file__).parents[1]
TIMEOUT = 120  # seconds; importing PyTorch takes some of them


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("POPTORCH_")}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


SCRIPT = """
import json, multiprocessing, os, subprocess, sys
os.environ["POPTORCH_LOG_LEVEL"] = "DEBUG"  # before poptorch is imported
import poptorch
import poptorch.optim as optim
from poptorch.poptorch_core import Error
import helper


class Box:
    def __init__(self, queue):
        self.queue = queue


def child(box):
    box.queue.put([poptorch.__name__, __name__])


def fail():
    raise ValueError("at the end")


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    box = Box(context.SimpleQueue())
    process = context.Process(target=child, args=(box,))
    process.start()
    process.join()
    other = [sys.executable, "-c", "import poptorch.enums as e; print(e.OutputMode.__module__)"]
    print(json.dumps({
        "argv": sys.argv,
        "path": sys.path[0],
        "file": __file__,
        "name": poptorch.__name__,
        "main": sys.modules["__main__"].Box is Box,
        "same": optim is poptorch.optim and Error is poptorch.Error,
        "child": box.queue.get() if process.exitcode == 0 else process.exitcode,
        "other": subprocess.run(other, capture_output=True, text=True, cwd="/").stdout,
        "level": poptorch.logs.backend.level,
        "spec": __spec__,
    }))
    fail()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script") / "inner"
    folder.mkdir()
    (folder / "helper.py").write_text("")
    path = folder / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def done(script):
    """The result of the script above, run from the parent of its folder."""
    command = ["-m", "popsim_torch", "run", "--", "inner/script.py", "--flag", "-m"]
    return run(command, script.parents[1])


@pytest.fixture(scope="module")
def told(done):
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_poptorch_is_this_package_under_all_names(told):
    assert told["name"] == "popsim_torch"
    assert told["same"]


def test_the_script_finds_itself_as_python_would_have_it(told, script):
    assert told["argv"] == ["inner/script.py", "--flag", "-m"]
    assert told["path"] == str(script.parent)
    assert told["file"] == str(script)
    assert told["main"]
    assert told["spec"] is None


def test_a_child_of_multiprocessing_finds_it(told):
    assert told["child"] == ["popsim_torch", "__mp_main__"]


def test_a_process_that_the_script_starts_finds_it(told):
    assert told["other"] == "popsim_torch.enums\n"


def test_variables_that_the_script_sets_count(told):
    assert told["level"] == 10


def test_an_exception_ends_it_as_it_ends_python(done, script, tmp_path):
    assert done.returncode == 1
    twin = tmp_path / "script.py"
    # The same lines, without the slow part.
    text = re.sub(r"(?s)if __name__ ==.*?    fail", "if True:\n    fail", SCRIPT)
    twin.write_text(re.sub(r"(?m)^(import|from|os).*$", "", text))
    expected = run([str(twin)], tmp_path)
    assert expected.returncode == 1

    def traceback(text: str) -> list[str]:
        lines = text[text.index("Traceback") :].splitlines()
        return [re.sub(r'File ".*script\.py", line \d+', "File", line) for line in lines]

    assert traceback(done.stderr) == traceback(expected.stderr)
    assert f'File "{script}"' in done.stderr


def test_the_exception_is_printed_once(done):
    assert done.stderr.count("at the end") == 2  # the line that raises the error, and its message
    assert "[critical]" not in done.stderr


def test_a_module_runs_with_its_exit_code(tmp_path):
    (tmp_path / "tool.py").write_text(
        "import sys, poptorch.testing as t\n"
        "print(sys.argv[1:], sys.path[0], __spec__.name, t.__name__)\n"
        "sys.exit(7)\n"
    )
    done = run(["-m", "popsim_torch", "run", "-m", "tool", "--x", "y"], tmp_path)
    assert done.stdout == f"['--x', 'y'] {tmp_path} tool popsim_torch.testing\n", done.stderr
    assert done.returncode == 7
    assert done.stderr == ""


def test_the_command_runs_under_the_name_of_poptorch(tmp_path):
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys\n"
        "sys.exit(subprocess.run([sys.executable, '-m', 'poptorch', 'info']).returncode)\n"
    )
    for command in (["-m", "poptorch", "info"], ["parent.py"]):
        done = run(["-m", "popsim_torch", "run", *command], tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("popsim_torch 0."), done.stdout


# Without a process of its own


def test_the_traceback_of_the_runner_is_left_out():
    shown = []
    hook = runner._WithoutRunner(lambda *exception: shown.append(exception))
    with pytest.raises(runner.CannotStart) as caught:
        runner.run_script("/no/such/script.py", [])
    hook(caught.type, caught.value, caught.tb)
    assert shown == [(caught.type, caught.value, None)]


@pytest.fixture
def argv(monkeypatch):
    return lambda *arguments: monkeypatch.setattr(sys, "argv", ["popsim", *arguments])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "a command is needed"),
        (("walk",), "unknown command: walk"),
        (("info", "x"), "unknown command: info x"),
        (("run",), "a script is needed"),
        (("run", "--replace"), "a script is needed"),
        (("run", "-m"), "a module is needed after -m"),
        (("run", "--slow", "x.py"), "unknown option of run: --slow"),
    ],
)
def test_a_wrong_command_line_is_answered_with_the_usage(arguments, problem, argv, capsys):
    argv(*arguments)
    assert commands.main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"popsim: {problem}\n\nusage: popsim run")


def test_behind_two_dashes_stands_a_script_of_any_name(argv, monkeypatch):
    calls = []
    monkeypatch.setattr(commands, "run_script", lambda *given, **more: calls.append((*given, more)))
    argv("run", "--replace", "--", "-x.py", "-m")
    assert commands.main() == 0
    assert calls == [("-x.py", ["-m"], {"replace": True})]


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("run", "--help")])
def test_help(arguments, argv, capsys):
    argv(*arguments)
    assert commands.main() == 0
    assert capsys.readouterr().out.startswith("usage: popsim run")


def test_info_says_what_the_installation_computes_with(argv, capsys):
    argv("info")
    assert commands.main() == 0
    assert capsys.readouterr().out == f"{popsim_torch.build_info()}\n"


def test_a_script_that_is_not_there(argv, capsys, tmp_path):
    argv("run", str(tmp_path / "none.py"))
    assert commands.main() == 2
    expected = f"popsim: can't open file '{tmp_path}/none.py': [Errno 2] No such file"
    assert capsys.readouterr().err.startswith(expected)


# install and uninstall


@pytest.fixture
def installed_nothing():
    """A process without an installed poptorch, before and after the test."""
    yield
    popsim_torch.uninstall()
    assert not [name for name in sys.modules if name.split(".")[0] == "poptorch"]


@pytest.mark.usefixtures("installed_nothing")
def test_install_lets_poptorch_be_this_package():
    before = popsim_torch.optim.__spec__
    popsim_torch.install()
    popsim_torch.install()
    poptorch = importlib.import_module("poptorch")
    assert poptorch is popsim_torch
    assert importlib.import_module("poptorch.optim") is popsim_torch.optim
    assert importlib.import_module("poptorch.poptorch_core") is popsim_torch.poptorch_core
    # The modules themselves do not change.
    assert popsim_torch.__name__ == "popsim_torch"
    assert popsim_torch.optim.__spec__ is before


@pytest.mark.usefixtures("installed_nothing")
def test_the_code_of_modules_is_found_under_both_names():
    popsim_torch.install()
    for name in ("__main__", "optim", "enums"):
        found = importlib.util.find_spec(f"poptorch.{name}")
        real = importlib.util.find_spec(f"popsim_torch.{name}")
        full_names = f"poptorch.{name}", f"popsim_torch.{name}"
        alias_code, code = (
            spec.loader.get_code(n) for spec, n in zip((found, real), full_names, strict=True)
        )
        assert alias_code.co_filename == code.co_filename
        assert found.loader.get_source(found.name) == real.loader.get_source(real.name)
        is_package = real.submodule_search_locations is not None
        assert (found.submodule_search_locations is not None) == is_package


@pytest.mark.usefixtures("installed_nothing")
def test_what_this_package_does_not_have_is_not_found():
    popsim_torch.install()
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'poptorch\.nothing'") as caught:
        importlib.import_module("poptorch.nothing")
    assert caught.value.name == "poptorch.nothing"


@pytest.mark.usefixtures("installed_nothing")
def test_uninstall_undoes_install():
    popsim_torch.install()
    importlib.import_module("poptorch.enums")
    popsim_torch.uninstall()
    popsim_torch.uninstall()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("poptorch")


@pytest.fixture
def another_poptorch(tmp_path, monkeypatch, installed_nothing):
    (tmp_path / "poptorch.py").write_text("other = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "poptorch.py"


def test_another_poptorch_is_not_shadowed(another_poptorch):
    with pytest.raises(popsim_torch.Error, match="another poptorch at ") as caught:
        popsim_torch.install()
    assert str(another_poptorch) in str(caught.value)
    assert "install(replace=True)" in str(caught.value)
    assert importlib.import_module("poptorch").other
    del sys.modules["poptorch"]


def test_another_poptorch_is_replaced_where_that_is_asked_for(another_poptorch):
    assert importlib.import_module("poptorch").other
    with pytest.raises(popsim_torch.Error, match="another poptorch"):
        popsim_torch.install()
    popsim_torch.install(replace=True)
    assert importlib.import_module("poptorch") is popsim_torch
    popsim_torch.install()  # no error, because this was installed already


@pytest.mark.usefixtures("installed_nothing")
def test_the_stand_in_is_not_taken_for_another_one(monkeypatch):
    monkeypatch.syspath_prepend(alias.STANDIN_FOLDER)
    assert importlib.import_module("poptorch") is popsim_torch
    popsim_torch.install()


@pytest.mark.usefixtures("installed_nothing")
def test_a_folder_that_happens_to_have_the_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "poptorch").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    popsim_torch.install()
    assert importlib.import_module("poptorch") is popsim_torch
