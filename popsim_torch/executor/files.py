"""The executor's methods that write and read files."""

from __future__ import annotations

import os
from typing import Any

from popsim_torch.errors import Error
from popsim_torch.executor import saving
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.life_cycle import LifeCycle
from popsim_torch.executor.optimizer_use import OptimizerUse
from popsim_torch.executor.random_state import RandomState
from popsim_torch.files.executable import (
    ExecutableFile,
    StoredModel,
    StoredProgram,
    pack_executable,
    write_executable,
)
from popsim_torch.files.module import LoadedModule

__all__ = ["Files"]


class Files:
    """The part of an executor that saves and loads files.

    Args:
        device: The executor's program.
        life: Compiles the program, and takes it to the device.
        use: The part that holds the executor's optimizer.
        random: The part that holds the executor's random numbers.
    """

    def __init__(
        self, device: DeviceProgram, life: LifeCycle, use: OptimizerUse, random: RandomState
    ) -> None:
        self._device = device
        self._life = life
        self._use = use
        self._random = random

    def save(
        self,
        filename: str | os.PathLike[str],
        export_model: bool = True,
        save_rng_state: bool = True,
    ) -> None:
        """Write the compiled model to a file for ``poptorch.load`` and ``loadExecutable``.

        The file holds the program before it was fitted to this machine, the options, and the
        description of the arguments and results of a call. With ``export_model`` it also holds the
        present weights of the device, and the optimizer with its state. The file holds only data:
        no code of the model, and nothing that runs when the file is read. The method writes a
        temporary file and renames it, so an existing file stays whole if anything fails.

        Args:
            filename: The file; missing folders are created. If the path is a folder, the file in it
                is ``model.poptorch``, and there is a warning.
            export_model: Whether ``poptorch.load`` can read the file. It refuses programs that call
                an operator that is not PyTorch's, or a PyTorch operator that is not safe with wrong
                numbers; a warning names the operator. ``loadExecutable`` reads such programs.
            save_rng_state: Whether the loaded model continues with the random numbers of this one.

        Raises:
            Error: The model is not compiled, or the file cannot be written, or the options or the
                optimizer hold more than data.
        """
        device = self._device
        compiled = device.require_compiled("save")
        path = saving.target_file(filename)
        device.weights.let_trainers_catch_up()
        device.weights.fetch()
        self._random.log(leaving=True)
        state = device.state
        assert state is not None
        sections = pack_executable(
            compiled.program,
            compiled.run,
            state.plan,
            compiled.arguments,
            compiled.outputs,
            device.options,
            self._random.rng_state if save_rng_state else None,
        )
        if export_model:
            saving.warn_of_operators(compiled.program)
            states = state.read_all_states()
            optimizer, settings = self._use.optimizer, self._use.settings
            sections |= saving.pack_model(device.module, optimizer, settings, states)
        with device.channel.tracepoint("saveExecutableToFile"):
            write_executable(path, sections)

    def compileAndExport(
        self,
        /,
        filename: str | os.PathLike[str],
        *args: Any,
        export_model: bool = True,
        **kwargs: Any,
    ) -> None:
        """Compile the model for arguments like these, and save it.

        Args:
            filename: See ``save``.
            *args: See ``compile``.
            export_model: See ``save``.
            **kwargs: See ``compile``.

        Raises:
            Error: See ``compile`` and ``save``.
        """
        channel = self._device.channel
        with channel.tracepoint("compileAndExport"):
            with channel.tracepoint("compile"):
                self._life.compile(*args, **kwargs)
            self.save(filename, export_model=export_model)

    def loadExecutable(self, filename: str | os.PathLike[str]) -> None:
        """Compile the model from a file instead of from arguments.

        The model is traced with arguments like those of the file, and the resulting program must
        equal the program of the file: so a file cannot run anything that the model does not do.
        The weights are those of the model. A model from ``poptorch.load`` has no code to trace: it
        uses the program of the file if the names and shapes of the weights match.

        Args:
            filename: A file that ``save`` or ``compileAndExport`` wrote, with or without the model.

        Raises:
            Error: The model is compiled already; or the file is damaged, is from another version of
                the package, or holds the program of another model. The executor can still be
                called.
        """
        if self._device.compiled is not None:
            raise Error(
                "loadExecutable: the model is compiled already. Call destroy() on the executor "
                "first, or load the file instead of compiling."
            )
        with self._device.channel.tracepoint("loadExecutable"):
            self._load(ExecutableFile(filename))

    def _load(self, file: ExecutableFile) -> None:
        device, settings = self._device, self._use.settings
        if isinstance(device.module, LoadedModule):
            if self._use.captures:
                raise Error(
                    "loadExecutable: the program of a file enqueues no gradients, and this model "
                    "has no code to compile another program from. Pass the optimizer without its "
                    "OutfeedOptimizer."
                )
            self._life.check_before_compilation()
            self._life.take(
                saving.program_of_file(file, device.module, device.options, settings, device.warned)
            )
            return
        call = file.call()
        compiled = self._life.compile_model(call.args, call.kwargs)
        saving.check_same_program(file, compiled.program)
        self._life.take(compiled)

    def restore(
        self, path: str | os.PathLike[str], program: StoredProgram, model: StoredModel
    ) -> None:
        """Continue where the executor that wrote a file was."""
        self._use.settings = model.settings
        if model.rng_state is not None:
            self._random.start = model.rng_state
        device = self._device
        self._life.take(saving.build_stored(path, program, device.options, device.warned))
        state = device.state
        if state is not None and state.plan is not None:
            state.write_state(model.states)
