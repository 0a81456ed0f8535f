"""What replicas give to the host: prints, elements of queues, calls; and loops that feed them."""

import threading

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.parity.replicas import GA, OPTIMIZERS, Model, close, data, options_of

pytestmark = pytest.mark.filterwarnings("ignore")


class Queued(nn.Module):
    """Puts its input into a queue."""

    def __init__(self, queue):
        super().__init__()
        self.queue = queue

    def forward(self, x):
        self.queue.enqueue({"twice": 2 * x, "sum": x.sum()})
        return x


def losses_of_a_loop(model, replicas, elements):
    """Train in a loop that takes all elements; return the elements of its queue."""
    infeed, outfeed = poptorch.InfeedQueue(elements), poptorch.OutfeedQueue()
    optimizer = OPTIMIZERS["sgd"](model)

    def body(x, y):
        _, loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outfeed.enqueue(loss)

    @poptorch.function(options=options_of(replicas, GA * 2 // replicas))
    def run():
        poptorch.repeat(len(elements) // replicas, body, infeed=infeed)

    run()
    found = outfeed.dequeue()
    run.destroy()
    return found


class Logits(nn.Module):
    """The layers of a model, without its loss."""

    def __init__(self, model):
        super().__init__()
        self.layers = model.layers

    def forward(self, x):
        return self.layers(x)


def test_prints_name_the_replica(capfd):
    class Prints(nn.Module):
        def forward(self, x):
            return poptorch.ipu_print_tensor(x, "x")

    inference = poptorch.inferenceModel(Prints(), options_of(2, 1, 2))
    inference(torch.arange(4.0))
    printed = capfd.readouterr().err
    titles = [line.partition(":")[0] for line in printed.splitlines()[::2]]
    assert titles == ["x_replica_0", "x_replica_1"] * 2
    assert printed.splitlines()[1::2] == [""] * 4


@pytest.mark.parametrize("replication_factor", [1, 2])
def test_elements_of_queues_have_all_replicas(replication_factor):
    queue = poptorch.OutfeedQueue(replication_factor=replication_factor)
    inference = poptorch.inferenceModel(Queued(queue), options_of(2, 1, 3))
    x = torch.randn(3 * 2 * 4, 5)
    inference(x)
    elements, rows = queue.dequeue(), x.reshape(3, 2, 4, 5)
    assert torch.equal(elements["twice"], 2 * rows)
    torch.testing.assert_close(elements["sum"], rows.sum((2, 3)))


def test_a_queue_for_another_number_of_replicas():
    queue = poptorch.OutfeedQueue(replication_factor=3)
    inference = poptorch.inferenceModel(Queued(queue), options_of(2, 1, 3))
    with pytest.raises(poptorch.Error, match=r"replication_factor=3.*has 2 replicas"):
        inference(torch.randn(3 * 2 * 4, 5))


def test_a_loop_in_a_model_cannot_enqueue():
    queue = poptorch.OutfeedQueue()

    class Loops(nn.Module):
        def forward(self, x):
            def body(y):
                queue.enqueue(y)
                return y + 1

            return poptorch.for_loop(3, body, [x])[0]

    inference = poptorch.inferenceModel(Loops(), options_of(2, 1, 3))
    with pytest.raises(poptorch.Error, match=r"in a loop or branch.*replicationFactor\(2\)"):
        inference(torch.randn(3 * 2 * 4, 5))


def test_code_of_the_host_runs_for_each_replica_in_turn():
    called = []

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.negate = poptorch.CPU(self.on_host, "negate")

        def on_host(self, x):
            called.append((threading.current_thread(), x.clone()))
            return -x

        def forward(self, x):
            return self.negate(x)

    x = torch.randn(3 * 2 * 4, 5)
    assert torch.equal(poptorch.inferenceModel(Calls(), options_of(2, 1, 3))(x), -x)
    threads, values = zip(*called[-6:], strict=True)
    assert set(threads) == {threading.current_thread()}
    assert torch.equal(torch.cat(values), x)


def test_a_loop_gives_each_replica_elements_of_its_own():
    model, twin = Model(), Model()
    rows = data(2 * 3 * GA * 2, calls=1)[0]
    elements = list(zip(*(one.split(2) for one in rows), strict=True))
    two, one = losses_of_a_loop(model, 2, elements), losses_of_a_loop(twin, 1, elements)
    assert two.shape == (3 * GA, 2)
    torch.testing.assert_close(two.flatten(), one, rtol=2e-4, atol=1e-5)
    close(dict(model.state_dict()), dict(twin.state_dict()), rtol=2e-4, atol=1e-5)


def test_loops_that_carry_values_have_one_replica():
    @poptorch.function(options=options_of(2, 1))
    def run():
        return poptorch.repeat(2, lambda x: x + 1, torch.zeros(2))

    with pytest.raises(poptorch.Error, match=r"repeat.*replicationFactor\(2\).*carries values"):
        run()


def test_fit_trains_replicas_as_more_accumulation():
    found = {}
    dataset = torch.utils.data.TensorDataset(*data(2 * GA * 2 * 3, calls=1)[0])
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    for replicas in (1, 2):
        model, options = Model(), options_of(replicas, GA * 2 // replicas, 1)
        history = poptorch.fit(
            Logits(model),
            loader,
            epochs=2,
            loss=nn.functional.cross_entropy,
            optimizer=OPTIMIZERS["sgd"](model),
            options=options,
            validation_data=loader,
            verbose=0,
        )
        found[replicas] = history["loss"], {n: v.clone() for n, v in model.state_dict().items()}
    torch.testing.assert_close(found[2][0], found[1][0], rtol=2e-4, atol=1e-5)
    close(found[2][1], found[1][1], rtol=2e-4, atol=1e-5)
