"""`TRUTH` and `MIRROR`: one interface, two arithmetics. An oracle is one body written against it.

`PLAIN` is a mirror too, of kernels that take matrix products in another order.
"""

from __future__ import annotations

from functools import wraps

import ml_dtypes
import numpy as np

from ..errors import ContractError
from . import double, transcendental
from .fma import fma_f32
from .orders import Order, sequential
from .reduce import ordered_dot, ordered_matmul, ordered_sum
from .rounding import STORAGE_DTYPES, round_to
from .truth_matmul import blocked_matmul, blocked_sum

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def widen(a: np.ndarray, dtype) -> np.ndarray:
    """a in float32 or float64; exact, but for float64 or large integers into float32, which round once."""
    a = np.asarray(a)
    if a.dtype == _BFLOAT16:
        a = np.left_shift(a.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    elif a.dtype.kind not in "fiub" and a.dtype not in STORAGE_DTYPES:
        raise ContractError("load", "a", a.dtype, "a storage dtype, integers or bool")
    return a.astype(dtype, copy=False)


def _quiet(method):
    """Infinities and NaN are values here, not events: no floating-point warning leaves an operation."""

    @wraps(method)
    def call(self, *args, **kwargs):
        with np.errstate(all="ignore"):
            return method(self, *args, **kwargs)

    return call


class Arithmetic:
    """The operations that both arithmetics share; `dtype` is what they compute in.

    Operands are arrays of `dtype` (from `load`, `const` or another operation) and Python numbers. Anything else is a
    TypeError: a bfloat16 or float64 array slipping into float32 arithmetic would round in places nobody declared.
    """

    name: str
    dtype: np.dtype

    def _own(self, x) -> np.ndarray:
        if isinstance(x, (int, float)) and not isinstance(x, np.generic):
            return self.dtype.type(x)
        x = np.asarray(x)
        if x.dtype != self.dtype:
            raise TypeError(f"{self.name} computes in {self.dtype}, got {x.dtype}: load() it first")
        return x

    def __repr__(self) -> str:
        return self.name

    @_quiet
    def load(self, a) -> np.ndarray:
        """a, any storage dtype or integers, in the compute dtype. Exact, but float64 into MIRROR rounds once."""
        return widen(a, self.dtype)

    @_quiet
    def store(self, x, dtype, **policy) -> np.ndarray:
        """x rounded once, to nearest even, to the storage dtype; `policy` as in `round_to`."""
        return round_to(self._own(x), dtype, **policy)

    @_quiet
    def const(self, c) -> np.generic:
        """The number c in the compute dtype."""
        return self.dtype.type(c)

    @_quiet
    def add(self, a, b) -> np.ndarray:
        """a + b."""
        return np.add(self._own(a), self._own(b))

    @_quiet
    def sub(self, a, b) -> np.ndarray:
        """a - b."""
        return np.subtract(self._own(a), self._own(b))

    @_quiet
    def mul(self, a, b) -> np.ndarray:
        """a * b."""
        return np.multiply(self._own(a), self._own(b))

    @_quiet
    def div(self, a, b) -> np.ndarray:
        """a / b."""
        return np.divide(self._own(a), self._own(b))

    @_quiet
    def sqrt(self, x) -> np.ndarray:
        """The square root."""
        return np.sqrt(self._own(x))

    def neg(self, x) -> np.ndarray:
        """-x."""
        return np.negative(self._own(x))

    def abs(self, x) -> np.ndarray:
        """|x|."""
        return np.abs(self._own(x))

    def minimum(self, a, b) -> np.ndarray:
        """a where a <= b, else b; NaN if either is."""
        a, b = self._own(a), self._own(b)
        return np.where((a <= b) | (a != a), a, b)

    def maximum(self, a, b) -> np.ndarray:
        """a where a >= b, else b; NaN if either is."""
        a, b = self._own(a), self._own(b)
        return np.where((a >= b) | (a != a), a, b)

    def where(self, condition, a, b) -> np.ndarray:
        """a where the condition holds, else b."""
        return np.where(condition, self._own(a), self._own(b))

    def max(self, x, axis: int = -1, keepdims: bool = False) -> np.ndarray:
        """The maximum over an axis: no rounding, any order; NaN if there is one; the sign of a zero is unspecified."""
        return np.max(self._own(x), axis=axis, keepdims=keepdims)


class Truth(Arithmetic):
    """float64 throughout; orders and fusion make no difference that matters and are ignored."""

    name, dtype = "TRUTH", np.dtype(np.float64)

    @_quiet
    def fma(self, a, b, c) -> np.ndarray:
        """a * b + c."""
        return self._own(a) * self._own(b) + self._own(c)

    @_quiet
    def sum(self, x, axis: int = -1, order: Order = sequential, keepdims: bool = False) -> np.ndarray:
        """The sum over an axis, SUM_BLOCK neighbours at a time."""
        out = blocked_sum(np.moveaxis(self._own(x), axis, -1))
        return np.expand_dims(out, axis) if keepdims else out

    @_quiet
    def dot(self, a, b, order: Order = sequential, fused: bool = False) -> np.ndarray:
        """sum_k a[..., k] * b[..., k]; a and b broadcast together."""
        return np.einsum("...k,...k->...", self._own(a), self._own(b))

    @_quiet
    def matmul(self, a, b_t, order: Order = sequential, fused: bool = False) -> np.ndarray:
        """a[M, K] @ b_t[N, K].T; both may be in a storage dtype, and b_t is never widened whole.

        An element's bytes depend on its row of a, its row of b_t and K alone, not on M, N or their places.
        """
        return blocked_matmul(self.load(a), np.asarray(b_t), widen)


class Mirror(Arithmetic):
    """IEEE float32, each operation rounded, in the order and with the fusions that the kernel declares."""

    name, dtype = "MIRROR", np.dtype(np.float32)

    def fma(self, a, b, c) -> np.ndarray:
        """RN(a * b + c), one rounding."""
        return fma_f32(a, b, c)

    @_quiet
    def sum(self, x, axis: int = -1, order: Order = sequential, keepdims: bool = False) -> np.ndarray:
        """The sum over an axis, in `order`."""
        out = ordered_sum(np.moveaxis(self._own(x), axis, -1), order)
        return np.expand_dims(out, axis) if keepdims else out

    @_quiet
    def dot(self, a, b, order: Order = sequential, fused: bool = False) -> np.ndarray:
        """sum_k a[..., k] * b[..., k] in `order`; fused: accumulated by fma."""
        return ordered_dot(self._own(a), self._own(b), order, fused)

    @_quiet
    def matmul(self, a, b_t, order: Order = sequential, fused: bool = False) -> np.ndarray:
        """out[m, n] = dot(a[m], b_t[n]); both may be in a storage dtype, and b_t is never widened whole."""
        return ordered_matmul(self.load(a), np.asarray(b_t), order, fused, self.load)


class Plain(Mirror):
    """The mirror of kernels that sum matrix products as a scalar loop does, whatever order the op declares."""

    name = "MIRROR, products over ascending k, product and sum rounded"

    def matmul(self, a, b_t, order: Order = sequential, fused: bool = False) -> np.ndarray:
        """out[m, n] = ((0 + a[m, 0] * b_t[n, 0]) + a[m, 1] * b_t[n, 1]) ..., each product and each sum rounded."""
        return super().matmul(a, b_t, sequential, False)


def _function(name: str, module):
    compute = getattr(module, name)

    @_quiet
    def call(self, x) -> np.ndarray:
        return compute(self._own(x))

    call.__name__, call.__doc__ = name, compute.__doc__
    return call


FUNCTIONS = ("exp", "log", "log1p", "tanh", "sigmoid", "silu", "softplus", "erf", "gelu_tanh", "gelu_erf")
for _name in FUNCTIONS:
    setattr(Truth, _name, _function(_name, double))
    setattr(Mirror, _name, _function(_name, transcendental))

TRUTH, MIRROR, PLAIN = Truth(), Mirror(), Plain()
