"""The command ``popsim report``."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from popsim_torch.errors import Error
from popsim_torch.report import page
from popsim_torch.report.folder import TIMED
from popsim_torch.report.reading import find_reports, open_report
from popsim_torch.report.report import Report

__all__ = ["report_command"]

_DONE, _FAILED, _USAGE_ERROR = 0, 1, 2
_COMPARISON = "comparison.html"


def report_command(arguments: Sequence[str]) -> int:
    """Print a report or a comparison of two, and say where the page is.

    Args:
        arguments: The arguments of the command line after ``report``.

    Returns:
        The exit code: 0, or 1 if a page cannot be written, or 2 for a mistake or a report that
        cannot be opened.
    """
    try:
        given = _parser().parse_args(list(arguments))
    except SystemExit:  # argparse has printed the mistake
        return _USAGE_ERROR
    if (given.compare is None) == (given.folder is None):
        return _say("name one report, or two after --compare", _USAGE_ERROR)
    if given.output is not None and given.compare is None:
        return _say("--output is for --compare", _USAGE_ERROR)
    try:
        if given.compare is not None:
            first, second = given.compare
            made = _compare(first, second, given.output or _COMPARISON)
        else:
            made = _show(Path(given.folder), operations=given.operations)
    except Error as error:
        return _say(error.message, _USAGE_ERROR)
    except BrokenPipeError:  # nobody reads on, as with `| head`
        return _FAILED
    except OSError as error:
        return _say(f"the page cannot be written: {error}", _FAILED)
    if given.open:
        webbrowser.open(made.resolve().as_uri())
    return _DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="popsim report", add_help=False)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"))
    parser.add_argument("--output", metavar="FILE")
    parser.add_argument("--operations", action="store_true")
    parser.add_argument("--open", action="store_true")
    return parser


def _say(problem: str, code: int) -> int:
    print(f"popsim report: {problem}", file=sys.stderr)
    return code


def _show(folder: Path, *, operations: bool) -> Path:
    """Print a report, and write its page if the folder has none; return the path of the page."""
    report = _opened(str(folder))
    if operations:
        report.print_operations()
    else:
        print(report)
    target = (report.folder or folder) / "report.html"
    if not target.exists():
        page.write(target, page.report_page(report))
    print(f"\nThe page: {target}")
    return target


def _compare(first: str, second: str, output: str) -> Path:
    """Print a comparison and write its page; return the path of the page."""
    comparison = _opened(first, second).compare(_opened(second, first))
    print(comparison)
    target = comparison.write_page(output)
    print(f"\nThe page: {target}")
    return target


def _opened(path: str, other: str = "") -> Report:
    """Open a report, in a folder with several that of the same program, or the newest.

    Args:
        path: The folder.
        other: The folder of the report that it is compared with.

    Raises:
        Error: There is no report, or no rule says which one.
    """
    folder = Path(path)
    if not folder.is_dir() or (folder / "profile.pop").is_file():
        return open_report(folder)
    inside = find_reports(folder)
    if other:
        names = {one.parent.name for one in find_reports(Path(other))} | {Path(other).name}
        same = [one for one in inside if one.parent.name in names]
        inside = same if len(same) == 1 else inside
    if len(inside) > 1 and all(one.parent.name.startswith(TIMED) for one in inside):
        # (their names begin with the date and the time)
        print(f"{path} has {len(inside)} reports; this is the newest.\n")
        inside = inside[-1:]
    return open_report(inside[0] if len(inside) == 1 else folder)
