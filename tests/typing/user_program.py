"""A program as users write it: with every public class, checked by ``mypy --strict``, never run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import popsim_torch as poptorch

Tensor = torch.Tensor


class Net(nn.Module):
    """Returns logits and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.front = poptorch.BeginBlock(nn.Linear(4, 8), ipu_id=0)
        with poptorch.PipelineStage(1):
            self.back = nn.Linear(8, 3)
        self.host = poptorch.CPU(nn.Tanh(), "tanh")
        self.seen = poptorch.OutfeedQueue(poptorch.OutfeedMode.LAST)
        self.outfeed = poptorch.Outfeed(self.seen, "hidden")

    def forward(self, x: Tensor, labels: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        with poptorch.NameScope("front"), poptorch.Attribute(__outline={"layer": "front"}):
            hidden = self.outfeed(self.host(self.front(x)))
        with poptorch.Block("back", ipu_id=1), poptorch.MultiConv() as convolutions:
            convolutions.planType(poptorch.MultiConvPlanType.Serial)
            logits = self.back(hidden) * scale
        poptorch.set_overlap_for_input(x, poptorch.OverlapMode.NoOverlap)
        product = poptorch.serializedMatMul(
            logits, logits.t(), poptorch.MatMulSerializationMode.Disabled
        )
        loss = nn.functional.cross_entropy(logits, labels) + poptorch.identity_loss(product, "sum")
        return poptorch.ipu_print_tensor(logits, "logits"), loss


def options() -> poptorch.Options:
    """Return options, set by chained calls."""
    chosen = poptorch.Options().deviceIterations(4).randomSeed(1)
    chosen.outputMode(poptorch.OutputMode.EveryN, 2).connectionType(poptorch.ConnectionType.Always)
    chosen.anchorTensor("grad", "Gradient___back.weight", poptorch.OutputMode.All)
    chosen.syncPattern(poptorch.SyncPattern.Full).logDir(".")
    chosen.Training.gradientAccumulation(2).setMeanAccumulationAndReplicationReductionStrategy(
        poptorch.MeanReductionStrategy.Running
    )
    chosen.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
    chosen.Precision.enableStochasticRounding(True).halfFloatCasting(
        poptorch.HalfFloatCastingBehavior.Default
    )
    chosen.TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage())
    chosen.inputReplicaGrouping(1, poptorch.CommGroupType.NoGrouping)
    iterations: int = chosen.device_iterations
    return chosen.clone() if iterations else chosen


def strategies() -> list[
    poptorch.PipelinedExecution | poptorch.SerialPhasedExecution | poptorch.ParallelPhasedExecution
]:
    """Return every strategy."""
    serial = poptorch.SerialPhasedExecution(poptorch.Phase(poptorch.Stage("front").ipu(0)))
    serial.setTensorsLiveness(poptorch.Liveness.AlwaysLive)
    return [
        poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu),
        poptorch.ShardedExecution(poptorch.Stage("front"), poptorch.Stage("back")),
        serial,
        poptorch.ParallelPhasedExecution([poptorch.Stage("a"), poptorch.Stage("b")]),
    ]


def optimizers(model: nn.Module) -> list[poptorch.optim.Optimizer]:
    """Return every optimizer."""
    weights = list(model.parameters())
    sgd = poptorch.optim.SGD(weights, lr=0.1, momentum=0.9)
    variable: poptorch.optim.VariableAttributes = sgd.variable_attrs
    link: poptorch.optim.DeviceLink | None = None
    variable.markAsConstant("momentum")
    adams = [poptorch.optim.Adam(weights, lr=1e-3), poptorch.optim.AdamW(weights, lr=1e-3)]
    assert link is None
    return [sgd, *adams, poptorch.optim.RMSprop(weights), poptorch.optim.LAMB(weights)]


def train() -> float:
    """Train and look inside."""
    model = Net()
    data = TensorDataset(torch.rand(8, 4), torch.randint(3, (8,)))
    loader = poptorch.DataLoader(
        options(), data, batch_size=2, mode=poptorch.DataLoaderMode.AsyncRebatched
    )
    more = poptorch.AsynchronousDataAccessor(loader, sharing_strategy=poptorch.SharingStrategy.Fork)
    training = poptorch.trainingModel(model, options(), optimizers(model)[0])
    total = 0.0
    for x, labels in more:
        logits, loss = training(x, labels, scale=2.0)
        total += float(loss.mean()) + float(logits.sum())
    names: list[str] = training.getTensorNames()
    anchored: Tensor = training.getAnchoredTensor("grad")
    training.setOptimizer(optimizers(model)[1])
    inference: poptorch.PoplarExecutor[..., tuple[Tensor, Tensor]]
    inference = poptorch.inferenceModel(training)
    total += float(inference(x, labels)[1]) + float(anchored.sum()) + len(names)
    training.save("model.poptorch")
    loaded: poptorch.PoplarExecutor = poptorch.load("model.poptorch")
    return total + len(loaded.getTensorNames())


@poptorch.function
def epoch(count: int, weight: Tensor) -> Tensor:
    """Double a tensor some times on the device."""
    result = poptorch.repeat(count, lambda x: x * 2, [weight])
    assert isinstance(result, Tensor)
    return result


class Trainer:
    """Has a device loop as a method."""

    @poptorch.function(options=poptorch.Options())
    def run(self, x: Tensor) -> Tensor:
        """Add one some times."""
        result = poptorch.while_loop(lambda y: y < 5, lambda y: y + 1, x)
        assert isinstance(result, Tensor)
        return result


def loops() -> Tensor:
    """Call functions of the device, and read a queue that one feeds."""
    doubled: Tensor = epoch(3, torch.ones(1))
    trainer = Trainer()
    added: Tensor = trainer.run(doubled)
    seen: list[poptorch.Record] = trainer.run.observations()
    method: Callable[[Tensor], Tensor] = trainer.run
    added = added + method(doubled) + len(seen) + len(trainer.run.programs)
    trainer.run.destroy()
    held: poptorch.Function[[int, Tensor], Tensor] = epoch
    bare: poptorch.Function = epoch
    bare.stop()
    held.destroy()
    infeed = poptorch.InfeedQueue([added], repeat=True)
    infeed.close()
    for element in poptorch.OutfeedQueue().follow(timeout=1.0):
        print(element)
    return added


def observe(model: Net) -> poptorch.History:
    """Watch gradients of an epoch, and return its numbers."""
    queue = poptorch.MaybeOutfeedQueue(filters=["back", poptorch.Glob("*_grad")])
    layer = poptorch.MaybeOutfeed(queue, name="logits")
    optimizer = poptorch.OutfeedOptimizer(
        optimizers(model)[0], queue, poptorch.OutfeedOptimizerMode.AFTER_COMPUTE, model
    )
    callback = poptorch.OutfeedCallback(
        queue, sinks=[poptorch.SummaryFile("run.csv"), poptorch.SummaryBoard(None)]
    )
    data = [(torch.rand(2, 4), torch.randint(3, (2,)))]
    history = poptorch.fit(model, data, callbacks=[callback], optimizer=optimizer)
    of_a_fit: list[poptorch.Record] = history.observations()
    record: poptorch.EpochRecord = history.epochs[0]
    summary: poptorch.TensorSummary = poptorch.summarise(layer(torch.ones(3)))
    print(record.samples_per_second, summary.mean, history["loss"][0], of_a_fit[0].name)
    return history


def statistics_of_a_run(model: Net, optimizer: torch.optim.Optimizer) -> float:
    """Ask for every statistic, and read them."""
    wanted = poptorch.Options().observe(
        re.compile("^Gradient___"), poptorch.Moments(), poptorch.Counts(), every=4, over="iteration"
    )
    wanted.observe("fc.*", poptorch.Histogram(2), poptorch.TopK(4), every=4)
    wanted.observe("*Relu:0", poptorch.Channels(axis=-1), every=4)
    wanted.observe("UpdatedVar___*", poptorch.Sample(), poptorch.Fingerprint(), every=4)
    training = poptorch.trainingModel(model, wanted, optimizer)
    training.add_sink(poptorch.LiveTerminal())
    training(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))
    shown: poptorch.ObservedTensors = training.observing()
    records: list[poptorch.Record] = training.observations()
    training.close_sinks()
    found: poptorch.Statistics = poptorch.merge_statistics([one.statistics for one in records])
    histogram: poptorch.HistogramCounts | None = found.histogram
    median = 0.0 if histogram is None else histogram.quantile(0.5)
    channels: poptorch.ChannelStatistics | None = found.channels
    if channels is not None:
        print(channels.dead, channels.zeros.sum(), channels.count + 1)
    host = poptorch.statistics_of(torch.ones(3), poptorch.Moments())
    writer: poptorch.RunWriter = training.record("run.popsim", max_bytes=10**6)
    writer.close()
    return median + (host.norm or 0.0) + (shown.every or 0)


def compare_runs(model: Net, optimizer: torch.optim.Optimizer) -> str:
    """Record a loop of PyTorch, and compare it with a run of a program."""
    with poptorch.eager_record(model, "eager.popsim", poptorch.Moments(), optimizer=optimizer):
        model(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))
    run = poptorch.Run("run.popsim")
    details: list[poptorch.RecordedTensor] = list(run.details.values())
    found: poptorch.Difference = poptorch.compare(run, poptorch.Run("eager.popsim"), tolerance=1e-4)
    first: poptorch.FirstDifference | None = found.first
    growth: list[poptorch.StepDifference] = list(found.growth)
    if first is None:
        return f"{len(growth)} steps of {len(details)} tensors are equal"
    samples: poptorch.SampleDifference | None = first.samples
    return f"{first.name} at step {first.step}, {0 if samples is None else samples.ulp} ulp"


class SlowestQueue:
    """A sink that remembers the queue that the program has waited for most."""

    def __init__(self) -> None:
        self.slowest: poptorch.QueueState | None = None

    def write_records(self, records: Sequence[poptorch.Record]) -> None:
        """Take no records."""

    def show_queues(self, states: Sequence[poptorch.QueueState]) -> None:
        """Look at the queues of the program."""
        self.slowest = max(states, key=lambda state: state.seconds_waited)

    def close(self) -> None:
        """Do nothing."""


def show_records(records: list[poptorch.Record]) -> list[poptorch.Alarm]:
    """Send records to every sink, and draw them."""
    sinks: list[poptorch.RecordSink] = [
        poptorch.SummaryFile("records.jsonl"),
        poptorch.LiveTerminal("Gradient___*", statistic="std"),
        poptorch.HtmlPage("run.html", seconds=60),
        SlowestQueue(),
    ]
    for sink in sinks:
        sink.write_records(records)
        sink.close()
    poptorch.write_page("two.html", records, other=records, labels=("before", "after"))
    poptorch.histogram_over_time(records, "loss").savefig("loss.png")
    return poptorch.find_alarms(records)


def fit_with_callbacks(model: Net, optimizer: torch.optim.Optimizer) -> str:
    """Train with everything that fit brings, and look at the model."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    callbacks: list[object] = [
        poptorch.LearningRateScheduler(scheduler),
        poptorch.Checkpoint("best.pt", monitor="val_loss"),
        poptorch.EarlyStopping(monitor="val_loss", patience=2),
    ]
    batches = [(torch.randn(8, 3), torch.ones(8))]
    poptorch.fit(model, batches, optimizer=optimizer, validation_data=batches, callbacks=callbacks)
    traffic: poptorch.Traffic = poptorch.trainingModel(model).traffic()
    assert traffic.exchanges == 0
    summary: poptorch.ModelSummary = poptorch.summary(model, torch.randn(8, 3))
    module: poptorch.ModuleSummary = summary.rows[0]
    plan: poptorch.PipelinePlan = poptorch.plan(
        model, torch.randn(8, 3), num_ipus=2, optimizer=optimizer
    )
    plan.apply(model, poptorch.Options())
    executor = poptorch.trainingModel(model, optimizer=optimizer)
    details: poptorch.TensorInfo = executor.getTensorNames("Gradient___*", details=True)[0]
    chosen: poptorch.tensors.Selection = poptorch.tensors.gradients() & "*.weight"
    large = chosen | (lambda tensor: tensor.dtype == torch.float16)
    found: list[poptorch.TensorInfo] = executor.names([large, "fc.*", re.compile("Gemm")])
    assert executor.names(lambda tensor: tensor.stage > 0) == found
    poptorch.Options().anchorTensor("all", large).anchorTensor("some", ["a", "b*"])
    measures: poptorch.testing.TrainingMeasures
    measures = poptorch.testing.assert_trains(model, batches, optimizer=optimizer, frozen="back.*")
    assert measures.losses[-1] < measures.losses[0]
    return f"{module.path} {details.name}"


def costs(model: Net, optimizer: torch.optim.Optimizer) -> float:
    """Ask what a model would cost on an IPU, and what changes its speed here."""
    options = poptorch.Options().machine("bow", tiles=736, out_of_memory="raise")
    options.logCycleCount(True)
    batch = (torch.empty(8, 3, device="meta"), torch.empty(8, device="meta"))
    estimate: poptorch.Estimate = poptorch.estimate(
        model, batch, options=options, optimizer=optimizer
    )
    assert estimate.verdict == "fits"
    executor = poptorch.inferenceModel(model, options)
    same: poptorch.Estimate = executor.estimate(torch.randn(8, 3))
    levers: poptorch.Levers = executor.levers(torch.randn(8, 3), seconds=0.1)
    lever: poptorch.Lever = levers.device_iterations
    knee: poptorch.LeverPoint | None = lever.knee
    cycles: int = executor.cycleCount()
    return same.seconds + cycles + (0 if knee is None else knee.rate)


def pipelines(model: Net) -> list[poptorch.PipelineStageRecord]:
    """Ask for a pipeline as TensorFlow for IPUs has them."""
    poptorch.set_pipelining_options(
        model,
        gradient_accumulation_steps_per_replica=8,
        gradient_accumulation_reduction_method=poptorch.GradientAccumulationReductionMethod.MEAN,
        pipeline_schedule=poptorch.PipelineSchedule.Grouped,
        recomputation_mode=poptorch.RecomputationMode.Auto,
    )
    kept = poptorch.PipeliningOptions({}, poptorch.PipelineSchedule.Interleaved)
    kept.apply(poptorch.Options())
    return poptorch.get_pipeline_stage_assignment(model)


class Pair:
    """Two tensors."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right


class PairParser(poptorch.ICustomArgParser):
    """Takes pairs apart."""

    def yieldTensors(self, struct: Pair) -> Iterator[Tensor]:
        """Yield both."""
        yield struct.left
        yield struct.right

    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[Tensor]) -> Pair:
        """Return a pair."""
        return Pair(next(tensor_iterator), next(tensor_iterator))


def watched(model: Net) -> str:
    """Look for the first bad number."""
    options = poptorch.Options().watch(then=lambda verdict: verdict.source == "op")
    training = poptorch.trainingModel(model, options.clone().watch(capsule="capsules"))
    try:
        training(torch.ones(2, 3), torch.ones(2))
    except poptorch.BadNumberError as error:
        verdict: poptorch.Verdict = error.verdict
        operand: poptorch.OperandNumbers = verdict.operands[0]
        return f"{verdict.rule} {operand.maximum} {verdict == poptorch.replay('it.capsule')}"
    return ""


def reports() -> str:
    """Read what programs would cost on an IPU."""
    poptorch.report.annotate("reports/training", {"why": "a try"})
    report: poptorch.report.Report = poptorch.report.open("reports/training")
    longest: poptorch.report.OpCost = max(report.ops, key=lambda op: op.call_cycles)
    cost: poptorch.report.ModuleCost = report.by_module()["fc"]
    report.print_operations()
    comparison: poptorch.report.Comparison = report.compare(poptorch.report.open("other"))
    page = comparison.write_page("comparison.html")
    runs: tuple[poptorch.report.RecordedRun, ...] = report.runs
    memory: poptorch.report.IpuMemory = report.memory[0]
    update: poptorch.report.PhaseCost = cost.update
    advice: tuple[poptorch.report.Insight, ...] = report.insights
    figures: list[poptorch.report.ComparedFigure] = comparison.figures()
    measured = sum(run.measured_seconds or 0.0 for run in runs)
    return f"{longest.name} {update.grade} {memory.peak} {page} {measured} {advice} {figures}"


def errors() -> str:
    """Catch what may go wrong, and say what computes."""
    poptorch.registerCustomArgParser(Pair, PairParser())
    info: poptorch.BuildInfo = poptorch.build_info()
    channel = poptorch.profiling.Channel("program")
    text_format = poptorch.ops.PrintFormat(digits=2)
    kind = poptorch.poptorch_core.TestErrorType.Poplibs
    retrieval = poptorch.VariableRetrievalMode.OnePerGroup
    try:
        with channel.tracepoint("train"):
            train()
    except poptorch.RecoverableError as error:
        return error.recovery_action
    except poptorch.UnrecoverableError as error:
        return error.message
    except poptorch.RecordError as error:
        history: poptorch.History = error.history
        return f"{error.record.name} {len(history.observations())}"
    except poptorch.ConfigFileError as error:
        return str(error)
    except poptorch.Error as error:
        return error.type
    return f"{info.target} {text_format.digits} {kind} {retrieval}"
