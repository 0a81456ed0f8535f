"""The command ``popsim names``: lists the tensors of a model in a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NoReturn

import torch
from torch import nn

from popsim_torch.dtypes import dtype_name
from popsim_torch.errors import Error, NoLossError, closest_names, listed_names
from popsim_torch.executor.tensor_details import TensorTable
from popsim_torch.model import PoplarExecutor, inferenceModel, trainingModel
from popsim_torch.runner import CannotStart, import_file
from popsim_torch.tables import terminal_width
from popsim_torch.tensors import TensorInfo

__all__ = ["WrongArguments", "run"]

_ANY_WIDTH = 10**6
_RETURNS = "(model, inputs), (model, inputs, optimizer), or (executor, inputs)"


class WrongArguments(Exception):
    """The command line is wrong; the message says how."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WrongArguments(f"names: {message}")


def run(arguments: list[str]) -> None:
    """Print the tensors of a model.

    Args:
        arguments: The command line after ``popsim names``.

    Raises:
        WrongArguments: The command line is wrong.
        CannotStart: The file or its function is missing, or the function returns something else
            than a model with inputs, or the model cannot be compiled, or has no such tensor.
        BaseException: The exception of the file or of its function.
    """
    parser = _Parser(add_help=False)
    parser.add_argument("target")
    parser.add_argument("--select", action="append")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    path, colon, name = given.target.rpartition(":")
    if not colon or not path or not name:
        raise WrongArguments(f"names: need file.py:function, got {given.target}")
    made = _called(path, name)
    patterns: list[str] = given.select or ["*"]
    try:
        executor = _compiled(f"{path}:{name}", made)
        found = executor.names(patterns if len(patterns) > 1 else patterns[0])
    except Error as error:
        raise CannotStart(error.message) from error
    if given.json:
        lines = ",\n ".join(json.dumps(_as_json(one)) for one in found)
        print(f"[{lines}]")
        return
    print(found.tree(terminal_width() or _ANY_WIDTH))
    print(f"\n{_total(found)}")


def _called(path: str, name: str) -> Any:
    """Return what a function of a file returns."""
    module = import_file(path)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        near = closest_names(name, own) or own
        hint = f" It has {listed_names(near)}." if near else ""
        raise CannotStart(f"{path} has no function '{name}'.{hint}")
    return function()


def _compiled(target: str, made: Any) -> PoplarExecutor[..., Any]:
    """Return a compiled executor for what the function of the user has returned."""
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise CannotStart(
            f"{target} returned an object of type {type(made).__name__}. Return {_RETURNS}."
        )
    model, inputs, *rest = made
    if isinstance(model, PoplarExecutor) and not rest:
        return _compile(model, inputs)
    if not isinstance(model, nn.Module):
        raise CannotStart(
            f"{target} returned a tuple that begins with a {type(model).__name__}. "
            f"Return {_RETURNS}."
        )
    if rest:
        (optimizer,) = rest
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise CannotStart(
                f"{target} returned a {type(optimizer).__name__} as the optimizer. "
                f"Return {_RETURNS}."
            )
        return _compile(trainingModel(model, optimizer=optimizer), inputs)
    if any(one.requires_grad for one in model.parameters()):
        try:
            return _compile(trainingModel(model), inputs)
        except NoLossError:
            model.destroy()  # type: ignore[operator]  # (wrapping has added the method)
    return _compile(inferenceModel(model), inputs)


def _compile(executor: PoplarExecutor[..., Any], inputs: Any) -> PoplarExecutor[..., Any]:
    if executor.isCompiled():
        return executor
    if isinstance(inputs, Mapping):
        executor.compile(**inputs)
    elif isinstance(inputs, (tuple, list)):
        executor.compile(*inputs)
    else:
        executor.compile(inputs)
    return executor


def _as_json(one: TensorInfo) -> dict[str, Any]:
    dtype = None if one.dtype is None else dtype_name(one.dtype)
    return {**asdict(one), "dtype": dtype, "bytes": one.bytes}


def _total(tensors: TensorTable) -> str:
    size = sum(one.bytes or 0 for one in tensors)
    without = sum(one.bytes is None for one in tensors)
    rest = f"; {without:,} more are computed only if they are anchored" if without else ""
    return f"{len(tensors) - without:,} tensors, {size:,} bytes{rest}."
