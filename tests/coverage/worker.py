"""A process that runs the cases that it reads from its input, one a line."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from dataclasses import asdict

import torch

from tests.coverage.cases import Case, chosen_calls, run_call
from tests.coverage.outcome import Outcome


def _run(case: Case, most: int | None, skip: list[int], say: object) -> None:
    try:
        calls = chosen_calls(case, most)
    except Exception as error:
        say("end", -1, asdict(Outcome("samples", f"{type(error).__name__}: {error}")))
        return
    for number, call in calls:
        if number in skip:
            continue
        say("begin", number, str([list(value.shape) for value in call.given]))
        try:
            outcome = run_call(case, call)
        except Exception:
            outcome = Outcome("harness", traceback.format_exc()[-1000:])
        say("end", number, asdict(outcome))


def main() -> None:
    """Read cases, run them, and write a line before and after each call."""
    out, sys.stdout = sys.stdout, sys.stderr
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def say(*message: object) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    say("ready")
    for line in sys.stdin:
        fields, most, skip = json.loads(line)
        _run(Case(*fields), most, skip, say)
        say("done")


if __name__ == "__main__":
    main()
