"""The consumer's side of a worker process: start it, exchange messages, end it."""

from __future__ import annotations

import copyreg
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.reduction import ForkingPickler, recv_handle
from typing import Any

import torch

from popsim_torch.data import worker
from popsim_torch.data.ring import nameless_file
from popsim_torch.enums import SharingStrategy
from popsim_torch.errors import Error

__all__ = ["WorkerProcess", "start_error"]

_ASK_SECONDS = 2.0
_INTERRUPT_SECONDS = 3.0
_KILL_SECONDS = 1.0
_CHECK_SECONDS = 1.0

_START_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}

_logger = logging.getLogger("poptorch::python")


def start_error(reason: str) -> Error:
    """Return the error for a worker that cannot load its first element."""
    return Error(f"AsynchronousDataAccessor: the worker thread failed to start: {reason}")


class WorkerProcess:
    """A process that runs ``worker.run``, and the consumer's end of the pipe to it.

    Args:
        data: The data to iterate.
        settings: The settings of the worker.
        strategy: How the data is sent to the worker.

    Attributes:
        pid: The process id.

    Raises:
        Error: The data cannot be pickled, and the strategy is not ``Fork``.
    """

    def __init__(
        self, data: Iterable[Any], settings: worker.Settings, strategy: SharingStrategy
    ) -> None:
        context: Any = multiprocessing.get_context(_START_METHODS[strategy])
        if strategy is SharingStrategy.ForkServer:
            _preload(context)
        self._connection, others_end = context.Pipe(duplex=True)
        self._fetched: deque[Any] = deque()
        self._file = None
        load: Callable[[], Iterable[Any]] = _Parcel(data, "")
        if strategy is not SharingStrategy.Fork:
            self._file = _File(named=strategy is SharingStrategy.FileSystem)
            load = _Parcel(data, self._file.path)
        inherited = self._connection if strategy is SharingStrategy.Fork else None
        process = context.Process(
            target=worker.run,
            args=(others_end, inherited, load, settings),
            name="AsynchronousDataAccessor",
        )
        try:
            with _no_fork_warnings():
                process.start()
        except BaseException as error:
            self._connection.close()
            self.forget_data()
            if isinstance(error, (pickle.PicklingError, AttributeError, TypeError, RuntimeError)):
                raise start_error(
                    f"the dataset cannot be sent to it ({error}). Define classes and functions at "
                    "the top level of a module, or pass "
                    "sharing_strategy=poptorch.SharingStrategy.Fork."
                ) from error
            raise
        finally:
            others_end.close()
        self._process: Any = process
        self._owner = os.getpid()
        self.pid: int = process.pid
        _logger.debug("AsynchronousDataAccessor worker process: %d", self.pid)

    @property
    def is_stopped(self) -> bool:
        """Whether ``stop`` was called."""
        return self._process is None

    def forget_data(self) -> None:
        """Remove the data that was sent to the worker, because the worker has read it."""
        if self._file is not None:
            self._file.remove()

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            OSError: The worker has died.
        """
        self._connection.send(message)

    def fetch(self) -> Collection[Any]:
        """Read all messages that have come; return those that ``receive`` will return, in order."""
        with suppress(OSError, EOFError):  # `receive` tells that the worker has died
            while self._connection.poll():
                self._fetched.append(self._connection.recv())
        return self._fetched

    def wait(self) -> None:
        """Wait for a message, or for the end of the worker."""
        # Wait for the process as well: processes that the worker has forked may keep the pipe open.
        while not self._fetched and not self._connection.poll(_CHECK_SECONDS) and self._lives():
            pass

    def receive(self) -> Any:
        """Return the next message of the worker.

        Raises:
            EOFError: There is no message, and the worker has died.
        """
        self.wait()
        if self._fetched:
            return self._fetched.popleft()
        # Only this message: a file may follow it.
        try:
            if self._connection.poll():
                return self._connection.recv()
        except OSError:
            pass
        raise EOFError

    def receive_file(self) -> int:
        """Return a file descriptor that the worker has sent.

        Raises:
            EOFError: There is no descriptor, and the worker has died.
        """
        try:
            return recv_handle(self._connection)
        except OSError:
            raise EOFError from None

    def stop(self) -> None:
        """End the worker: ask, interrupt, kill; a second call does nothing."""
        if self._process is None or os.getpid() != self._owner:
            return
        process, self._process = self._process, None
        try:
            with suppress(OSError):
                self._connection.send(None)
            self._connection.close()
            self.forget_data()
            if not _ends(process, _ASK_SECONDS):
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGINT)
                _ends(process, _INTERRUPT_SECONDS)
        finally:
            if _lives(process):
                process.kill()
            process.join(_KILL_SECONDS)
            # (raises an error while children of a killed worker are still alive)
            with suppress(ValueError):
                process.close()

    def _lives(self) -> bool:
        return _lives(self._process)


def _preload(context: Any) -> None:
    """Make the server import this package, because otherwise each worker takes seconds to start.

    The whole program has only one server: earlier modules to preload are kept.
    """
    server = getattr(forkserver, "_forkserver", None)
    if getattr(server, "_preload_modules", None) == ["__main__"]:
        context.set_forkserver_preload(["__main__", worker.__name__])


def _lives(process: Any) -> bool:
    if not process.is_alive():
        return False
    try:  # Children of a dead worker make it look alive if a server started it.
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _ends(process: Any, timeout_seconds: float) -> bool:
    if _lives(process):
        process.join(timeout_seconds)
    return not _lives(process)


class _File:
    """A file to send data; without a name it is in memory, if the system supports that."""

    def __init__(self, named: bool) -> None:
        self._descriptor = None
        if named or not os.path.isdir("/proc/self/fd"):
            descriptor, self.path = tempfile.mkstemp(prefix="popsim_torch_")
            os.close(descriptor)
        else:
            self._descriptor = nameless_file()
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def remove(self) -> None:
        """Delete the file; memory that maps the file stays valid."""
        if not self.path:
            return
        if self._descriptor is None:
            os.unlink(self.path)
        else:
            os.close(self._descriptor)
        self.path = ""


@dataclass
class _Parcel:
    """Data that is sent to another process through a file, with each tensor only once."""

    data: Any
    path: str

    def __call__(self) -> Any:
        return self.data

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle here, because locks and shared values of multiprocessing can be pickled only now.
        torch.save(
            self.data,
            self.path,
            pickle_module=_PickleModule,
            pickle_protocol=pickle.HIGHEST_PROTOCOL,
        )
        return _Delivery, (self.path,)


class _PickleModule:
    """The pickle module for ``torch.save``."""

    class Pickler(ForkingPickler):
        """Pickles tensors as ``torch.save`` does, and shared objects as multiprocessing does."""

        def __init__(self, file: Any, protocol: int) -> None:
            super().__init__(file, protocol)
            # Leave out PyTorch's own reducers for processes: they need a file descriptor for each
            # tensor.
            self.dispatch_table = {
                kind: reduce
                for kind, reduce in dict(self.dispatch_table).items()
                if kind in copyreg.dispatch_table or not kind.__module__.startswith("torch")
            }


@dataclass
class _Delivery:
    """The receiving side: reads the file; tensors stay in the file until they are changed."""

    path: str

    def __call__(self) -> Any:
        return torch.load(self.path, mmap=True, weights_only=False)


@contextmanager
def _no_fork_warnings() -> Iterator[None]:
    """Hide Python's warning that a fork of a process with threads may hang.

    PyTorch always has threads, but the worker does not use them (``worker.run``).
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
        yield
