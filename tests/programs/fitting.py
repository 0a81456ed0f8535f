"""Trains, measures and uses a classifier by three calls, with callbacks that look on."""

import poptorch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATION = 4


class Watcher:
    """Keeps what it is told."""

    def __init__(self):
        self.steps, self.epochs = [], []

    def on_batch_end(self, step, logs):
        self.steps.append((step, float(logs["loss"])))

    def on_epoch_end(self, epoch, logs):
        self.epochs.append((epoch, logs["loss"]))


def make_data():
    torch.manual_seed(0)
    points = torch.randn(512, 2)
    return TensorDataset(points, (points.prod(dim=1) > 0).long())


def make_options():
    options = poptorch.Options()
    poptorch.set_pipelining_options(options, gradient_accumulation_steps_per_replica=ACCUMULATION)
    return options


def main():
    data = make_data()
    loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    poptorch.set_pipeline_stage_assignment(model, [0, 0, 1])
    queue = poptorch.MaybeOutfeedQueue(filters=["weight"])
    optimizer = poptorch.OutfeedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), queue, model=model
    )
    watcher = Watcher()
    loss = nn.CrossEntropyLoss()
    settings = {"loss": loss, "optimizer": optimizer, "options": make_options()}
    history = poptorch.fit(
        model,
        loader,
        epochs=5,
        steps_per_epoch=32,
        steps_per_execution=16,
        callbacks=[watcher, poptorch.OutfeedCallback(queue, name="Gradients callback")],
        metrics=["accuracy"],
        **settings,
    )
    print("epochs", len(history), "improved", history["loss"][-1] < 0.7 * history["loss"][0])
    print("steps", [step for step, _ in watcher.steps] == list(range(32)) * 5)
    live = torch.tensor([value for _, value in watcher.steps]).reshape(5, 32)
    kept = torch.stack([values for _, values in watcher.epochs])
    print("told the same", torch.equal(live, kept))

    test = DataLoader(data, batch_size=16)
    measured = poptorch.evaluate(model, test, loss=loss, metrics=["accuracy"], verbose=0)
    logits = poptorch.predict(model, test)
    points, labels = data.tensors
    print("predicted", tuple(logits.shape), torch.allclose(logits, model(points), atol=1e-5))
    right = (logits.argmax(dim=1) == labels).float().mean()
    print("accuracy agrees", abs(measured["accuracy"] - right.item()) < 1e-6)
    print("loss agrees", abs(measured["loss"] - loss(logits, labels).item()) < 1e-5)

    try:
        poptorch.fit(model, loader, steps_per_epoch=32, steps_per_execution=6, **settings)
    except ValueError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
