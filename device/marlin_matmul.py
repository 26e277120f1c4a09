"""Products with weights in Marlin's layouts on a GPU: launchers of cuda/marlin_matmul.cu."""

from __future__ import annotations

from vtlab.ops import providers
from vtlab.ops.lowbit import QUANT_TYPES

from .codes import settled
from .judged import judged_by_norm
from .launch import MULTIPROCESSORS, PROVIDER, kind, results, start, vectors
from .runtime import current
from .scratch import scratch
from .w4a16 import CHUNK, COLUMNS, NAMES, Weights, aligned, fits, product

judged_by_norm("marlin_gemm")

_SHARED = 227 << 10
_CLUSTER, _MOST_STAGES = 2, 12
_BUSY = 67
"""Tiles of 128 columns from which on those of 64 would be more than the multiprocessors."""
_STREAMED, _HIGH, _STREAM_STAGES = 64, (8, 16, 32, 64), 20
"""Rows up to which, and by how many of them, cuda/marlin_stream.cuh takes a product, and its stages at most."""
_PARTS = 8
"""Parts that K is cut into at most: as many as the blocks of a cluster."""


def loads(weights: Weights) -> bool:
    """Whether the copy engine brings the tiles: on Hopper, groups of whole chunks."""
    whole = weights.scales is None or weights.group % CHUNK == 0
    return current().capability() == (9, 0) and whole


def length_of(depth: int) -> int:
    """Chunks of a part of K."""
    return -(-depth // (CHUNK * _PARTS))


def streamed_product(op: str, a, weights: Weights, out) -> None:
    """out = a by the weights through cuda/marlin_stream.cuh."""
    (rows, depth), columns = a.shape, out.shape[1]
    high = next(high for high in _HIGH if rows <= high)
    across = -(-columns // 256)
    run = across >= MULTIPROCESSORS
    units = 4 if run or across * _PARTS <= MULTIPROCESSORS else 8
    across = -(-columns // (units * COLUMNS))
    stage = -(-(high * 128 + units * (CHUNK * COLUMNS * weights.bits // 8 + 128 + 32)) // 1024) * 1024
    fixed = 1024 + (2 * _STREAM_STAGES + 1) * 8
    stages = min(_STREAM_STAGES, (_SHARED - fixed) // stage)
    size = high * units * COLUMNS * 4
    if run:
        blocks = MULTIPROCESSORS
        states = scratch.take("marlin sums", blocks * 2 * size)
        flags = scratch.take("marlin flags", (1 + 4 * MULTIPROCESSORS) * 4, zero=True)
    else:
        blocks, flags = _PARTS * across, None
        states = scratch.take("marlin sums", across * _PARTS * size)
    rows_map = current().tensor_map(current().pointer(a), 2 * depth, rows, 2 * depth, high)
    args = [
        rows_map, rows, columns, depth, weights.words, weights.scales, weights.zeros, out, weights.group, weights.zero,
        weights.factors, weights.bias, length_of(depth), stages, blocks, states, flags,
    ]  # fmt: skip
    form = f"{weights.kernel}{'' if weights.zeros is None else '_zeros'}_{NAMES[kind(a)]}"
    name = f"{form}_{'run' if run else 'split'}_{high}_by_{units * COLUMNS}"
    start(op, "marlin_matmul", name, blocks, (128 + 128 * 2, 1), args, fixed + stages * stage)


def loaded_product(op: str, a, weights: Weights, out) -> None:
    """out = a by the weights through cuda/marlin_loaded.cuh, in the same order."""
    (rows, depth), columns = a.shape, out.shape[1]
    high = 128
    down = -(-rows // high)
    groups = 2 if down * (columns // (2 * COLUMNS)) >= _BUSY else 1
    pairs = -(-columns // (_CLUSTER * groups * COLUMNS)) * down
    stage = -(-(high * 128 + groups * (512 * weights.bits + 128 + 32)) // 1024) * 1024
    fixed = 1024 + groups * high * 128 + _MOST_STAGES * 16
    stages = min(_MOST_STAGES, (_SHARED - fixed) // stage)
    rows_map = current().tensor_map(current().pointer(a), 2 * depth, rows, 2 * depth, high // 2)
    args = [
        rows_map, rows, columns, depth, weights.words, weights.scales, weights.zeros, out, weights.group, weights.zero,
        weights.factors, weights.bias, length_of(depth), int(vectors(columns, (out, columns))), stages,
    ]  # fmt: skip
    name = f"{weights.kernel}_{NAMES[kind(a)]}_loaded_{high}_by_{groups * COLUMNS}"
    start(op, "marlin_matmul", name, _CLUSTER * pairs, (128 + 128 * groups, 1), args, fixed + stages * stage)


@providers.provider("marlin_gemm", "cuda", PROVIDER)
def marlin_gemm(a, b_q_weight, b_scales, b_zeros=None, b_bias=None, perm=None, *, quant_type, out=None):
    """oracle.marlin_matmul.marlin_gemm, within its norm; groups of 16, 32 or a multiple of 64, as Marlin's are."""
    op, known = "marlin_gemm", QUANT_TYPES[quant_type]
    (rows, depth), (groups, columns) = a.shape, b_scales.shape
    if not fits(columns, depth, depth // groups):
        return NotImplemented
    (target,) = results(op, out, (a, b_q_weight, b_scales, b_zeros, b_bias, perm), ((rows, columns), a.dtype))
    scales, factors = (settled(b_scales), None) if groups > 1 else (None, b_scales)
    weights = Weights(
        f"marlin{known.bits}", known.bits, settled(b_q_weight), scales, settled(b_zeros), depth // groups,
        known.bias, factors=factors, bias=b_bias,
    )  # fmt: skip
    left = aligned(op, a, perm)
    if not rows:
        return target
    if loads(weights):
        (streamed_product if rows <= _STREAMED else loaded_product)(op, left, weights, target)
    else:
        product(op, "marlin_matmul", left, weights, target)
    return target
