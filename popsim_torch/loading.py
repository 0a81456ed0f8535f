"""``poptorch.load``: makes an executor from a file."""

from __future__ import annotations

import os
from collections.abc import Callable

from popsim_torch.executor.executor import PoplarExecutor
from popsim_torch.files.container import BadFileError
from popsim_torch.files.executable import ExecutableFile
from popsim_torch.files.settings import attach_when_loaded
from popsim_torch.options import Options

__all__ = ["load"]


def load(
    filename: str | os.PathLike[str], edit_opts_fn: Callable[[Options], object] | None = None
) -> PoplarExecutor:
    """Return a compiled executor from a file, in the state in which it was saved.

    Weights, optimizer with its state, and random numbers are those of the saved executor, so
    training continues as if it had not been interrupted. The program is fitted to this machine. No
    code from the file is run, so the class of the model is not restored: the ``model`` of the
    executor has the sub-modules, parameters and buffers under their names, but no ``forward``. It
    can be trained, evaluated, saved and read (``state_dict()``), but not compiled again. To use
    your own class, wrap a model of the class and call ``loadExecutable(filename)``, or load the
    weights into it: ``model.load_state_dict(poptorch.load(filename).state_dict())``.

    Two loaded models share nothing. To validate a loaded training model, wrap it for inference:
    ``inference = poptorch.inferenceModel(training)``, then ``inference.loadExecutable(filename)``.

    Args:
        filename: A file that ``save`` or ``compileAndExport`` wrote.
        edit_opts_fn: Called with the options before they are used, and may change them. Only
            changes of options that are not part of the program take effect, such as
            ``showCompilationProgressBar`` or ``connectionType``. Before the call, a
            ``connectionType`` of ``Never`` is set to ``Always``, and a machine to compile for is
            removed. The environment sets the number of processes and the ID of this one.

    Raises:
        UsageAssertionError: Another version of the package wrote the file, or it was written with
            ``export_model=False``.
        Error: The program was compiled for another number of processes; the file is damaged, or of
            another kind; calls take or return values that a file cannot hold; or the program calls
            an operator that a file may not call, such as one of your own.
    """
    file = ExecutableFile(filename)
    model = file.model()
    program = file.program()
    if (program.plan is None) != (model.optimizer is None):
        raise BadFileError(filename, "its program and its optimizer do not belong together.")
    options = model.options
    attach_when_loaded(options)
    options.Distributed._read_environment()
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    executor = PoplarExecutor(model.module, options, model.optimizer)
    executor._files.restore(filename, program, model)
    return executor
