"""``poptorch.load``: an executor out of a file."""

from __future__ import annotations

import os
from collections.abc import Callable

from popsim_torch.executor.executor import PoplarExecutor
from popsim_torch.files.container import BadFileError
from popsim_torch.files.executable import ExecutableFile
from popsim_torch.files.settings import attach_when_loaded
from popsim_torch.options import Options
from popsim_torch.options.limits import check_limits

__all__ = ["load"]


def load(
    filename: str | os.PathLike[str], edit_opts_fn: Callable[[Options], object] | None = None
) -> PoplarExecutor:
    """Return the compiled executor that a file was written from, to go on where it was.

    Weights, optimizer with its state, and random numbers are those of the executor that was saved,
    so training goes on as if it had not been interrupted; the program is fitted to this machine.

    Nothing of a file is run, so the class of the model does not come back: the ``model`` of the
    executor has its sub-modules, parameters and buffers under their names, and no ``forward``. It
    can be trained, evaluated, saved and read (``state_dict()``), but not compiled again. For your
    own class, wrap it and call ``loadExecutable(filename)``, or give it the weights:
    ``model.load_state_dict(poptorch.load(filename).state_dict())``.

    Two models that are loaded have nothing to do with each other. To validate what is trained,
    wrap the one in the other: ``inference = poptorch.inferenceModel(training)``, then
    ``inference.loadExecutable(filename)``.

    Args:
        filename: What ``save`` or ``compileAndExport`` wrote.
        edit_opts_fn: Is given the options, which it may change, before they are used. Only those
            count that are not part of the program, such as ``showCompilationProgressBar`` or
            ``connectionType``; one that was ``Never`` has become ``Always`` by then, and a machine
            to compile for has been taken out. Which process of how many this one is says the
            environment: ``lambda options: options.Distributed.disable()`` lets each work by itself.

    Raises:
        UsageAssertionError: Another version of the package wrote the file, or it was written with
            ``export_model=False``.
        Error: A launcher has started several processes. It is damaged, or no such file; calls take
            or return what a file cannot hold; or its program calls an operator that no file may
            call by itself, such as one of your own.
    """
    file = ExecutableFile(filename)
    model = file.model()
    program = file.program()
    if (program.plan is None) != (model.optimizer is None):
        raise BadFileError(filename, "its program and its optimizer do not belong together.")
    options = model.options
    attach_when_loaded(options)
    options.Distributed._take_launched()
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    check_limits(options)
    executor = PoplarExecutor(model.module, options, model.optimizer)
    executor._files.restore(filename, program, model)
    return executor
