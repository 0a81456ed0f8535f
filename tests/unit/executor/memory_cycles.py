"""A script that compiles, runs and destroys models repeatedly, and measures what remains.

``python -m tests.unit.executor.memory_cycles 50 200`` prints, as JSON, the growth of the process in
bytes and in Python objects, for each of 200 cycles after the first 50.
"""

import ctypes
import gc
import json
import resource
import sys
from pathlib import Path

import torch

from tests.unit.executor.nets import Net, batch, infer, train

_COLLECT_EVERY = 25  # cycles


def cycle(number: int) -> None:
    net = Net()
    x, y = batch()
    if number % 2:
        model = train(net)
        model(x, y)
    else:
        model = infer(net)
        model(x)
    model.destroy()


def held() -> tuple[int, int]:
    """Return the number of bytes and of Python objects in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize(), len(gc.get_objects())


def run(cycles: int) -> tuple[int, int]:
    for number in range(cycles):
        cycle(number)
        if number % _COLLECT_EVERY == 0:
            gc.collect()
    return held()


def main(warm_up: int, cycles: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    before, after = run(warm_up), run(cycles)
    growth = [(b - a) / cycles for a, b in zip(before, after, strict=True)]
    print(json.dumps(dict(zip(("bytes", "objects"), growth, strict=True))))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
