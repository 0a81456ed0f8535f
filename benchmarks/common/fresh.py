"""Runs a function of a benchmark in a fresh process, for measurements that need a new process."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_RESULT = "RESULT "


def current_bytes() -> int:
    """Return the memory that this process uses now, in bytes; its peak if that is unknown."""
    return _status_bytes("VmRSS") or peak_bytes()


def peak_bytes() -> int:
    """Return the most memory that this process has used since ``reset_peak``, in bytes."""
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Reset the peak, if the system can do this (Linux)."""
    gc.collect()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(key: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return 0


class FreshProcess:
    """Calls functions of one module, each call in a separate process.

    The module's ``main`` must begin with ``if processes.serve(): return``.

    Args:
        module: Full name of the module, such as ``benchmarks.memory``.
        functions: The functions that may be called, by name: they take and return plain data.
        timeout: Seconds after which a call is stopped.
    """

    def __init__(
        self, module: str, functions: dict[str, Callable[..., Any]], timeout: float = 180
    ) -> None:
        self._module = module
        self._functions = functions
        self._timeout = timeout

    def call(self, function: str, *args: Any) -> Any:
        """Return the result of a function, or None if it took too long.

        Raises:
            RuntimeError: The function failed; the message contains its standard error.
        """
        request = json.dumps([function, *args])
        try:
            done = subprocess.run(
                [sys.executable, "-m", self._module],
                env=os.environ | {"POPSIM_BENCHMARK_CALL": request},
                capture_output=True,
                text=True,
                timeout=self._timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        for line in done.stdout.splitlines():
            if line.startswith(_RESULT):
                return json.loads(line.removeprefix(_RESULT))
        raise RuntimeError(f"{self._module} {request} failed:\n{done.stderr}")

    def serve(self) -> bool:
        """Run the call that this process was started for, if any; return whether there was one."""
        request = os.environ.pop("POPSIM_BENCHMARK_CALL", None)
        if request is None:
            return False
        function, *args = json.loads(request)
        print(_RESULT + json.dumps(self._functions[function](*args)), flush=True)
        return True
