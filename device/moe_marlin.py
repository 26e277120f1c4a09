"""Experts' products with weights in Marlin's layouts on a GPU: launchers of cuda/moe_marlin.cu.

Shapes are marlin_gemm's; a wrong id is treated as moe_grouped_gemm treats it.
"""

from __future__ import annotations

from typing import NamedTuple

from vtlab.ops import providers
from vtlab.ops.lowbit import QUANT_TYPES

from .codes import settled
from .judged import judged_by_norm
from .launch import PROVIDER, kind, results, start, vectors
from .moe import by_expert, check_experts
from .moe_packed import NAMES, product
from .packed_loaded import Form
from .runtime import current
from .w4a16 import CHUNK, COLUMNS, aligned, fits

_OP = "moe_wna16_marlin_gemm"

judged_by_norm(_OP)


class _Loaded(NamedTuple):
    """A kernel of cuda/moe_marlin_loaded.cuh, and pairs an expert from which on it serves."""

    least: int
    form: Form


_LOADED, _OWN = (_Loaded(33, Form(64, 2, 1, 1)), _Loaded(96, Form(128, 2, 1, 1))), 2048 + 128 + 32


def _loads(groups: int, depth: int, bits: int, perm) -> bool:
    """Whether Hopper's kernels for many pairs know the weights."""
    whole = groups > 1 and depth // groups % CHUNK == 0
    return current().capability() == (9, 0) and whole and bits == 4 and perm is None


def _loaded_product(x, ids, factors, out, experts: int, own: tuple, waits: bool) -> None:
    """Through the highest tiles that there are pairs enough for; own: the weights."""
    if waits:
        check_experts(_OP, ids, experts)
    (pairs, columns), depth = out.shape, x.shape[1]
    form = next(form for least, form in reversed(_LOADED) if pairs >= least * experts)
    stages, shared = form.shared(_OWN)
    order, tiles, count = by_expert(_OP, ids, experts, form.rows)
    args = [
        ids.shape[1] if len(x) != pairs else 1, experts, columns, depth, x, ids, factors, out, order, tiles, count,
        *own, int(vectors(columns, (out, columns))), stages,
    ]  # fmt: skip
    grid = count * -(-columns // (form.groups * COLUMNS))
    name = f"moe_marlin_4_{NAMES[kind(x)]}_{form.name}"
    start(_OP, "moe_marlin", name, grid, (form.threads, 1), args, shared + 4 * form.rows)


@providers.provider(_OP, "cuda", PROVIDER)
def moe_wna16_marlin_gemm(
    a, b_q_weight, b_scales, ids, weights=None, b_zeros=None, b_bias=None, perm=None, *, quant_type, out=None
):
    """oracle.moe_marlin.moe_wna16_marlin_gemm, within its norm; groups of 16, 32 or a multiple of 64, as Marlin's are.

    Without `out` the call waits for the device and raises ContractError naming the first wrong id. With `out` it must
    not wait, so that it can be captured: the row of a wrong id becomes NaN.
    """
    known, (experts, groups, columns), depth = QUANT_TYPES[quant_type], b_scales.shape, a.shape[1]
    if not fits(columns, depth, depth // groups):
        return NotImplemented
    given = (a, b_q_weight, b_scales, ids, weights, b_zeros, b_bias, perm)
    (target,) = results(_OP, out, given, ((ids.size, columns), a.dtype))
    if target.size:
        scales, single = (settled(b_scales), None) if groups > 1 else (None, b_scales)
        x, words, zeros = aligned(_OP, a), settled(b_q_weight), settled(b_zeros)
        if _loads(groups, depth, known.bits, perm) and ids.size >= _LOADED[0].least * experts:
            own = (depth // groups, known.bias, words, scales, zeros, b_bias)
            _loaded_product(x, ids, weights, target, experts, own, out is None)
            return target
        own = (depth // groups, known.bias, words, scales, zeros, single, b_bias, perm)
        product(_OP, "moe_marlin", f"moe_marlin_{known.bits}", COLUMNS, x, own, ids, weights, target,
                columns, experts, out is None)  # fmt: skip
    return target
