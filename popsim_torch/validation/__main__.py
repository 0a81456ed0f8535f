"""``python -m popsim_torch.validation``: prints the table; fails if a row is outside."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from popsim_torch.report.validated import write_validation
from popsim_torch.validation.page import write_page
from popsim_torch.validation.rows import validation_rows, whole_models
from popsim_torch.validation.table import Result, results_of, text_of

__all__ = ["main"]


def main() -> int:
    """Print the validation table; return 1 if a row that must hold does not."""
    parser = argparse.ArgumentParser(prog="popsim_torch.validation", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="leave out whole models")
    parser.add_argument(
        "--write",
        metavar="FILE",
        help="write the tables of this page, and the result for reports",
    )
    arguments = parser.parse_args()
    if arguments.fast and arguments.write:
        parser.error("--write needs all rows, and --fast leaves some out. Leave out one of them.")
    logging.getLogger("poptorch::python").setLevel(logging.ERROR)
    start = time.perf_counter()
    results = results_of(validation_rows(fast=arguments.fast))
    print(text_of(results))
    outside = [one for one in results if not one.within and not one.soft]
    print(_last_line(results, outside, time.perf_counter() - start))
    if arguments.write:
        write_page(arguments.write, results, whole_models())
        firm = [one for one in results if not one.soft]
        worst = max(firm, key=lambda one: abs(one.error))
        write_validation(len(firm), len(firm) - len(outside), (worst.number, worst.error))
    return 1 if outside else 0


def _last_line(results: list[Result], outside: list[Result], seconds: float) -> str:
    firm = [one for one in results if not one.soft]
    worst = max(firm, key=lambda one: abs(one.error) / max(one.tolerance, 1e-9))
    return (
        f"{len(firm) - len(outside)} of {len(firm)} rows are within their tolerance, "
        f"the nearest to its limit is {worst.number} ({worst.error:+.1%} of "
        f"{worst.tolerance:.0%}); {seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
