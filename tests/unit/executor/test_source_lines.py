"""The lines of code that a program's ops come from, and ``Options.sourceLocationExcludes``."""

import textwrap

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

LIBRARY = "/somewhere/site-packages/library/model.py"
OTHER = "/elsewhere/other.py"


def library_module(path):
    """Return a module whose forward is in a file with that path."""
    source = textwrap.dedent(
        """
        def forward(self, x):
            return self.fc(x)
        """
    )
    names = {}
    exec(compile(source, path, "exec"), names)
    net = type("Net", (nn.Module,), {"forward": names["forward"]})()
    net.fc = nn.Linear(2, 2)
    return net


def sources(path, options):
    model = poptorch.inferenceModel(library_module(path), options)
    model.compile(torch.ones(1, 2))
    ops = [op for op in model.compiled.program.graph.ops if op.origin.source]
    return {op.origin.source.rpartition(":")[0] for op in ops}


@pytest.mark.parametrize(
    ("path", "choose", "expected"),
    [
        (LIBRARY, lambda options: options, __file__),
        (OTHER, lambda options: options, OTHER),
        (LIBRARY, lambda options: options.sourceLocationExcludes([]), LIBRARY),
        (OTHER, lambda options: options.appendToLocationExcludes("elsewhere"), __file__),
        # There is no other source line.
        (OTHER, lambda options: options.sourceLocationExcludes(["/", "<"]), OTHER),
    ],
)
def test_lines_of_excluded_files_are_not_the_source(path, choose, expected):
    assert sources(path, choose(make_options())) == {expected}
