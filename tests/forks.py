"""Runs programs in separate processes that need not import torch first.

Each process is forked from a process that has imported this package and has no threads yet. To test
what happens while a package is imported, such as which environment variables it reads, start a new
process instead.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["popsim_torch.runner"])


def run_forked(
    arguments: list[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    timeout: float = 120,
    strict: bool = False,
) -> subprocess.CompletedProcess:
    """Run a Python program, and return its output and its exit code.

    Args:
        arguments: The arguments after ``python`` on the command line: a script, or ``-m`` and a
            module, and its own arguments.
        cwd: The working directory.
        env: The environment variables; imports were done without them.
        timeout: The time limit, in seconds.
        strict: Turn every warning into an error.

    Raises:
        subprocess.TimeoutExpired: The program took longer and was killed.
    """
    outputs = [cwd / f".{name}-{os.urandom(4).hex()}" for name in ("out", "err")]
    process = _CONTEXT.Process(target=_run, args=(arguments, cwd, dict(env), strict, *outputs))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired(arguments, timeout)
    out, err = (path.read_text() for path in outputs)
    for path in outputs:
        path.unlink()
    return subprocess.CompletedProcess(arguments, process.exitcode, out, err)


def _run(
    arguments: list[str], cwd: Path, env: dict[str, str], strict: bool, out: Path, err: Path
) -> None:
    for path, descriptor in ((out, 1), (err, 2)):
        opened = os.open(path, os.O_CREAT | os.O_WRONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.modules.pop("__mp_main__", None)
    if strict:
        warnings.simplefilter("error")
    code = 0
    try:
        _run_as_python_does(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_as_python_does(arguments: list[str]) -> None:
    target, *rest = arguments
    if target == "-m":
        target, *rest = rest
        sys.argv[:] = [target, *rest]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = [target, *rest]
    sys.path.insert(0, str(Path(target).parent))
    runpy.run_path(target, run_name="__main__")
