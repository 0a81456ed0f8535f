"""The operator in docs/own_code.md compiles and computes what the page says."""

import ctypes
import re
import subprocess
from pathlib import Path

import torch

import popsim_torch as poptorch
from tests.custom_ops import library
from tests.options import make_options

PAGE = Path(__file__).parents[3] / "docs" / "own_code.md"


def test_the_example_in_cpp():
    (source,) = re.findall(r"```cpp\n(.*?)```", PAGE.read_text(), re.DOTALL)
    file = library.folder() / "cube_of_the_page.cpp"
    file.write_text(source.replace("com.acme", "com.acme.page"))
    command = ["c++", "-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-Wall", "-Werror"]
    command += ["-I", poptorch.custom_op_include(), str(file), "-o", str(file.with_suffix(".so"))]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    ctypes.cdll.LoadLibrary(str(file.with_suffix(".so")))
    x = torch.randn(3, 4)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(x.clone())

        def forward(self):
            call = ("Cube", "com.acme.page", 1)
            (y,) = poptorch.custom_op([self.weight], *call, [self.weight], {"scale": 2.0})
            return y, poptorch.identity_loss(y, "sum")

    model = Model()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, make_options(), optimizer)
    torch.testing.assert_close(training()[0], 2 * x**3)
    training.copyWeightsToHost()
    torch.testing.assert_close(model.weight.detach(), x - 0.6 * x**2)
