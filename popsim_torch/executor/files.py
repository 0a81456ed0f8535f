"""The executor's methods that write files and read them."""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Any

from popsim_torch.errors import Error
from popsim_torch.executor import saving
from popsim_torch.executor.compile import CompiledModel
from popsim_torch.executor.random_state import RandomState
from popsim_torch.executor.weight_copies import WeightCopies
from popsim_torch.files.executable import (
    ExecutableFile,
    StoredModel,
    StoredProgram,
    pack_executable,
    write_executable,
)
from popsim_torch.files.module import LoadedModule

__all__ = ["Files"]


class Files(WeightCopies, RandomState):
    """The part of an executor that saves and loads."""

    _rng_start: list[int]
    _warned: set[str]

    @abstractmethod
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model."""

    @abstractmethod
    def _check_before_compilation(self) -> None: ...

    @abstractmethod
    def _compile_model(self, args: Any, kwargs: Any) -> CompiledModel: ...

    @abstractmethod
    def _take(self, compiled: CompiledModel) -> CompiledModel: ...

    def save(
        self,
        filename: str | os.PathLike[str],
        export_model: bool = True,
        save_rng_state: bool = True,
    ) -> None:
        """Write the compiled model to a file that ``poptorch.load`` and ``loadExecutable`` read.

        The file holds the program before it was fitted to this machine, the options, and what
        calls look like; with ``export_model`` also the weights, as they are on the device now, and
        the optimizer with its state. It holds data alone: not the code of the model, and nothing
        that runs when it is read. It is written under another name first, so whatever happens
        meanwhile, a file that was there stays whole.

        Args:
            filename: The file; folders on the way to it are made. One that is a folder gets the
                file ``model.poptorch``, with a warning.
            export_model: Whether ``poptorch.load`` is to read it. It refuses programs that call an
                operator that is not PyTorch's, or one that PyTorch gives no protection from wrong
                numbers; a warning says which. ``loadExecutable`` reads them.
            save_rng_state: Whether the loaded model goes on with this one's random numbers.

        Raises:
            Error: The model is not compiled, or the file cannot be written, or options or
                optimizer hold more than data.
        """
        compiled = self._require_compiled("save")
        path = saving.target_file(filename)
        self._weights.let_trainers_catch_up()
        self.copyWeightsToHostIfNeeded()
        self._log_random_state(leaving=True)
        state = self._state
        assert state is not None
        sections = pack_executable(
            compiled.program,
            compiled.run,
            state.plan,
            compiled.arguments,
            compiled.outputs,
            self._options,
            self.rng_state if save_rng_state else None,
        )
        if export_model:
            saving.warn_of_operators(compiled.program)
            states = state.read_all_states()
            model, optimizer, settings = self._traced_model, self._optimizer, self._settings
            sections |= saving.pack_model(model, optimizer, settings, states)
        with self._channel.tracepoint("saveExecutableToFile"):
            write_executable(path, sections)

    def compileAndExport(
        self,
        filename: str | os.PathLike[str],
        *args: Any,
        export_model: bool = True,
        **kwargs: Any,
    ) -> None:
        """Compile the model for arguments like these, and save it.

        Args:
            filename: As for ``save``.
            *args: As for ``compile``.
            export_model: As for ``save``.
            **kwargs: As for ``compile``.

        Raises:
            Error: As for ``compile`` and ``save``.
        """
        with self._channel.tracepoint("compileAndExport"):
            self.compile(*args, **kwargs)
            self.save(filename, export_model=export_model)

    def loadExecutable(self, filename: str | os.PathLike[str]) -> None:
        """Compile the model as a file says, instead of with arguments.

        The model is traced with arguments like those that the file was made with, and what comes
        out must be the program of the file: so the file can do nothing that the model does not.
        The weights are the model's own. A model that comes from ``poptorch.load`` has no code to
        trace: it gets the file's program, if its weights have the names and shapes needed.

        Args:
            filename: What ``save`` or ``compileAndExport`` wrote, with or without the model.

        Raises:
            Error: The model is compiled already; or the file is damaged, of another version of the
                package, or of a model that does something else. The executor can be called.
        """
        if self._compiled is not None:
            raise Error(
                "loadExecutable: the model is compiled already. Call destroy() on the executor "
                "first, or load the file instead of compiling."
            )
        with self._channel.tracepoint("loadExecutable"):
            self._load(ExecutableFile(filename))

    def _load(self, file: ExecutableFile) -> None:
        model, settings = self._traced_model, self._settings
        if isinstance(model, LoadedModule):
            if self._captures:
                raise Error(
                    "loadExecutable: the program of a file enqueues no gradients, and this model "
                    "has no code to make another one of. Pass the optimizer without its "
                    "OutfeedOptimizer."
                )
            self._check_before_compilation()
            self._take(saving.program_of_file(file, model, self._options, settings, self._warned))
            return
        call = file.call()
        compiled = self._compile_model(call.args, call.kwargs)
        saving.check_same_program(file, compiled.program)
        self._take(compiled)

    def _restore(
        self, path: str | os.PathLike[str], program: StoredProgram, model: StoredModel
    ) -> None:
        """Go on where the executor that wrote a file was."""
        self._settings = model.settings
        if model.rng_state is not None:
            self._rng_start = model.rng_state
        self._take(saving.build_stored(path, program, self._warned))
        if self._state is not None and self._state.plan is not None:
            self._state.write_state(model.states)
