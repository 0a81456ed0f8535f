"""Compiles libraries of custom operators against the header of the package, once per process."""

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

import popsim_torch as poptorch
from tests.options import make_options

HERE = Path(__file__).parent
DOMAIN = "popsim_tests"


@functools.cache
def folder() -> Path:
    """Return a folder that is gone when the process ends."""
    path = Path(tempfile.mkdtemp(prefix="popsim_custom_ops_"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def compiled(source: str, name: str, *flags: str) -> Path:
    """Compile a file of this folder to a library with all warnings on, and return its path."""
    library = folder() / f"{name}.so"
    tool = os.environ.get("CXX", "c++") if source.endswith("cpp") else os.environ.get("CC", "cc")
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    command = [tool, *warnings, "-O1", "-shared", "-fPIC"]
    command += ["-I", poptorch.custom_op_include(), str(HERE / source), "-o", str(library), *flags]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return library


@functools.cache
def loaded() -> Path:
    """Load the library of most tests, and return its path."""
    path = compiled("library.cpp", "library", "-std=c++17")
    ctypes.cdll.LoadLibrary(str(path))
    return path


class OneCall(torch.nn.Module):
    """A call of a custom operator with examples like its first input, or those given."""

    def __init__(self, name, attributes=None, examples=None, domain=DOMAIN, version=1):
        super().__init__()
        self.call = (name, domain, version)
        self.attributes = attributes
        self.examples = examples

    def forward(self, *inputs):
        examples = self.examples or inputs[:1]
        return poptorch.custom_op(inputs, *self.call, examples, attributes=self.attributes)


def run(name, *inputs, attributes=None, examples=None, **place):
    """Return the results of an operator on the device."""
    model = OneCall(name, attributes, examples, **place)
    return poptorch.inferenceModel(model, make_options())(*inputs)
