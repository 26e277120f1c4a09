"""What the families of low-bit weights share: their checks, their example data, weights by groups, the product.

A weight is (code - zero point) * scale of its group; groups are neighbours along K, or named row by row by g_idx.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops import lowbit
from vtlab.ops.contract import Bound, Parity, Scalar, Tensor, refuse
from vtlab.ops.dtypes import FLOATS
from vtlab.ops.numerics import TRUTH

from .matmul import ORDER

HALVES = ("bfloat16", "float16")
_ROWS = 32
BITS = Scalar(int, axis="bits", minimum=2, maximum=8)
STEPS = "(K + 511) // 512 * 16 + 33"
WHY = (
    "a chain of one fma for each of its ceil(K / 512) * 16 products, then at most 32 sums, and the factor of the store"
)
STORED_TWICE = Parity(
    "nmse", 2.0**-16, "tensor cores: the sum and the truth are stored once each, 2^-9 of them at most in bfloat16, so "
    "(2 * 2^-9)^2; beside it float32 sums of K products are nothing",
)  # fmt: skip
ROUNDED_THRICE = Parity("nmse", 2.0**-13, "as with one store, for up to three roundings on either side: (6 * 2^-9)^2")
WEIGHT_ROUNDS = ("w = T((q - zero) * scale), the difference exact", "out = T(sum_k x * w)")
FINITE_SCALES = (
    "NaN and infinite scales are refused; those of activations as in any product. A scale of zero gives zeros"
)
ONCE = Bound(ulps=0, why="a code of at most nine bits times a scale is one product: of 16-bit scales exact in float32, "
              "of float32 scales the rounding itself")  # fmt: skip


def known_bits(*allowed: int):
    """A check that `bits` is one of `allowed`."""

    def check(arguments, axes):
        if arguments["bits"] not in allowed:
            raise refuse("bits", arguments["bits"], f"one of {', '.join(map(str, allowed))}")

    check.__doc__ = f"bits is one of {', '.join(map(str, allowed))}"
    return check


def whole_runs(name: str, axis: int, *, packed: bool):
    """A check that `axis` of an argument holds whole words, of 3 bits whole threes of them."""

    def check(arguments, axes):
        bits, size = arguments["bits"], arguments[name].shape[axis]
        unit = lowbit.run_length(bits) * (bits if packed else 32) // 32
        if size % unit:
            raise refuse(
                name, f"shape {tuple(arguments[name].shape)}", f"axis {axis} a multiple of {unit} ({bits} bits)"
            )

    check.__doc__ = f"axis {axis} of {name} is whole 32-bit words, of 3 bits whole runs of three words"
    return check


def multiple_of(name: str, axis: int, unit: int):
    """A check that `axis` of an argument is a multiple of `unit`."""

    def check(arguments, axes):
        if arguments[name].shape[axis] % unit:
            raise refuse(name, f"shape {tuple(arguments[name].shape)}", f"axis {axis} a multiple of {unit}")

    check.__doc__ = f"axis {axis} of {name} is a multiple of {unit}"
    return check


def codes_in_range(name: str = "q", bits=None):
    """A check that codes fit their bits."""

    def check(arguments, axes):
        q, limit = arguments[name], 1 << (bits or arguments["bits"])
        if isinstance(q, np.ndarray) and q.size and (q.min() < 0 or q.max() >= limit):
            raise refuse(name, f"codes {q.min()} to {q.max()}", f"0 to {limit - 1}")

    check.__doc__ = f"0 <= {name} < 2^bits"
    return check


def finite(*names: str):
    """A check that scales, or what they are made from, hold no NaN and no infinity; on a GPU the host does not look."""

    def check(arguments, axes):
        for name in names:
            value = arguments[name]
            if isinstance(value, np.ndarray) and not np.isfinite(value.astype(np.float32, copy=False)).all():
                raise refuse(name, "a NaN or an infinity", "finite numbers")

    check.__doc__ = f"{' and '.join(names)} finite; on a GPU the host does not look"
    check.finite = names
    return check


def permutation(name: str, size):
    """A check that an argument names each of size(arguments) places once."""

    def check(arguments, axes):
        order = arguments[name]
        if not isinstance(order, np.ndarray):
            return
        if len(order) != size(arguments):
            raise refuse(name, f"{len(order)} indices", f"{size(arguments)}")
        if order.size and (order.min() < 0 or order.max() >= len(order)):
            raise refuse(name, f"indices {order.min()} to {order.max()}", f"0 to {len(order) - 1}")
        if len(np.unique(order)) != len(order):
            raise refuse(name, "an index twice", "a permutation")

    check.__doc__ = f"{name} is a permutation of the rows"
    return check


def groups_divide(name: str, rows):
    """A check that the rows of scales `name` divide K = rows(arguments)."""

    def check(arguments, axes):
        groups, k = arguments[name].shape[0], rows(arguments)
        if groups < 1 or k % groups:
            raise refuse(name, f"{groups} groups", f"a number that divides K = {k}")

    check.__doc__ = f"the groups of {name} divide K"
    return check


def groups_in_range(name: str, scales: str):
    """A check that every row's group has scales."""

    def check(arguments, axes):
        g_idx, groups = arguments[name], arguments[scales].shape[0]
        if isinstance(g_idx, np.ndarray) and g_idx.size and (g_idx.min() < 0 or g_idx.max() >= groups):
            raise refuse(name, f"groups {g_idx.min()} to {g_idx.max()}", f"0 to {groups - 1}")

    check.__doc__ = f"0 <= {name} < groups"
    return check


def random_words(rng, shape) -> np.ndarray:
    """Words of random bits."""
    return rng.integers(-(1 << 31), 1 << 31, shape)


def words(rows, columns, **more) -> Tensor:
    """An int32 tensor of random words; `rows` and `columns` are texts of axes, also read as Python on the example."""
    shape = f"{rows} {columns}"

    def draw(rng, axes):
        from vtlab.ops.shapes import sizes

        return random_words(rng, sizes(shape, {k: v for k, v in axes.items() if isinstance(v, int)}))

    return Tensor(shape, ("int32",), values=draw, **more)


def positive_scales(shape: str, kinds=FLOATS, **more) -> Tensor:
    """Scales around 0.01, as weights of unit rows have them."""

    def draw(rng, axes):
        from vtlab.ops.shapes import sizes

        return rng.uniform(0.004, 0.02, sizes(shape, {k: v for k, v in axes.items() if isinstance(v, int)}))

    return Tensor(shape, kinds, values=draw, **more)


def rounded(nx, value, dtype) -> np.ndarray:
    """The value rounded to a storage dtype, back in the compute dtype: a rounding point in both arithmetics."""
    return nx.load(nx.store(value, dtype))


def by_groups(array: np.ndarray, groups: int) -> np.ndarray:
    """[K, N] -> [groups, K / groups, N]."""
    return array.reshape(groups, array.shape[0] // groups, array.shape[1])


def dequantised(nx, q, zero, scales, g_idx=None) -> np.ndarray:
    """T((q - zero) * scale) [K, N] in the scales' dtype T; zero [G, N] or one number; the difference is exact."""
    zero = np.broadcast_to(np.asarray(zero, np.int32), scales.shape)
    if g_idx is not None:
        return nx.store(nx.mul(nx.load(q - zero[g_idx]), nx.load(scales[g_idx])), scales.dtype)
    out = np.empty(q.shape, scales.dtype)
    size = len(q) // len(scales)
    for g, scale in enumerate(nx.load(scales)):
        for start in range(g * size, (g + 1) * size, _ROWS):  # in pieces that stay in the caches
            rows = slice(start, min(start + _ROWS, (g + 1) * size))
            out[rows] = nx.store(nx.mul(nx.load(q[rows] - zero[g]), scale), scales.dtype)
    return out


def total(nx, x, weights) -> np.ndarray:
    """sum_k x[m, k] * weights[k, n] in ORDER, from +0."""
    return nx.add(nx.matmul(nx.load(x), weights.T, order=ORDER, fused=True), 0.0)


def magnitudes(x, weights) -> np.ndarray:
    """sum_k |x_k| |w_k|: what the roundings of a sum are relative to."""
    return np.abs(TRUTH.load(x)) @ np.abs(TRUTH.load(weights))


def product_bound(weights, x: str) -> Bound:
    """The bound of one product with weights(TRUTH, arguments), rounded once."""

    def scale(arguments, results):
        return magnitudes(arguments[x], weights(TRUTH, arguments))

    return Bound(STEPS, scale=scale, ulps=1, why=WHY)
