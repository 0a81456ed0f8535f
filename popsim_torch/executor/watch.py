"""What happens when a check of numbers ends a run: verdict, capsule, error or callback."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from popsim_torch import _native, logs
from popsim_torch.errors import BadNumberError, Error
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.replay import Replayer, iteration_of_failed_run, unknown_verdict
from popsim_torch.files.capsule import Capsule, Iteration, write_capsule
from popsim_torch.files.operators import foreign_operators
from popsim_torch.options.watching import NumberWatching
from popsim_torch.processes.exchange import ExchangeParts
from popsim_torch.processes.peers import Peers
from popsim_torch.verdict import Verdict

__all__ = ["NumberWatcher"]

_SUFFIX = ".capsule"


class NumberWatcher:
    """Deals with the device iterations of a program that a check has ended.

    Args:
        compiled: The program.
        watching: The user's setting.
        name: The name of the model, for capsules.

    Attributes:
        compiled: As given.
    """

    def __init__(self, compiled: CompiledModel, watching: NumberWatching, name: str) -> None:
        self.compiled = compiled
        self._watching = watching
        self._name = name
        self._replayer: Replayer | None = None

    def caught(
        self,
        inputs: Sequence[torch.Tensor],
        exchange: ExchangeParts | None,
        peers: Peers | None,
        message: str,
    ) -> list[torch.Tensor]:
        """Go on after a check has ended a run, as the user wants.

        Args:
            inputs: The inputs of the run.
            exchange: What the run needs to exchange gradients.
            peers: The processes that train the program together, all of which get here; None if
                it trains alone.
            message: What the check says.

        Returns:
            The results of the run, if it goes on.

        Raises:
            BadNumberError: The run ends here.
            Exception: A native error: the run went on, and failed for another reason.
        """
        try:
            return self._resumed(inputs, exchange, peers, message)
        finally:
            if self.compiled.queues is not None:
                self.compiled.executable.let_go()

    def _resumed(
        self,
        inputs: Sequence[torch.Tensor],
        exchange: ExchangeParts | None,
        peers: Peers | None,
        message: str,
    ) -> list[torch.Tensor]:
        executable, host_code = self.compiled.executable, self.compiled.host_code
        while True:
            verdict, saved = self._verdict(inputs, message)
            if self._watching.then is None:
                where = f"\n  capsule:    {saved}" if saved else ""
                raise BadNumberError(f"{verdict}{where}", verdict) from None
            skip = self._skips(verdict, peers)
            try:
                return executable.resume(inputs, skip, host_code, exchange)
            except _native.BadNumber as error:
                message = str(error)

    def _skips(self, verdict: Verdict, peers: Peers | None) -> bool:
        """Ask the user whether to leave the iteration out; one of all processes is enough."""
        assert self._watching.then is not None
        try:
            skip = self._watching.then(verdict) is True
        except BaseException:
            if peers is not None:
                peers.close()  # so that the others do not wait
            raise
        if peers is None:
            return skip
        wishes = peers.gather(torch.tensor([float(skip)]), "Options.watch: what `then` returned")
        return bool(wishes.any())

    def _verdict(self, inputs: Sequence[torch.Tensor], message: str) -> tuple[Verdict, Path | None]:
        """Return the verdict about the run that has just failed, and the file of the iteration."""
        with _native.translated_errors():
            iteration = iteration_of_failed_run(self.compiled, inputs)
        if self._replayer is None:
            self._replayer = Replayer(
                iteration.program,
                iteration.run,
                training=iteration.training,
                shared=iteration.shared,
                host_code=self.compiled.host_code,
            )
        try:
            verdict = self._replayer.verdict(iteration)
        except Error as error:
            problem = f"the iteration cannot be repeated ({error.message})"
            verdict = unknown_verdict(iteration.number, problem)
        if verdict.source == "unknown" and iteration.run.num_processes > 1:
            verdict = dataclasses.replace(
                verdict,
                source="process",
                rule="it came in with the gradients of another process, whose own verdict says "
                "where it was made",
                note=f"this is process {iteration.run.process} of {iteration.run.num_processes}",
            )
        elif verdict.source == "unknown":
            verdict = dataclasses.replace(verdict, note=f"the check says: {message}")
        return verdict, self._save(iteration, verdict)

    def _save(self, iteration: Iteration, verdict: Verdict) -> Path | None:
        if self._watching.capsule is None or verdict.source == "process":
            return None
        foreign = foreign_operators(iteration.program.graph)
        if foreign:
            logs.python.warning(
                "Options.watch: no capsule is written, since the program calls %s, and a file "
                "cannot hold that code.",
                ", ".join(foreign),
            )
            return None
        path = Path(self._watching.capsule)
        if path.suffix != _SUFFIX:
            path = path / f"{self._name}_{iteration.number}{_SUFFIX}"
        if iteration.run.num_processes > 1:
            path = path.with_stem(f"{path.stem}_process{iteration.run.process}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_capsule(path, Capsule(iteration, str(verdict)))
        except (Error, OSError) as error:
            problem = error.message if isinstance(error, Error) else error
            logs.python.warning("Options.watch: the capsule is not written: %s", problem)
            return None
        return path
