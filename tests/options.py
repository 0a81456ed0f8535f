"""Options as most tests want them."""

import popsim_torch as poptorch


def make_options(d=1, ga=1, *, seed=None):
    """Return options without a progress bar.

    Args:
        d: Device iterations.
        ga: Micro-batches of an update.
        seed: Of random numbers on the device.
    """
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    options.deviceIterations(d)
    options.Training.gradientAccumulation(ga)
    if seed is not None:
        options.randomSeed(seed)
    return options
