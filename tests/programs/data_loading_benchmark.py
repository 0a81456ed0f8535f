"""How fast is the data? In the style of PopTorch's tutorial on efficient data loading."""

import time

import poptorch
import torch


class Images(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((3, 8, 8), float(index)), index % 10


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 10)
        )
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, x, labels):
        x = self.layers(x / 1000)
        return x, self.loss(x, labels)


def measure(mode, num_workers, synthetic=False):
    options = poptorch.Options().deviceIterations(5).showCompilationProgressBar(False)
    options.Training.gradientAccumulation(2)
    options.enableSyntheticData(synthetic)
    loader = poptorch.DataLoader(
        options,
        Images(400),
        batch_size=4,
        num_workers=num_workers,
        mode=mode,
        async_options={"early_preload": True} if mode != poptorch.DataLoaderMode.Sync else None,
    )
    model = Classifier()
    training = poptorch.trainingModel(
        model, options, poptorch.optim.SGD(model.parameters(), lr=0.001)
    )
    channel = poptorch.profiling.Channel("benchmark")
    seen = 0
    start = time.perf_counter()
    with channel.tracepoint("epochs"):
        for _ in range(2):
            for images, labels in loader:
                seen += len(images)
                training(images, labels)
    seconds = time.perf_counter() - start
    loader.terminate()
    training.detachFromDevice()
    return seen, seen / seconds


if __name__ == "__main__":
    for mode in poptorch.DataLoaderMode:
        seen, rate = measure(mode, 0 if mode == poptorch.DataLoaderMode.Sync else 2)
        print(f"{mode.name}: {seen} samples, {rate:.0f} per second")
    seen, rate = measure(poptorch.DataLoaderMode.Sync, 0, synthetic=True)
    print(f"synthetic: {seen} samples, {rate:.0f} per second")
