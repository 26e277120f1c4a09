"""The transcendental functions of `MIRROR`, in float32."""

from __future__ import annotations

import numpy as np

from . import double


def _rounded(function):
    def call(x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(function(np.asarray(x, np.float64))).astype(np.float32)

    call.__doc__ = function.__doc__
    return call


exp, log, log1p, tanh = (_rounded(f) for f in (double.exp, double.log, double.log1p, double.tanh))
sigmoid, silu, softplus = (_rounded(f) for f in (double.sigmoid, double.silu, double.softplus))
erf, gelu_tanh, gelu_erf = (_rounded(f) for f in (double.erf, double.gelu_tanh, double.gelu_erf))
