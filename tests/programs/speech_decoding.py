"""A recogniser is trained with CTC, and decoded on the device by a beam search."""

import poptorch
import torch

STEPS, BATCH, CLASSES = 12, 4, 5  # class 0 is the blank
SPOKEN = [[1, 2, 3], [4, 4], [2], [3, 1, 1, 2]]


class Recogniser(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.fc1 = torch.nn.Linear(6, 32)
        self.fc2 = torch.nn.Linear(32, CLASSES)
        self.loss = torch.nn.CTCLoss(zero_infinity=True)

    def forward(self, x, lengths, targets=None, target_lengths=None):
        log_probs = self.fc2(torch.tanh(self.fc1(x))).log_softmax(2)
        if targets is not None:
            return log_probs, self.loss(log_probs, targets, lengths, target_lengths)
        return poptorch.ctc_beam_search_decoder(log_probs, lengths, beam_width=20, top_paths=2)


generator = torch.Generator().manual_seed(3)
x = torch.randn(STEPS, BATCH, 6, generator=generator)
lengths = torch.tensor([12, 12, 10, 12])
targets = torch.zeros(BATCH, 4, dtype=torch.int64)
for row, labels in zip(targets, SPOKEN, strict=True):
    row[: len(labels)] = torch.tensor(labels)
target_lengths = torch.tensor([len(labels) for labels in SPOKEN])

options = poptorch.Options().showCompilationProgressBar(False)
model = Recogniser()
optimizer = poptorch.optim.Adam(model.parameters(), lr=0.03)
training = poptorch.trainingModel(model, options, optimizer)
losses = [float(training(x, lengths, targets, target_lengths)[1]) for _ in range(150)]
print("loss", losses[0], losses[-1])

model.eval()
decoder = poptorch.inferenceModel(model, options.clone())
probabilities, path_lengths, paths = decoder(x, lengths)
print("shapes", [tuple(t.shape) for t in (probabilities, path_lengths, paths)])
decoded = [path[0, : count[0]].tolist() for path, count in zip(paths, path_lengths, strict=True)]
print("decoded", decoded)
print("spoken", SPOKEN)
print("sorted", bool((probabilities[:, 0] >= probabilities[:, 1]).all()))
