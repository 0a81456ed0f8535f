"""Ask a simulated machine how to train a language model on several IPUs; nothing is trained."""

import argparse
import sys
from pathlib import Path

import torch
from transformer import LanguageModel

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import count


def make_model(arguments: argparse.Namespace) -> LanguageModel:
    """Return the model in half precision, without values for its weights."""
    with torch.device("meta"):
        model = LanguageModel(
            arguments.layers,
            arguments.width,
            arguments.width // 64,
            arguments.vocabulary,
            arguments.length,
        )
    return model.half()


def make_optimizer(model: LanguageModel) -> poptorch.optim.Adam:
    """Return Adam; gradients and the first moment are summed in half precision."""
    half = torch.half
    return poptorch.optim.Adam(
        model.parameters(), accum_type=half, first_order_momentum_accum_type=half
    )


def make_batch(arguments: argparse.Namespace, micro_batches: int) -> tuple[torch.Tensor, ...]:
    """Return tokens and targets of some micro-batches, without values."""
    shape = micro_batches * arguments.micro_batch_size, arguments.length
    tokens = torch.empty(shape, dtype=torch.long, device="meta")
    return tokens, tokens


def machine(arguments: argparse.Namespace) -> poptorch.Options:
    """Return options for the simulated machine; a model that does not fit is no error."""
    return poptorch.Options().machine(arguments.machine, out_of_memory="ignore")


def divide(model: LanguageModel, num_stages: int) -> None:
    """Give each stage about as many layers."""
    blocks = [f"blocks.{number}" for number in range(len(model.blocks))]
    names = ["words", "places", *blocks, "norm", "head"]
    stages = {name: place * num_stages // len(names) for place, name in enumerate(names)}
    poptorch.set_pipeline_stage_assignment(model, stages)


def estimate(
    arguments: argparse.Namespace, num_stages: int, *, recomputes: bool
) -> poptorch.Estimate:
    """Return what a training with equally many layers on each stage would cost."""
    model, options = make_model(arguments), machine(arguments)
    if num_stages > 1:
        divide(model, num_stages)
    micro_batches = 4 * num_stages
    options.Training.gradientAccumulation(micro_batches)
    options._Popart.set("autoRecomputation", 3 if recomputes else 0)
    batch = make_batch(arguments, micro_batches)
    return poptorch.estimate(model, batch, options=options, optimizer=make_optimizer(model))


def make_plan(arguments: argparse.Namespace) -> poptorch.PipelinePlan:
    """Return the plan for the model, which sees one micro-batch."""
    model = make_model(arguments)
    return poptorch.plan(
        model,
        make_batch(arguments, 1),
        num_ipus=arguments.ipus,
        options=machine(arguments),
        optimizer=make_optimizer(model),
    )


def check(arguments: argparse.Namespace, plan: poptorch.PipelinePlan) -> poptorch.Estimate:
    """Return what the model costs if the plan is applied to it."""
    model, options = make_model(arguments), machine(arguments)
    plan.apply(model, options)
    batch = make_batch(arguments, plan.accumulation)
    return poptorch.estimate(model, batch, options=options, optimizer=make_optimizer(model))


def line(way: str, found: poptorch.Estimate) -> str:
    """Return a line of the table."""
    share = found.peak_bytes / found.device.tile_bytes
    rate = found.items_per_second or 0.0
    return f"{way:<32} {share:10.0%} {found.verdict:<13} {float(f'{rate:.2g}'):11,.0f}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", choices=["ipu1", "ipu2", "ipu21"], default="ipu2")
    parser.add_argument("--ipus", type=count, default=4)
    parser.add_argument("--layers", type=count, default=12)
    parser.add_argument("--width", type=count, default=768, help="a multiple of 64")
    parser.add_argument("--vocabulary", type=count, default=8000)
    parser.add_argument("--length", type=count, default=256, help="tokens of a sequence")
    parser.add_argument("--micro-batch-size", type=count, default=4, help="sequences")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    print("Simulated:                       fullest tile verdict       sequences/s")
    ipus = arguments.ipus
    print(line("1 IPU", estimate(arguments, 1, recomputes=False)))
    print(line(f"{ipus} IPUs", estimate(arguments, ipus, recomputes=False)))
    print(line(f"{ipus} IPUs, recomputing", estimate(arguments, ipus, recomputes=True)))
    plan = make_plan(arguments)
    print(line("as planned", check(arguments, plan)))
    print(f"\n{plan}")


if __name__ == "__main__":
    main()
