"""What the checks of the recurrent families share: plain loops to compare with, unrounded evaluation, goldens."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np

from vtlab.ops.numerics import TRUTH
from vtlab.ops.table import Op, lookup

from .compare import assert_bytes, assert_rel_l2
from .generic import _copied, assert_within_bound, evaluate
from .goldens import GoldenCase, op_cases


class Exact(type(TRUTH)):
    """float64 in which nothing is ever rounded to a storage dtype: where two forms of one recurrence are equal."""

    def store(self, x, dtype, **policy):
        return self._own(x)


EXACT = Exact()


def starts(*lengths: int) -> np.ndarray:
    """query_start_loc of sequences of these lengths."""
    return np.cumsum([0, *lengths]).astype(np.int32)


def unit(shape: tuple[int, ...], seed: int, dtype=np.float32) -> np.ndarray:
    """Rows of length 1, rounded once."""
    x = np.random.Generator(np.random.PCG64(seed)).standard_normal(shape)
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32).astype(dtype)


def delta_loop(q, k, v, decay, beta, state, cu, scale, unit_rows=False):
    """S' = S D (I - beta k k^T) + beta v k^T, o = S' q: matrices of one head after the other, in float64.

    decay: [T, H] or, one a channel, [T, H, Dk]. Returns the outputs and the last states.
    """
    heads, group = v.shape[1], v.shape[1] // k.shape[1]
    out, last = np.zeros(v.shape), state.astype(np.float64)
    for n in range(len(cu) - 1):
        for h in range(heads):
            S = last[n, h]
            for t in range(cu[n], cu[n + 1]):
                key, query = (x[t, h // group].astype(np.float64) for x in (k, q))
                if unit_rows:
                    key, query = (x / np.sqrt(x @ x + 1e-6) for x in (key, query))
                b, value = float(beta[t, h]), v[t, h].astype(np.float64)
                kept = np.diag(np.broadcast_to(decay[t, h], key.shape)) @ (np.eye(key.size) - b * np.outer(key, key))
                S = S @ kept + b * np.outer(value, key)
                out[t, h] = scale * (S @ query)
            last[n, h] = S
    return out, last


FLUSHED = 2.0**-96
"""A GPU's fast exponentials and tensor cores take subnormal numbers for 0: 64 of 2^-126 in a sum, in units of 2^-24."""


def assert_golden(golden: GoldenCase, more: float = 0.0, exact: bool = False) -> None:
    """vLLM's results within the mirror's bound around the truth; `more` roundings where its kernel has others.

    exact : 16-bit results are the truth's bytes; without it one of them may round to the other side of a tie.
    """
    found = lookup(golden.op)
    arguments, mirror = found.bind((), golden.call()), found.contract.mirror

    def scale(given, results):
        scales = mirror.scale(given, results)
        some = scales if isinstance(scales, tuple) else (scales,)
        return tuple(part + FLUSHED for part in some)

    changes = {"roundings": f"{mirror.roundings} + {more}"}
    if golden.build == "cuda" and callable(mirror.scale):
        changes["scale"] = scale
    widened = SimpleNamespace(contract=replace(found.contract, mirror=replace(mirror, **changes)), bind=found.bind)
    truth = evaluate(found, TRUTH, arguments)
    other = tuple(golden.outputs[name] for name in (*found.contract.returns, *found.contract.mutates))
    assert_within_bound(widened, _copied(arguments), truth, other, str(golden))
    parity = found.contract.parity
    for want, got in zip(truth, other):
        if parity.kind == "rel_l2":
            assert_rel_l2(got, want, parity.bound, str(golden))
        if exact and want.dtype.itemsize == 2:
            assert_bytes(got, want, str(golden))


def tf32(golden: GoldenCase) -> int:
    """Roundings that a GPU's dot products of float32 add: operands of 11 bits, 2^-10 each, so 2^15 units for both."""
    floats = [array for array in golden.inputs.values() if array.dtype.kind != "i"]
    return 2**15 if golden.build == "cuda" and floats[0].dtype == np.float32 else 0


def fma32(a, b, c) -> np.float32:
    """float32(a b + c), rounded once: the product of two float32 is exact in float64, the sum in fractions."""
    return np.float32(float(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))))


def dot32(a, b) -> np.float32:
    """sum a_i b_i as the rules' kernels form it: eight lanes of four neighbours, a chain of fma each, then a tree."""
    lanes = [np.float32(0)] * 8
    for i, (x, y) in enumerate(zip(a, b)):
        lanes[i // 4 % 8] = fma32(x, y, lanes[i // 4 % 8])
    for half in (4, 2, 1):
        lanes = [np.float32(lanes[t] + lanes[t + half]) for t in range(half)]
    return lanes[0]


def goldens(family: str, *ops: str) -> list[GoldenCase]:
    """The goldens of these ops; there are some for each."""
    found = [golden for golden in op_cases(family) if golden.op in ops]
    assert {golden.op for golden in found} == set(ops)
    return found


def kept(found: Op, run, *args, **kwargs):
    """run(...) on copies of the arrays: results and the changed ones together."""
    arguments = _copied(found.bind(args, kwargs))
    results = run(**arguments)
    results = () if results is None else results if isinstance(results, tuple) else (results,)
    return (*results, *(arguments[name] for name in found.contract.mutates))
