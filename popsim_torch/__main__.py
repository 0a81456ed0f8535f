"""The commands ``popsim`` and ``python -m popsim_torch``."""

from __future__ import annotations

import sys
from collections.abc import Callable

from popsim_torch import names_command
from popsim_torch.capsules import replay_command
from popsim_torch.processor import build_info
from popsim_torch.records.command import diff
from popsim_torch.report.command import report_command
from popsim_torch.runner import CannotStart, run_module, run_script

_USAGE = """\
usage: popsim run [--replace] [--] script.py [arguments ...]
       popsim run [--replace] -m module [arguments ...]
       popsim names file.py:function [--select PATTERN ...] [--json]
       popsim diff [--tolerance T] [--json] run_a run_b
       popsim replay file.capsule
       popsim report [--operations] [--open] folder
       popsim report --compare [--output FILE] [--open] folder_a folder_b
       popsim info

commands:
  run     run a program written for PopTorch: `import poptorch` is popsim_torch,
          in the program and in the processes that it starts
  names   list the tensors of a model: names, shapes, dtypes, bytes, by module;
          the function of the file returns (model, inputs), (model, inputs,
          optimizer), or (executor, inputs)
  diff    say where two recorded runs first differ
  replay  repeat the device iteration that Options.watch wrote to a file, and say
          where its first bad number came from
  report  print what a program would cost on an IPU (simulated), from the report
          that Options.enableProfiling wrote, and say where its page is; or
          compare two reports
  info    print what this installation computes with

options of run:
  --replace  replace another installed poptorch

options of names:
  --select PATTERN  list only tensors with such names ('Gradient___*.weight');
                    several of these options list what one of them matches
  --json            print a list of objects

options of diff:
  --tolerance T  values may differ by T, relative; without it, bits are compared
  --json         print the difference as JSON
  The exit code is 0 if the runs are equal, 1 if they differ, 2 for a mistake, or
  if too little of the runs can be compared to say.

options of report:
  --compare      compare two reports, and write the page comparison.html
  --output FILE  the page of the comparison
  --operations   print only the cost of modules by phase
  --open         show the page in a browser
  The exit code is 2 for a mistake, or a report that cannot be opened.

`python -m popsim_torch` is the same command.
"""
_USAGE_ERROR = 2


def main() -> int:
    """Run the command in ``sys.argv``, and return the exit code."""
    command, *rest = sys.argv[1:] or [""]
    if command in ("-h", "--help", "help") or (
        command in _COMMANDS and rest[:1] in (["-h"], ["--help"])
    ):
        print(_USAGE, end="")
        return 0
    if command in _COMMANDS:
        return _COMMANDS[command](rest)
    return _refuse_command()


def _refuse_command() -> int:
    shown = " ".join(sys.argv[1:])
    return _refuse(f"unknown command: {shown}" if shown else "a command is needed")


def _info(rest: list[str]) -> int:
    if rest:
        return _refuse_command()
    print(build_info())
    return 0


def _names(rest: list[str]) -> int:
    try:
        names_command.run(rest)
    except names_command.WrongArguments as error:
        return _refuse(str(error))
    except CannotStart as error:
        print(f"popsim: {error}", file=sys.stderr)
        return _USAGE_ERROR
    return 0


def _run(rest: list[str]) -> int:
    replace = rest[:1] == ["--replace"]
    rest = rest[1:] if replace else rest
    is_module, is_script = rest[:1] == ["-m"], rest[:1] == ["--"]
    rest = rest[1:] if is_module or is_script else rest
    if not rest:
        return _refuse("a module is needed after -m" if is_module else "a script is needed")
    target, *arguments = rest
    if target.startswith("-") and not is_script:
        return _refuse(f"unknown option of run: {target}")
    try:
        (run_module if is_module else run_script)(target, arguments, replace=replace)
    except CannotStart as error:
        print(f"popsim: {error}", file=sys.stderr)
        return _USAGE_ERROR
    return 0


def _refuse(problem: str) -> int:
    print(f"popsim: {problem}\n\n{_USAGE}", end="", file=sys.stderr)
    return _USAGE_ERROR


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "names": _names,
    "info": _info,
    "diff": diff,
    "replay": replay_command,
    "report": report_command,
}
"""What each command does with its arguments; it returns the exit code."""


if __name__ == "__main__":
    sys.exit(main())
