"""The group ``Distributed`` of ``Options``: the processes that train a model together.

Package private.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from popsim_torch.errors import UsageValueError
from popsim_torch.options.base import OptionsGroup, Setting, require
from popsim_torch.options.launchers import MPI, launched

if TYPE_CHECKING:
    from typing_extensions import Self

_LONGEST = 365 * 24 * 3600  # seconds


class _DistributedOptions(OptionsGroup):
    """``Options.Distributed``: the ID of this process, and the number of host processes.

    If a launcher has started several processes, new options take the process ID and the number of
    processes from the environment; otherwise these are 0 and 1. The variables are
    ``OMPI_COMM_WORLD_RANK`` and ``_SIZE``, ``RANK`` and ``WORLD_SIZE`` (``torchrun``), ``PMI_RANK``
    and ``PMI_SIZE``, and, in a step of SLURM, ``SLURM_PROCID`` and ``SLURM_STEP_NUM_TASKS``, in
    this order.

    Processes that train a model do so together: each computes the gradients of its own data, and
    the sums of all update the weights, which are equal in all processes. They meet at the addresses
    that ``torchrun`` sets. Processes that should work independently call ``disable()``.
    """

    _path = "Options.Distributed"

    distributed_process_id = Setting(0, setter="configureProcessId")
    num_distributed_processes = Setting(1, setter="configureProcessId")
    ipuof_configs = Setting[dict[str, Any]]({})
    wait_seconds = Setting(60.0, setter="setTimeout", is_key=False)

    def __init__(self) -> None:
        super().__init__()
        self._read_environment()

    def _read_environment(self) -> None:
        """Use the process ID and count of a launcher that has started several processes, if any."""
        rank, size = MPI
        self.setEnvVarNames(size, rank)
        found = launched()
        if found is not None:
            self.configureProcessId(found.rank, found.size)

    @property
    def processId(self) -> int:
        """The number of this process, from 0."""
        return self.distributed_process_id

    @property
    def numProcesses(self) -> int:
        """The number of processes that run the program."""
        return self.num_distributed_processes

    def disable(self) -> Self:
        """Set the number of processes to one, and ignore the environment.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
        """
        return self.set(distributed_process_id=0, num_distributed_processes=1)

    def configureProcessId(self, process_id: int, num_processes: int) -> Self:
        """Set the ID of this process and the number of processes.

        Args:
            process_id: The number of this process, from 0.
            num_processes: The number of processes that run the program.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: An argument is not an int.
            UsageValueError: ``process_id`` is not in the range of ``num_processes``.
        """
        call = f"Options.Distributed.configureProcessId({process_id!r}, {num_processes!r})"
        require(
            isinstance(process_id, int) and isinstance(num_processes, int),
            f"{call}: pass two ints.",
        )
        if not 0 <= process_id < num_processes:
            raise UsageValueError(f"{call}: need 0 <= process id < number of processes.")
        return self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)

    def setTimeout(self, seconds: float) -> Self:
        """Set how long a process waits for the others, to meet them or to exchange gradients.

        Args:
            seconds: 60 by default. If a process does not come in this time, the others raise an
                error. Processes wait for each other at each weight update, so it must be longer
                than anything that only one of them does in between, such as validation.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a number.
            UsageValueError: The number is not positive, or longer than a year.
        """
        call = f"Options.Distributed.setTimeout({seconds!r})"
        require(
            isinstance(seconds, (int, float)) and not isinstance(seconds, bool),
            f"{call}: pass a number of seconds.",
        )
        if not 0 < seconds <= _LONGEST:
            raise UsageValueError(f"{call}: need 0 < seconds <= {_LONGEST}.")
        return self.set(wait_seconds=float(seconds))

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> Self:
        """Read the number of processes and the ID of this process from the environment, now.

        Args:
            var_num_processes: The variable with the number of processes; 1 if it is not set.
            var_process_id: The variable with the number of this process; 0 if it is not set.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageValueError: A variable does not hold an int, or the two do not fit together.
        """
        return self.configureProcessId(
            _int_from_environment(var_process_id, 0), _int_from_environment(var_num_processes, 1)
        )


def _int_from_environment(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UsageValueError(
            f"Options.Distributed: the environment variable {variable} is {text!r}, not an int."
        ) from None
