"""What a ``profile.pop`` of ours contains, as a table, and the check that a file has it.

``docs/report.md`` describes the same fields; a test compares both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["FORMAT", "REPORT", "check_fields", "field_names"]

FORMAT = "popsim_torch report 2"

# A kind is a word, a list of one kind, or an object by the names of its fields. A word may end with
# "?": the value may be null. ``Named`` is an object with names that the program chooses.
Kind = Any
_WORDS = {
    "text": (str,),
    "flag": (bool,),
    "count": (int,),
    "number": (int, float),
    "any": (object,),
}


class Named:
    """An object whose fields have names that the program chooses, and values of one kind."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind


class Maybe:
    """A kind, or null."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind


_PARTS = ("compute", "exchange", "sync", "glue", "links", "host", "update", "all_reduce", "waiting")
_OP = {
    "name": "text",
    "kind": "text",
    "module": "text",
    "phase": "text",
    "stage": "count",
    "ipu": "count",
    "source": "text",
    "executions": "number",
    "cycles": "number",
    "compute": "number",
    "exchange": "number",
    "sync": "number",
    "glue": "number",
    "temporary_bytes": "count",
    "flops": "number",
    "formula": "text",
    "grade": "text",
    "plan": "text",
    "inputs": ["count"],
    "outputs": ["count"],
    "recomputed": "flag",
}
_VARIABLE = {
    "name": "text",
    "class": "text",
    "ipu": "count",
    "bytes": "count",
    "tiles": "count",
    "bytes_per_tile": "number",
    "shape": ["count"],
    "dtype": "text",
    "first_op": "count?",
    "last_op": "count?",
    "copies": "count",
}
_IPU = {
    "ipu": "count",
    "stages": ["count"],
    "busy_cycles": "number",
    "use": "number",
    "parts": dict.fromkeys(_PARTS, "number"),
    "memory": {
        "capacity": "count",
        "peak": "number",
        "mean": "number",
        "worst_tile": "count",
        "peak_op": "count?",
        "always": "number",
        "verdict": "text",
        "classes": Named({"max": "number", "total": "number"}),
        "tiles": ["number"],
        "always_tiles": ["number"],
    },
    "liveness": [["number"]],
}
_ACTION = {
    "kind": "text",
    "stage": "count?",
    "ipu": "count",
    "micro_batch": "count?",
    "cycles": "number",
}
_ESTIMATE = {
    "device": {
        "name": "text",
        "version": "count",
        "tiles": "count",
        "io_tiles": "count",
        "tile_bytes": "count",
        "clock_hz": "number",
        "num_ipus": "count",
        "ipus_per_replica": "count",
    },
    "batch": {
        "micro_batch": "count?",
        "device_iterations": "count",
        "gradient_accumulation": "count",
        "replicas": "count",
        "items_per_call": "count?",
    },
    "training": "flag",
    "verdict": "text",
    "call": {
        "cycles": "number",
        "seconds": "number",
        "items_per_second": "number?",
        "parts": dict.fromkeys(_PARTS, "number"),
    },
    "update": {"cycles": "number", "seconds": "number"},
    "grades": dict.fromkeys("ABC", "number"),
    "without_formula": ["text"],
    "ops": [_OP],
    "variables": [_VARIABLE],
    "ipus": [_IPU],
    "schedule": {
        "name": "text",
        "stretches": [
            {
                "times": "count",
                "slots": [{"cycles": "number", "link_cycles": "number", "actions": [_ACTION]}],
            }
        ],
        "update_cycles": "number",
        "all_reduce_cycles": "number",
    },
    "links": [
        {
            "from": "count",
            "to": "count",
            "bytes": "number",
            "cycles": "number",
            "direction": "text",
        }
    ],
    "stash": [{"name": "text", "stage": "count", "copies": "count", "bytes": "number"}],
    "latency": dict.fromkeys(("host_to_ipu", "compute", "ipu_to_host", "round_trip"), "number"),
    "traffic": dict.fromkeys(
        ("all_reduce_bytes", "all_reduces", "host_in_bytes", "host_out_bytes", "off_chip_bytes"),
        "number",
    ),
}
_HOST_OP = {
    "name": "text",
    "kind": "text",
    "phase": "text",
    "stage": "count",
    "scope": "text",
    "source": "text",
    "outputs": [{"name": "text", "dtype": "text", "shape": ["count"]}],
}
_LANE = {
    "kind": "text",
    "stage": "count?",
    "micro_batch": "count?",
    "device_iteration": "count",
    "replica": "count",
    "thread": "count",
    "begin": "number",
    "end": "number",
}
REPORT = {
    "format": "text",
    "popsim_torch": "text",
    "name": "text",
    "created": "text",
    "pid": "count",
    "simulated": "text",
    "static": {
        "training": "flag",
        "num_ipus": "count",
        "compilation_seconds": "number",
        "device_iterations": "count",
        "gradient_accumulation": "count",
        "options": Named("any"),
        "host_memory": Named("count"),
        "host_ops": [_HOST_OP],
    },
    "estimate": Maybe(_ESTIMATE),
    "no_estimate": "text?",
    "validation": Maybe(
        {"rows": "count", "within": "count", "worst": Maybe({"id": "text", "error": "number"})}
    ),
    "runs": [
        {
            "number": "count",
            "measured": {
                "begin": "number",
                "end": "number",
                "lanes": [_LANE],
                "lanes_left_out": "count",
            },
            "simulated": Maybe({"cycles": "number"}),
        }
    ],
    "calls": "count",
}
"""The fields of a report."""


def check_fields(report: object) -> str | None:
    """Return what is wrong with the fields of a report; None if nothing is.

    Fields that a later version adds are no mistake.
    """
    return _wrong(report, REPORT, "")


def _wrong(value: object, kind: Kind, where: str) -> str | None:
    if isinstance(kind, str):
        return _wrong_word(value, kind, where)
    if isinstance(kind, Maybe):
        return None if value is None else _wrong(value, kind.kind, where)
    if isinstance(kind, list):
        if not isinstance(value, list):
            return f"{where} is {_shown(value)}, where a list is needed"
        found = (_wrong(one, kind[0], f"{where}[{place}]") for place, one in enumerate(value))
        return next((one for one in found if one), None)
    if not isinstance(value, Mapping):
        return f"{where or 'the file'} is {_shown(value)}, where an object is needed"
    prefix = f"{where}." if where else ""
    if isinstance(kind, Named):
        found = (_wrong(one, kind.kind, f"{prefix}{key}") for key, one in value.items())
        return next((one for one in found if one), None)
    for key, inner in kind.items():
        if key not in value:
            return f"{prefix}{key} is missing"
        if problem := _wrong(value[key], inner, f"{prefix}{key}"):
            return problem
    return None


def _wrong_word(value: object, kind: str, where: str) -> str | None:
    if kind.endswith("?"):
        if value is None:
            return None
        kind = kind[:-1]
    if kind == "any":
        return None
    is_right = isinstance(value, _WORDS[kind]) and (kind == "flag" or not isinstance(value, bool))
    if is_right and isinstance(value, float):
        is_right = math.isfinite(value)
    return None if is_right else f"{where} is {_shown(value)}, where a {kind} is needed"


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def field_names(kind: Kind = REPORT, where: str = "") -> list[str]:
    """Return the paths of all fields: ``estimate.ops[].cycles``."""
    if isinstance(kind, Maybe):
        return field_names(kind.kind, where)
    if isinstance(kind, list):
        return field_names(kind[0], f"{where}[]")
    if isinstance(kind, Named):
        return field_names(kind.kind, f"{where}.*")
    if isinstance(kind, dict):
        prefix = f"{where}." if where else ""
        return [one for key, inner in kind.items() for one in field_names(inner, f"{prefix}{key}")]
    return [where]
