"""Looking inside, in the style of PopTorch's guide: prints, anchors, names, logs, counters."""

import poptorch
import torch

poptorch.setLogLevel("ERR")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.bert = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
        self.classifier = torch.nn.Linear(8, 2)
        self.loss = torch.nn.NLLLoss()

    def forward(self, x, labels):
        x = poptorch.ipu_print_tensor(self.bert(x), title="hidden")
        with poptorch.NameScope("head"):
            x = torch.log_softmax(self.classifier(x), dim=-1)
        return x, self.loss(x, labels)


def compiled(options):
    model = Model()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5, loss_scaling=2.0)
    return model, poptorch.trainingModel(model, options, optimizer)


def main():
    x, labels = torch.ones(2, 4), torch.tensor([0, 1])
    options = poptorch.Options().showCompilationProgressBar(False)
    _, training = compiled(options)
    training.compile(x, labels)
    names = training.getTensorNames()
    gradients = sorted(name for name in names if name.startswith("Gradient___classifier"))
    print("names", *gradients)
    training.destroy()

    options = poptorch.Options().showCompilationProgressBar(False)
    options.anchorTensor("grad", "Gradient___classifier.weight")
    options.anchorTensor("old", "Gradient___model.classifier.bias", poptorch.OutputMode.All)
    options.anchorTensor("weight", "UpdatedVar___classifier.weight")
    model, training = compiled(options)
    output, _ = training(x, labels)
    reference = Model()
    reference.load_state_dict(Model().state_dict())
    out = torch.log_softmax(reference.classifier(reference.bert(x)), -1)
    torch.nn.functional.nll_loss(out, labels).backward()
    torch.testing.assert_close(
        training.getAnchoredTensor("grad"), 2.0 * reference.classifier.weight.grad
    )
    assert torch.equal(training.getAnchoredTensor("weight"), model.classifier.weight)
    print("old name", tuple(training.getAnchoredTensor("old").shape))
    latency = training.getLatency()
    print("latency", len(latency), min(latency) >= 0)
    print("counters", sorted(training.getPerfCounters()))
    try:
        output.backward()
    except Exception as error:
        print("backward", isinstance(error, poptorch.Error))
    try:
        training(torch.ones(3, 4), torch.tensor([0, 1, 1]))
    except poptorch.Error as error:
        print("mismatch", "Shape mismatch" in str(error))
    try:
        training.cycleCount()
    except poptorch.Error as error:
        print("cycles", "logCycleCount" in str(error))


main()
