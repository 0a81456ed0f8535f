"""The options that most tests use."""

import popsim_torch as poptorch


def make_options(d=1, ga=1, *, seed=None):
    """Return options without a progress bar.

    Args:
        d: Device iterations.
        ga: Micro-batches per weight update.
        seed: Seed of random numbers on the device.
    """
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    options.deviceIterations(d)
    options.Training.gradientAccumulation(ga)
    if seed is not None:
        options.randomSeed(seed)
    return options
