"""``python -m tests.coverage``: compares PyTorch's operators and modules with eager PyTorch."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.coverage.cases import DTYPES, KINDS, Case, all_cases
from tests.coverage.outcome import Outcome
from tests.coverage.page import rows_of, written
from tests.coverage.run import Result, run_cases


def _results_in(path: Path) -> Iterator[Result]:
    """Yield the results that an earlier run has written."""
    for line in path.read_text().splitlines():
        case, number, shapes, outcome = json.loads(line).values()
        ops, foreign = map(tuple, (outcome.pop("ops"), outcome.pop("foreign")))
        yield Result(Case(**case), number, shapes, Outcome(**outcome, ops=ops, foreign=foreign))


def main() -> None:
    """Run the cases that the command line names, and write a line for each call."""
    parser = argparse.ArgumentParser(prog="python -m tests.coverage")
    parser.add_argument("--most", type=int, help="the most calls of a case; all if not given")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60, help="how long a call may take")
    parser.add_argument("--match", default="", help="a pattern of names")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--groups", default="ops,modules")
    parser.add_argument("--out", type=Path, default=Path("build/coverage.jsonl"))
    parser.add_argument("--page", type=Path, help="the page to write; it needs all cases")
    parser.add_argument(
        "--with", type=Path, nargs="*", default=[], dest="others", help="files of other cases"
    )
    given = parser.parse_args()
    cases = [
        case
        for case in sorted(all_cases(), key=lambda case: KINDS[::-1].index(case.kind))
        if re.search(given.match, case.name)
        and case.dtype in given.dtypes.split(",")
        and case.kind in given.kinds.split(",")
        and case.group in given.groups.split(",")
    ]
    begun = time.perf_counter()
    results = [result for path in given.others for result in _results_in(path)]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w") as file:

        def found(result: Result) -> None:
            results.append(result)
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()

        run_cases(cases, found, most=given.most, processes=given.processes, seconds=given.seconds)
    if given.page is not None:
        given.page.write_text(written(rows_of(results), given.most))
    print(f"{len(cases)} cases in {time.perf_counter() - begun:.0f} s: {given.out}")


if __name__ == "__main__":
    main()
