"""Index-only kernels in Python, compiled by numba-cuda: a second provider of ops that move bytes by index.

The same functions run on a machine without a GPU under Numba's simulator (NUMBA_ENABLE_CUDASIM=1), a Python thread
for each of the kernel's. Importing registers the providers; Numba is asked for at the first call.
"""

from __future__ import annotations

from . import elementwise, kv_blocks, kv_cache

__all__ = ["elementwise", "kv_blocks", "kv_cache"]
