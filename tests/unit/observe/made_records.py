"""Records made by numpy, for the tests of sinks."""

import numpy as np
import torch

from popsim_torch.observe.record import Record
from popsim_torch.statistics import HistogramCounts, Statistics


def statistics(values, mantissa_bits=0, **more):
    """Return the statistics of some values, all but fingerprint, top values and samples."""
    array = np.asarray(values, np.float32).reshape(-1)
    finite = array[np.isfinite(array)].astype(np.float64)
    empty = not len(finite)
    bits = array.view(np.uint32)
    bins = (bits & 0x7FFFFFFF) >> (23 - mantissa_bits)
    sides = [
        torch.from_numpy(np.bincount(bins[bits >> 31 == sign], minlength=256 << mantissa_bits))
        for sign in (1, 0)
    ]
    nan = float("nan")
    return Statistics(
        count=array.size,
        nans=int(np.isnan(array).sum()),
        infs=int(np.isinf(array).sum()),
        mean=nan if empty else float(finite.mean()),
        std=nan if empty else float(finite.std()),
        minimum=nan if empty else float(finite.min()),
        maximum=nan if empty else float(finite.max()),
        norm=nan if empty else float(np.sqrt((finite**2).sum())),
        absolute_mean=nan if empty else float(np.abs(finite).mean()),
        zeros=int((array == 0).sum()),
        subnormals=0,
        half_overflows=int((np.abs(finite) >= 65520).sum()),
        half_underflows=int(((finite != 0) & (np.abs(finite) <= 2.0**-25)).sum()),
        histogram=HistogramCounts(mantissa_bits, *sides),
        **more,
    )


def record(name, step, values, *, micro_batch=None, replica=0, **more):
    """Return a record of some values."""
    return Record(name, step, micro_batch, replica, statistics(values, **more))


LAYERS = ("features.0", "features.3", "features.6", "classifier.1", "classifier.4")


def training(steps=60, seed=0, fault=None):
    """Return records of a training of five layers, as it might be.

    Args:
        steps: The number of steps.
        seed: Of the random numbers.
        fault: From this step on one gradient has NaN, and one layer's outputs are zero.
    """
    random = np.random.default_rng(seed)
    found = []
    for step in range(steps):
        decay = 1 / (1 + step / 15)
        broken = fault is not None and step >= fault
        for place, layer in enumerate(LAYERS):
            outputs = np.maximum(random.normal(0.1 * place, 1 + step / steps, 256), 0)
            if broken and place == 2:
                outputs[:] = 0
            found.append(record(f"{layer}/Relu:0", step, outputs, micro_batch=0))
        for place, layer in enumerate(reversed(LAYERS)):
            gradients = random.normal(0, decay * 10.0**-place, 300)
            if broken and place == 1:
                gradients[: step - fault + 1] = np.nan
            if fault is not None and step == fault - 1 and place == 3:
                gradients *= 1000
                gradients[0] = np.inf
            found.append(record(f"Gradient___{layer}.weight", step, gradients, mantissa_bits=1))
        for layer in LAYERS:
            weights = random.normal(0, 0.05, 300) * (1 + 0.01 * step)
            found.append(record(f"UpdatedVar___{layer}.weight", step, weights))
    return found
