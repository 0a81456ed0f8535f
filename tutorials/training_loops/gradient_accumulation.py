"""Accumulate the gradients of many batches for one update, in three ways and two dtypes."""

import argparse
import itertools
import sys
from pathlib import Path

import torch
from task import Batches, make_model
from torch.nn import functional

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import count

TYPES = (torch.float32, torch.float16)
REDUCTIONS = {
    "sum": (poptorch.ReductionType.Sum, None),
    "mean": (poptorch.ReductionType.Mean, poptorch.MeanReductionStrategy.Post),
    "running mean": (poptorch.ReductionType.Mean, poptorch.MeanReductionStrategy.Running),
}


def make_options(reduction: str) -> poptorch.Options:
    """Return options that accumulate gradients in one of the ways."""
    kind, strategy = REDUCTIONS[reduction]
    options = poptorch.Options()
    options.Training.accumulationAndReplicationReductionType(kind)
    if strategy is not None:
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    return options


def gradients_on_device(
    reduction: str, weight_type: torch.dtype, accumulator_type: torch.dtype, num_batches: int
) -> torch.Tensor:
    """Return the gradients of all weights, as an update gets them."""
    model = make_model().to(weight_type)
    optimizer = poptorch.OutfeedOptimizer(
        poptorch.optim.SGD(
            model.parameters(), lr=0.01, accum_type=accumulator_type, use_combined_accum=False
        ),
        poptorch.MaybeOutfeedQueue(filters=None),
        outfeed_optimizer_mode=poptorch.OutfeedOptimizerMode.BEFORE_APPLY,
        model=model,
    )
    infeed = poptorch.InfeedQueue(Batches())

    def step(x, y):
        loss = functional.mse_loss(model(x.to(weight_type)), y.to(weight_type))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @poptorch.function(options=make_options(reduction))
    def train():
        # There is one iteration for each batch, and one update after the last iteration.
        poptorch.repeat(num_batches, step, infeed=infeed, gradient_accumulation=num_batches)

    train()
    gradients = optimizer.queue.dequeue()
    return flat(gradients[f"{name}_grad"][0] for name, _ in model.named_parameters())


def gradients_in_float64(
    reduction: str, weight_type: torch.dtype, num_batches: int
) -> torch.Tensor:
    """Return the same gradients in float64, for the same weights and data."""
    model = make_model().to(weight_type).double()
    for x, y in itertools.islice(Batches(), num_batches):
        x, y = x.to(weight_type).double(), y.to(weight_type).double()
        functional.mse_loss(model(x), y).backward()
    exact = flat(parameter.grad for parameter in model.parameters())
    return exact if reduction == "sum" else exact / num_batches


def flat(gradients) -> torch.Tensor:
    return torch.cat([gradient.double().flatten() for gradient in gradients])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--batches", type=count, default=64, help="for one update (default: %(default)s)"
    )
    num_batches = parser.parse_args().batches
    print(f"{num_batches} batches for an update; error of its gradients against float64")
    print(f"{'reduction':<14}{'weights':<10}{'accumulators':<14}error")
    refusals = {}
    for reduction, weight_type, accumulator_type in itertools.product(REDUCTIONS, TYPES, TYPES):
        exact = gradients_in_float64(reduction, weight_type, num_batches)
        try:
            found = gradients_on_device(reduction, weight_type, accumulator_type, num_batches)
            result = f"{(found - exact).norm() / exact.norm():.1e}"
        except poptorch.Error as error:
            result = "refused"
            refusals[str(error)] = None
        names = [str(type_).removeprefix("torch.") for type_ in (weight_type, accumulator_type)]
        print(f"{reduction:<14}{names[0]:<10}{names[1]:<14}{result}")
    print("", *refusals, sep="\n")


if __name__ == "__main__":
    main()
