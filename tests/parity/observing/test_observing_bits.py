"""Observing changes no bit."""

import pytest
import torch

from popsim_torch.enums import PipelineSchedule
from tests.parity.observing.models import (
    CALLS,
    GA,
    OPTIMIZERS,
    D,
    everything,
    nothing,
    results,
    same,
)
from tests.sweeps import one_by_one


@pytest.mark.parametrize(("optimizer", "every"), one_by_one(OPTIMIZERS, [2, 1, 3, 7, None]))
def test_no_bit_changes(optimizer, every):
    expected, _ = results(nothing, optimizer=optimizer)
    found, records = results(everything(every), optimizer=optimizer)
    same(found, expected)
    steps = sorted({record.step for record in records})
    if every is not None:
        assert steps == list(range(0, D * CALLS, every))
    else:
        assert steps and all(step < D * CALLS for step in steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("threads_used", [1, 2])
def test_types_and_threads(dtype, threads_used, threads):
    threads(threads_used)
    expected, _ = results(nothing, dtype=dtype)
    found, records = results(everything(2), dtype=dtype)
    same(found, expected)
    assert len(records) > 100


@pytest.fixture(scope="module")
def prints_of_one_stage():
    """The fingerprints of a model that has no stages."""
    return _fingerprints(results(everything(2), accumulation=8)[1])


SCHEDULES = [s for s in PipelineSchedule if s != PipelineSchedule.Default]


@pytest.mark.parametrize(("stages", "schedule"), one_by_one([4, 2], SCHEDULES))
def test_stages_on_threads(stages, schedule, threads, prints_of_one_stage):
    settings = {"accumulation": 8, "stages": stages, "schedule": schedule}
    expected, _ = results(nothing, **settings)
    for number in (1, 2):
        threads(number)
        found, records = results(everything(2), **settings)
        same(found, expected)
        prints = {
            place: print_
            for place, print_ in _fingerprints(records).items()
            if place[0].startswith(("Gradient___layers", "UpdatedVar___layers"))
        }
        assert prints and prints.items() <= prints_of_one_stage.items()


def _fingerprints(records):
    return {(r.name, r.step, r.micro_batch): r.statistics.fingerprint for r in records}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("number", [1, 2])
def test_replicas(number, optimizer, threads):
    threads(number)
    expected, _ = results(nothing, replicas=2, optimizer=optimizer)
    found, records = results(everything(2), replicas=2, optimizer=optimizer)
    same(found, expected)
    name = "Gradient___layers.2.weight"
    by_replica = [
        [r.statistics.fingerprint for r in records if r.name == name and r.replica == replica]
        for replica in range(2)
    ]
    assert len(by_replica[0]) == len(by_replica[1]) == D // 2 * CALLS * GA
    assert by_replica[0] != by_replica[1]
