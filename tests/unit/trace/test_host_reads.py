"""Values that forward reads from the host while it is traced are reported with a line."""

import random
import time

import numpy as np
import pytest
import torch

import popsim_torch as poptorch

READS = {
    "time.time": time.time,
    "time.perf_counter": lambda: time.perf_counter(),
    "random.random": lambda: random.random(),
    "random.choice": lambda: random.choice([1.0, 2.0]),
    "numpy.random.rand": lambda: float(np.random.rand()),
    "torch.rand": lambda: torch.rand(1, device="cpu").item(),
}


@pytest.mark.parametrize("name", [name for name in READS if name != "time.time"])
def test_in_the_body_of_a_loop(name, caplog):
    read = READS[name]

    @poptorch.function
    def run():
        return poptorch.repeat(2, lambda x: x + read() * 0, 1.0)

    assert run().item() == 1
    told = [text for text in caplog.messages if f"{name}() at " in text]
    assert len(told) == 1
    assert f"{__file__}:" in told[0]
    assert "is called once, while the program is recorded" in told[0]


def test_outside_of_loops(caplog):
    @poptorch.function
    def run(x):
        begin = time.perf_counter()
        result = poptorch.repeat(2, lambda x: x + 1, x)
        return result + random.random() * 0, begin

    for _ in range(2):
        assert run(torch.ones(()))[0].item() == 3
    told = [text for text in caplog.messages if "is called once" in text]
    assert [text.partition("(")[0] for text in told] == ["time.perf_counter", "random.random"]


def test_in_forward_each_line_once(caplog):
    class Noisy(torch.nn.Module):
        def forward(self, x):
            for _ in range(3):
                x = x + 0 * time.time()
            with open(__file__, encoding="utf-8") as file:
                return x * len(file.read(1))

    assert poptorch.inferenceModel(Noisy())(torch.ones(2)).tolist() == [1, 1]
    told = [text for text in caplog.messages if "is called once" in text]
    assert [text.partition("(")[0] for text in told] == ["time.time", "open"]


def test_nothing_is_said_outside_of_a_trace_or_of_numbers_of_the_device(caplog):
    poptorch.inferenceModel(torch.nn.Dropout())(torch.ones(2))
    assert time.time() > 0
    assert random.random() < 1

    @poptorch.function
    def run():
        return poptorch.repeat(2, lambda x: x + torch.rand(1)[0], 0.0)

    run()
    assert not [text for text in caplog.messages if "is called once" in text]
