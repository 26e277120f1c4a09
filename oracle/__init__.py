"""The NumPy definitions: one module per family, one function per op. ``from vtlab import oracle``; ``oracle.rms_norm(x, w)``.

Calling an op evaluates its truth (float64, one rounding at each rounding point the contract names);
``oracle.rms_norm.mirror(...)`` evaluates the float32 mirror that device kernels equal to the byte.
"""

from __future__ import annotations

from .norm import rms_norm

__all__ = ["rms_norm"]
