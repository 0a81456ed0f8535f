"""A plain and slow interpreter of programs: the executable definition of the op set.

Each op is a small function of eager PyTorch, written as its formula, independent of the kernels.
Programs with an op without such a function are refused, and the error names the op. Tests compare
the kernels with these functions. With ``wide=True`` all floating-point numbers are float64 and
nothing is rounded to a smaller dtype, so the difference to a normal run estimates the error of
every tensor.

    from popsim_torch.reference import Interpreter

    interpreter = Interpreter.like(executor, wide=True)  # weights and states of now
    outputs = interpreter.run([x, y])
    interpreter.read("fc1/Gemm:0")  # any tensor by its name, as the last run left it

``interpreter`` has the memory and the order of a run, ``call`` the inputs of an op; the ops are in
``elementwise``, ``shapes``, ``bags``, ``sums``, ``products``, ``attention``, ``recurrent``,
``norms``, ``pools``, ``losses``, ``resampling``, ``searches``, ``statistics``, ``draws``,
``updates``, ``control`` and ``host``.
"""

from popsim_torch.reference import (
    attention,
    bags,
    control,
    draws,
    elementwise,
    host,
    losses,
    norms,
    pools,
    products,
    recurrent,
    resampling,
    searches,
    shapes,
    statistics,
    sums,
    updates,
)
from popsim_torch.reference.call import OPS, Call
from popsim_torch.reference.interpreter import Interpreter

__all__ = ["OPS", "Call", "Interpreter"]

FAMILIES = (
    *(attention, bags, control, draws, elementwise, host, losses, norms, pools, products),
    *(recurrent, resampling, searches, shapes, statistics, sums, updates),
)
"""The modules that fill the table."""
