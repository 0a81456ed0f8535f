"""Stands for PopTorch in processes that a program starts: ``import poptorch`` is popsim_torch.

The runner puts the folder of this package on the path that processes inherit.
"""

import sys
from pathlib import Path

# The package that this file belongs to, whether or not it is, or another one is, on the path.
_ROOT = str(Path(__file__).resolve().parents[3])
sys.path.insert(0, _ROOT)
try:
    import popsim_torch
finally:
    sys.path.remove(_ROOT)

popsim_torch.install(replace=True)
sys.modules[__name__] = popsim_torch
