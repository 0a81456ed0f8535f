"""The lock that compilations hold: only one thread compiles at a time.

torch.fx traces with state that belongs to the process, and modules have traced tensors instead of
their weights meanwhile. So uploads of weights, maybe by another executor of the same module, hold
the lock, too.
"""

import threading

__all__ = ["compile_lock"]

compile_lock = threading.RLock()
