"""Runs a function in several processes that train together, as torchrun starts them."""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forks import run_forked

ROOT = Path(__file__).resolve().parents[1]


def run_ranks(
    function: Callable[..., Any],
    size: int,
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    dies: bool = False,
    **arguments: Any,
) -> list[Any]:
    """Call a function of a test module in several processes; return the result of each rank.

    Args:
        function: Called with the arguments; it finds its rank in the environment, or in options.
        size: The number of processes.
        folder: For files of the processes.
        env: Further environment variables.
        timeout: The time limit for each process, in seconds.
        dies: Whether a process may end without a result; it is what it wrote to stderr then.
        arguments: Numbers, strings, and lists of them.

    Raises:
        AssertionError: A process has ended without a result.
        subprocess.TimeoutExpired: A process took too long and was killed.
    """
    # As under torchrun, the processes meet at a store that belongs to none of them.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **(env or {}),
    }
    what = [function.__module__, function.__qualname__, json.dumps(arguments)]

    def run(rank: int) -> Any:
        out = folder / f"{function.__qualname__}-{rank}-{os.urandom(4).hex()}.pt"
        process = run_forked(
            [__file__, *what, str(out)],
            cwd=folder,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            timeout=timeout,
        )
        assert dies or out.exists(), f"rank {rank}: {process.stderr}"
        return torch.load(out, weights_only=False) if out.exists() else process.stderr

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def main() -> None:
    """Call the function that the command line names, and save its result."""
    module, name, arguments, out = sys.argv[1:]
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    function = getattr(importlib.import_module(module), name)
    try:
        torch.save(function(**json.loads(arguments)), out)
    except BaseException:
        traceback.print_exc()
        raise


if __name__ == "__main__":
    main()
