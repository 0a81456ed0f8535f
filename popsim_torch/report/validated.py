"""How the machine model of this version compares with published figures, as a file of the package.

The comparison takes minutes and models of its own (``python -m popsim_torch.validation``), so that
reports do not repeat it: its result is kept in ``validated.json``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["read_validation", "write_validation"]

_FILE = Path(__file__).with_name("validated.json")


def read_validation(file: Path = _FILE) -> dict[str, Any] | None:
    """Return how many rows there are, how many are within tolerance, and the worst.

    Args:
        file: The file.

    Returns:
        As in reports; None if no comparison has been made.
    """
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


def write_validation(
    rows: int, within: int, worst: tuple[str, float] | None, file: Path = _FILE
) -> None:
    """Keep the result of a comparison, for the reports of this version.

    Args:
        rows: The number of published figures.
        within: How many of ours are within tolerance.
        worst: The number of the worst row, and its error: 0.11 for 11 %; None without rows.
        file: The file.

    Raises:
        OSError: The file cannot be written.
    """
    entry = None if worst is None else {"id": worst[0], "error": worst[1]}
    result = {"rows": rows, "within": within, "worst": entry}
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
