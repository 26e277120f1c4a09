"""What the checks of the recurrent families share: plain loops to compare with, unrounded evaluation, goldens."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from vtlab.ops.numerics import TRUTH
from vtlab.ops.table import Op, lookup

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


def assert_golden(golden: GoldenCase, more: float = 0.0) -> None:
    """vLLM's results within the mirror's bound around the truth; `more` roundings where its kernel has others."""
    found = lookup(golden.op)
    arguments = found.bind((), golden.call())
    bound = replace(found.contract.mirror, roundings=f"{found.contract.mirror.roundings} + {more}")
    widened = SimpleNamespace(contract=replace(found.contract, mirror=bound), bind=found.bind)
    truth = evaluate(found, TRUTH, arguments)
    names = [*found.contract.returns, *found.contract.mutates]
    assert_within_bound(widened, _copied(arguments), truth, tuple(golden.outputs[n] for n in names), str(golden))


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
