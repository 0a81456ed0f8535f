"""``replay``: repeats the device iteration in a capsule, which ``Options.watch`` wrote."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from popsim_torch.errors import Error
from popsim_torch.executor.replay import Replayer
from popsim_torch.files.capsule import Capsule, read_capsule
from popsim_torch.verdict import Verdict

__all__ = ["replay", "replay_command"]

_OTHER_VERDICT = 1
_USAGE_ERROR = 2


def replay(path: str | os.PathLike[str]) -> Verdict:
    """Repeat the device iteration in a capsule, and return where its first bad number came from.

    The iteration has the weights, states, inputs and random numbers that it had, and the same bits
    on every machine. Reading the file runs no code from it.

    Args:
        path: A file that ``Options.watch(capsule=...)`` wrote.

    Raises:
        Error: The file cannot be read, is damaged, or is of another kind.
        UsageAssertionError: Another version of the package wrote the file.
    """
    return _repeated(read_capsule(path))


def _repeated(capsule: Capsule) -> Verdict:
    one = capsule.iteration
    replayer = Replayer(one.program, one.run, training=one.training, shared=one.shared)
    return replayer.verdict(one)


def replay_command(arguments: Sequence[str]) -> int:
    """Run ``popsim replay file.capsule``: print the verdict, and whether it is the one of the file.

    Args:
        arguments: The words after the command.

    Returns:
        The exit code: 0 if the verdict is the same, 1 if it is another one, 2 if there is none.
    """
    if len(arguments) != 1:
        print("popsim: replay needs one file: popsim replay file.capsule", file=sys.stderr)
        return _USAGE_ERROR
    try:
        capsule = read_capsule(arguments[0])
        verdict = str(_repeated(capsule))
    except Error as error:
        print(f"popsim: {error.message}", file=sys.stderr)
        return _USAGE_ERROR
    print(verdict)
    if verdict == capsule.verdict:
        print("This is the verdict in the file.")
        return 0
    print(f"The verdict in the file is another one:\n{capsule.verdict}")
    return _OTHER_VERDICT
