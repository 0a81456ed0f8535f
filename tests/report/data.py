"""Makes reports that are like those of real programs, of any size."""

from __future__ import annotations

import random

from popsim_torch.report.schema import FORMAT

HERTZ = 1.33e9
TILE_BYTES = 638_976
PARTS = ("compute", "exchange", "sync", "glue", "links", "host", "update", "all_reduce", "waiting")


def make_report(
    *,
    layers: int = 4,
    stages: int = 2,
    tiles: int = 64,
    accumulation: int = 4,
    iterations: int = 3,
    replicas: int = 2,
    training: bool = True,
    runs: int = 2,
    lanes: int = 0,
    seed: int = 0,
    name: str = "training",
) -> dict:
    """Return the content of a profile.pop of a chain of linear layers."""
    estimate = make_estimate(
        layers, stages, tiles, accumulation, iterations, replicas, training, seed
    )
    cycles = estimate["call"]["cycles"]
    return {
        "format": FORMAT,
        "popsim_torch": "0.1.0",
        "name": name,
        "created": "2026-11-26T23:10:04.631",
        "pid": 4711,
        "simulated": "every figure in 'estimate' is simulated",
        "static": {
            "training": training,
            "num_ipus": stages * replicas,
            "compilation_seconds": 0.25,
            "device_iterations": iterations,
            "gradient_accumulation": accumulation if training else 1,
            "options": {"device_iterations": iterations, "model_name": None},
            "host_memory": {
                "weights_and_states_bytes": 1000,
                "activations_bytes": 2000,
                "activations_in_use_bytes": 1500,
            },
            "host_ops": [_host_op(op) for op in estimate["ops"]],
        },
        "estimate": estimate,
        "no_estimate": None,
        "validation": {"rows": 12, "within": 11, "worst": {"id": "V4", "error": 0.11}},
        "runs": [_run(number, cycles, lanes) for number in range(runs)],
        "calls": 7,
    }


def _host_op(op: dict) -> dict:
    return {
        "name": op["name"],
        "kind": op["kind"],
        "phase": op["phase"],
        "stage": op["stage"],
        "scope": op["module"],
        "source": op["source"],
        "outputs": [{"name": op["name"], "dtype": "float32", "shape": [8, 16]}],
    }


def _run(number: int, cycles: float, lanes: int) -> dict:
    begin, length = 100.0 + number, 0.5
    kinds = ("forward", "backward")
    return {
        "number": number,
        "measured": {
            "begin": begin,
            "end": begin + length,
            "lanes": [
                {
                    "kind": kinds[place % 2],
                    "stage": place % 2,
                    "micro_batch": place // 2,
                    "device_iteration": 0,
                    "replica": 0,
                    "thread": place % 2,
                    "begin": place // 2 * length / lanes,
                    "end": (place // 2 + 0.8) * length / lanes,
                }
                for place in range(lanes)
            ],
            "lanes_left_out": 0,
        },
        "simulated": {"cycles": cycles},
    }


class _Maker:
    """Collects ops and variables with their indices."""

    def __init__(self, tiles: int, seed: int) -> None:
        self.ops: list[dict] = []
        self.variables: list[dict] = []
        self.tiles = tiles
        self.draw = random.Random(seed)

    def variable(self, name: str, kind: str, stage: int, shape: list[int], copies: int = 1) -> int:
        size = 4
        for length in shape:
            size *= length
        self.variables.append(
            {
                "name": name,
                "class": kind,
                "ipu": stage,
                "bytes": size,
                "tiles": self.tiles,
                "bytes_per_tile": -(-size // self.tiles),
                "shape": shape,
                "dtype": "float32",
                "first_op": None,
                "last_op": None,
                "copies": copies,
            }
        )
        return len(self.variables) - 1

    def op(self, name, kind, module, phase, stage, times, reads, writes, grade="A") -> None:
        compute = self.draw.randrange(500, 40_000) if grade else 0
        parts = (compute, compute // 4, 180, 60) if grade else (0, 0, 0, 0)
        self.ops.append(
            {
                "name": name,
                "kind": kind,
                "module": module,
                "phase": phase,
                "stage": stage,
                "ipu": stage,
                "source": f"net.py:{10 + len(self.ops) % 50}",
                "executions": times,
                "cycles": float(sum(parts)),
                "compute": float(parts[0]),
                "exchange": float(parts[1]),
                "sync": float(parts[2]),
                "glue": float(parts[3]),
                "temporary_bytes": 4 * self.draw.randrange(2000),
                "flops": 64.0 * compute,
                "formula": kind if grade else "",
                "grade": grade,
                "plan": "4 x 11 x 32 tiles, 1 serial part" if kind == "matmul" else "",
                "inputs": reads,
                "outputs": writes,
                "recomputed": False,
            }
        )
        for one in reads + writes:
            variable = self.variables[one]
            if variable["class"] in ("activations", "stash"):
                place = len(self.ops) - 1
                if variable["first_op"] is None:
                    variable["first_op"] = place
                variable["last_op"] = place


def make_estimate(
    layers: int,
    stages: int,
    tiles: int,
    accumulation: int,
    iterations: int,
    replicas: int,
    training: bool,
    seed: int,
) -> dict:
    """Return an estimate in the form of ``Estimate.as_dict()``."""
    make = _Maker(tiles, seed)
    _fill(make, layers, stages, accumulation if training else 1, iterations, training)
    sums = {
        (stage, phase): 0.0
        for stage in range(stages)
        for phase in ("forward", "backward", "update")
    }
    for op in make.ops:
        sums[op["stage"], op["phase"]] += op["cycles"]
    schedule = make_schedule(sums, stages, accumulation if training else iterations, training)
    update = sum(
        stretch["times"] * sum(slot["cycles"] for slot in stretch["slots"])
        for stretch in schedule["stretches"]
    )
    update += schedule["all_reduce_cycles"]
    times = iterations if training else 1
    busiest = times * max(sum(slot_cycles(schedule, stage)) for stage in range(stages))
    cycles = times * update + 8000
    items = 8 * iterations * replicas * (accumulation if training else 1)
    op_cycles = sum(op["cycles"] * op["executions"] for op in make.ops)
    grades = {
        grade: sum(o["cycles"] * o["executions"] for o in make.ops if o["grade"] == grade)
        / op_cycles
        for grade in "ABC"
    }
    return {
        "device": {
            "name": "Mk2 GC200",
            "version": 2,
            "tiles": tiles,
            "io_tiles": 0,
            "tile_bytes": TILE_BYTES,
            "clock_hz": HERTZ,
            "num_ipus": stages * replicas,
            "ipus_per_replica": stages,
        },
        "batch": {
            "micro_batch": 8,
            "device_iterations": iterations,
            "gradient_accumulation": accumulation if training else 1,
            "replicas": replicas,
            "items_per_call": items,
        },
        "training": training,
        "verdict": "fits",
        "call": {
            "cycles": cycles,
            "seconds": cycles / HERTZ,
            "items_per_second": items / (cycles / HERTZ),
            "parts": {
                "compute": 0.6 * busiest,
                "exchange": 0.2 * busiest,
                "sync": 0.1 * busiest,
                "glue": 0.1 * busiest,
                "links": 0.0,
                "host": 8000.0,
                "update": times * schedule["update_cycles"],
                "all_reduce": times * schedule["all_reduce_cycles"],
                "waiting": cycles
                - busiest
                - 8000
                - times * (schedule["update_cycles"] + schedule["all_reduce_cycles"]),
            },
        },
        "update": {"cycles": update, "seconds": update / HERTZ},
        "grades": grades,
        "without_formula": [op["name"] for op in make.ops if not op["formula"]],
        "ops": make.ops,
        "variables": make.variables,
        "ipus": [_ipu(make, stage, sums, update) for stage in range(stages)],
        "schedule": schedule,
        "links": _links(stages, training),
        "stash": [
            {
                "name": one["name"],
                "stage": one["ipu"],
                "copies": one["copies"],
                "bytes": one["bytes"],
            }
            for one in make.variables
            if one["class"] == "stash"
        ],
        "latency": {
            "host_to_ipu": 1e-5,
            "compute": update / HERTZ,
            "ipu_to_host": 2e-5,
            "round_trip": update / HERTZ + 3e-5,
        },
        "traffic": {
            "all_reduce_bytes": 5000 if training else 0,
            "all_reduces": 1 if training else 0,
            "host_in_bytes": 30_000,
            "host_out_bytes": 10_000,
            "off_chip_bytes": 0,
        },
    }


def slot_cycles(schedule: dict, stage: int) -> list[float]:
    return [
        stretch["times"] * action["cycles"]
        for stretch in schedule["stretches"]
        for slot in stretch["slots"]
        for action in slot["actions"]
        if action["ipu"] == stage
    ]


def _fill(make, layers, stages, accumulation, iterations, training):
    width, times = 64, accumulation * iterations
    make.variable("code", "code", 0, [1000])
    last = make.variable("input", "streams", 0, [8, width])
    made = []
    for layer in range(layers):
        stage = layer * stages // layers
        block = f"net/block{layer // 4}/fc{layer}"
        path = block.replace("/", ".")
        weight = make.variable(f"{path}.weight", "parameters", stage, [width, width])
        copies = 2 * (stages - 1 - stage) + 1 if training else 1
        kind = "stash" if copies > 1 else "activations"
        value = make.variable(f"{path}/Gemm:0", kind, stage, [8, width], copies)
        make.op(f"{path}/Gemm:0", "matmul", block, "forward", stage, times, [last, weight], [value])
        relu = make.variable(f"{path}/Relu:0", "activations", stage, [8, width])
        make.op(f"{path}/Relu:0", "map", block, "forward", stage, times, [value], [relu], "B")
        made.append((path, block, stage, weight, last, value))
        last = relu
    make.op("Odd:0", "custom", "", "forward", stages - 1, times, [last], [last], "")
    if not training:
        return
    for path, block, stage, weight, source, value in reversed(made):
        gradient = make.variable(f"Gradient___{path}/Gemm:0", "activations", stage, [8, width])
        sums = make.variable(f"Accum___{path}.weight", "accumulators", stage, [width, width])
        make.op(
            f"Gradient___{path}/Gemm:0",
            "matmul",
            block,
            "backward",
            stage,
            times,
            [value, weight],
            [gradient],
        )
        make.op(
            f"UpdatedVar___Accum___{path}.weight",
            "accumulate",
            block,
            "backward",
            stage,
            times,
            [source, gradient],
            [sums],
            "B",
        )
    for path, block, stage, weight, *_ in made:
        make.op(
            f"UpdatedVar___{path}.weight",
            "sgd_update",
            block,
            "update",
            stage,
            iterations,
            [weight],
            [weight],
            "C",
        )


def make_schedule(sums, stages, micro_batches, training) -> dict:
    """Return PopTorch's pipeline: fill, a period that repeats, drain."""
    last = stages - 1
    total = micro_batches + (2 * last if training else last)

    def actions(slot):
        found = []
        for stage in range(stages):
            kinds = [("forward", slot - stage)]
            if training:
                kinds.append(("backward", slot - (2 * last - stage)))
            for kind, step in kinds:
                if 0 <= step < micro_batches:
                    cycles = sums[stage, kind]
                    found.append(
                        {
                            "kind": kind,
                            "stage": stage,
                            "ipu": stage,
                            "micro_batch": step,
                            "cycles": cycles,
                        }
                    )
        return found

    def cycles(found):
        by_ipu = [sum(one["cycles"] for one in found if one["ipu"] == ipu) for ipu in range(stages)]
        return max(by_ipu)

    fill = 2 * last if training else last
    slots = []
    for place in range(total):
        found = actions(place)
        slots.append(
            {
                "cycles": cycles(found) + (300.0 if stages > 1 else 0.0),
                "link_cycles": 300.0 if stages > 1 else 0.0,
                "actions": found,
            }
        )
    steady = total - 2 * fill
    stretches = []
    if steady > 0:
        stretches = [
            {"times": 1, "slots": slots[:fill]},
            {"times": steady, "slots": [slots[fill]]},
            {"times": 1, "slots": slots[fill + steady :]},
        ]
    else:
        stretches = [{"times": 1, "slots": slots}]
    if training:
        updates = [
            {
                "kind": "update",
                "stage": 0,
                "ipu": ipu,
                "micro_batch": None,
                "cycles": sums[ipu, "update"],
            }
            for ipu in range(stages)
        ]
        slot = {"cycles": cycles(updates), "link_cycles": 0.0, "actions": updates}
        stretches.append({"times": 1, "slots": [slot]})
    return {
        "name": "Default",
        "stretches": [one for one in stretches if one["slots"]],
        "update_cycles": max(sums[stage, "update"] for stage in range(stages)),
        "all_reduce_cycles": 5000.0 if training else 0.0,
    }


def _links(stages, training):
    directions = ["forward", "backward"] if training else ["forward"]
    return [
        {
            "from": stage if way == "forward" else stage + 1,
            "to": stage + 1 if way == "forward" else stage,
            "bytes": 2048,
            "cycles": 300.0,
            "direction": way,
        }
        for stage in range(stages - 1)
        for way in directions
    ]


def _ipu(make, stage, sums, update):
    own = [one for one in make.variables if one["ipu"] == stage]
    always = sum(one["bytes_per_tile"] * one["copies"] for one in own if one["first_op"] is None)
    liveness = []
    for place, op in enumerate(make.ops):
        if op["ipu"] == stage:
            live = sum(
                one["bytes_per_tile"] * one["copies"]
                for one in own
                if one["first_op"] is not None and one["first_op"] <= place <= one["last_op"]
            )
            worst = always + live + op["temporary_bytes"]
            liveness.append([place, worst, 0.8 * worst])
    peak_op, peak, mean = max(liveness, key=lambda row: row[1])
    classes = {}
    for one in own:
        size = classes.setdefault(one["class"], {"max": 0, "total": 0})
        size["max"] += one["bytes_per_tile"]
        size["total"] += one["bytes"]
    tiles = [int(peak * (0.6 + 0.4 * make.draw.random())) for _ in range(make.tiles)]
    tiles[3] = peak
    busy = sum(sums[stage, phase] for phase in ("forward", "backward", "update"))
    return {
        "ipu": stage,
        "stages": [stage],
        "busy_cycles": busy,
        "use": min(busy / update, 1.0),
        "parts": dict.fromkeys(PARTS, 100.0),
        "memory": {
            "capacity": TILE_BYTES,
            "peak": peak,
            "mean": mean,
            "worst_tile": 3,
            "peak_op": peak_op,
            "always": always,
            "verdict": "fits",
            "classes": classes,
            "tiles": tiles,
            "always_tiles": [min(always, tile) for tile in tiles],
        },
        "liveness": liveness,
    }
