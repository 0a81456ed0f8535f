"""Changes of host tensors in code that runs only once are reported with their line."""

import numpy as np
import pytest
import torch
from torch import nn

import popsim_torch as poptorch


def told(caplog):
    words = ("changes a tensor of the host once", "changes a copy of a tensor of the host")
    return [text for text in caplog.messages if any(word in text for word in words)]


def in_forward(change):
    class Model(nn.Module):
        def forward(self, x):
            return x + change(x).sum() * 0

    poptorch.inferenceModel(Model())(torch.ones(2))


def in_a_body(change):
    poptorch.function(
        lambda: poptorch.repeat(2, lambda x: x + change(x).sum() * 0, torch.ones(2))
    )()


def in_an_inner_body(change):
    def body(x):
        return poptorch.for_loop(2, lambda x: [x + change(x).sum() * 0], [x])[0]

    poptorch.function(lambda: poptorch.repeat(2, body, torch.ones(2)))()


def added(x):
    kept = COUNTERS[0]
    kept += 1
    return kept


def used_and_replaced(x):
    result = x + COUNTERS[0]
    COUNTERS[0].copy_(result)
    COUNTERS[0].mul_(2)
    return result


def used_and_replaced_on_the_host(x):
    result = x + COUNTERS[0]
    COUNTERS[0].fill_(COUNTERS[0][0].item() + 1)
    return result


def reset_after_a_read(x):
    if COUNTERS[0].max() >= 0:
        COUNTERS[0][0] = COUNTERS[0][0].item() + 1
    return x


def other_data_after_a_read(x):
    result = x + COUNTERS[0]
    COUNTERS[0].data = COUNTERS[0] + 1
    return result


def set_item(x):
    COUNTERS[0][0] = 3
    COUNTERS[0][1:] = x.sum()
    return COUNTERS[0][1:]


def zeroed_in_part(x):
    COUNTERS[0][0].zero_()
    return COUNTERS[0].add_(1)


COUNTERS = [torch.zeros(2)]
EXPONENTS = torch.zeros(2, dtype=torch.int32)
LOST = {
    "method": lambda x: COUNTERS[0].add_(1),
    "operator": added,
    "part": lambda x: COUNTERS[0][0].mul_(2),
    "data": lambda x: COUNTERS[0].data.sub_(1),
    "out": lambda x: torch.add(COUNTERS[0], 1, out=COUNTERS[0]),
    "of the device": lambda x: COUNTERS[0].add_(x.sum()),
    "overwritten": lambda x: COUNTERS[0].copy_(x),
    "overwritten by out": lambda x: torch.mul(x.detach(), 2, out=COUNTERS[0]),
    "overwritten by several": lambda x: torch.frexp(x.detach(), out=(COUNTERS[0], EXPONENTS))[0],
    "random numbers": lambda x: COUNTERS[0].normal_().mul_(2).add_(1),
    "used, then overwritten": used_and_replaced,
    "used, then overwritten on the host": used_and_replaced_on_the_host,
    "read, then set": reset_after_a_read,
    "by an operator": lambda x: torch.ops.aten.copy_.default(COUNTERS[0], x),
    "by torch.nn.init": lambda x: nn.init.normal_(COUNTERS[0]),
    "read, then other data": other_data_after_a_read,
    "set": set_item,
    "partly zeroed": zeroed_in_part,
}


@pytest.mark.parametrize("run", [in_forward, in_a_body, in_an_inner_body])
@pytest.mark.parametrize("change", LOST.values(), ids=LOST)
def test_a_change_that_is_lost_is_told_once_with_its_line(run, change, caplog):
    run(change)
    (text,) = told(caplog)
    assert f"() at {__file__}:" in text
    assert "Make the tensor a buffer" in text


def test_an_argument_of_the_function_that_the_body_adds_to_is_told(caplog):
    @poptorch.function
    def run(x, total):
        def body(x):
            total.add_(x)
            return x + total

        return poptorch.repeat(2, body, x)

    assert run(torch.ones(()), torch.zeros(())).item() == 4  # each iteration starts from 0
    (text,) = told(caplog)
    assert "begins with a new copy" in text


def made(x):
    table = torch.zeros(4, device="cpu")
    table += 1
    for row in table.view(2, 2):
        row.mul_(2)
    table[1:].add_(1)
    return table


def made_of_others(x):
    table = COUNTERS[0].clone()
    table += COUNTERS[0]
    table.data.div_(2)
    return table.neg_()


def overwritten(x):
    COUNTERS[0].zero_()
    COUNTERS[0] += 1
    return COUNTERS[0] * x.sum()


def made_and_overwritten(x):
    table = torch.zeros(2, device="cpu") + COUNTERS[0]
    table.copy_(x)
    torch.add(table, x, out=table)
    return table


def read_and_set_to_the_same(x):
    COUNTERS[0].fill_(2)
    result = x + COUNTERS[0]
    COUNTERS[0].fill_(2)
    COUNTERS[0][1] = 2
    return result


KEPT = {
    "made": made,
    "made of others": made_of_others,
    "made by NumPy": lambda x: torch.from_numpy(np.ones(3, np.float32)).add_(1),
    "made of numbers": lambda x: torch.Tensor([1.0, 2.0]).add_(1),
    "made by a legacy constructor": lambda x: torch.FloatTensor(3).fill_(1).add_(1),
    "overwritten": overwritten,
    "made, then overwritten": made_and_overwritten,
    "set": lambda x: COUNTERS[0].__setitem__(0, 3) or COUNTERS[0],
    "set to the same": read_and_set_to_the_same,
    "an operand": lambda x: x.clone().add_(COUNTERS[0]),
}


@pytest.mark.parametrize("run", [in_forward, in_a_body])
@pytest.mark.parametrize("change", KEPT.values(), ids=KEPT)
def test_what_is_made_or_overwritten_there_is_changed_in_silence(run, change, caplog):
    run(change)
    assert told(caplog) == []


def test_buffers_parameters_and_carried_values_are_changed_in_silence(caplog):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            self.count += 1
            with torch.no_grad():
                self.weight.mul_(0.5)
            return x.add_(self.count)

    model = Counts()

    @poptorch.function
    def run():
        return poptorch.repeat(3, lambda x: model(x.mul_(1)), torch.zeros(()))

    assert run().item() == 6
    assert (model.count.item(), model.weight.item()) == (3, 0.125)
    poptorch.inferenceModel(Counts())(torch.ones(1))
    assert told(caplog) == []


def test_outside_of_loops_changes_happen_in_each_call_and_nothing_is_told(caplog):
    count = torch.zeros(())

    @poptorch.function
    def run(x):
        count.add_(1)
        return poptorch.repeat(1, lambda x: x + count, x)

    assert [run(torch.zeros(())).item() for _ in range(3)] == [1, 2, 3]
    assert told(caplog) == []


class Scratch(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = torch.zeros(2)

    def forward(self, x):
        torch.add(x, 1, out=self.memory)
        self.memory[0] = x[1]
        return self.memory * 2


def test_scratch_memory_has_the_values_of_eager_pytorch_in_forward_alone(caplog):
    scratch, eager = Scratch(), Scratch()
    model = poptorch.inferenceModel(scratch)
    for x in torch.tensor([[1.0, 2.0], [3.0, 4.0]]):
        assert torch.equal(model(x), eager(x))
    assert torch.equal(scratch.memory, torch.zeros(2))
    (text,) = told(caplog)
    assert "the tensor itself does not change" in text


def test_data_of_the_device_in_a_tensor_of_the_host_are_refused():
    class Model(Scratch):
        def forward(self, x):
            self.memory.data = x * 1
            return self.memory + x

    model = poptorch.inferenceModel(Model())
    with pytest.raises(poptorch.Error, match=rf"{__file__}.* data of the device .*register_buffer"):
        model(torch.ones(2))
