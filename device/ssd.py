"""Mamba-2 in chunks on a GPU, its stages before the outputs: launchers of cuda/ssd.cu."""

from __future__ import annotations

import math

import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .faults import first_fault
from .gdn_chunks import fits
from .launch import PROVIDER, kind, results, start
from .runtime import current

FAMILY = "ssd"
THREADS = 128
_FLOAT32 = np.dtype(np.float32)


def steps_arguments(dt, dt_bias, dt_softplus: bool, dt_min: float, dt_max: float) -> list:
    """How kernels take time steps: STEPS_PARAMETERS of cuda/ssd_steps.cuh."""
    return [dt, kind(dt), dt_bias, dt.shape[1], int(dt_softplus), np.float32(dt_min), np.float32(dt_max)]


def check_cuts(op: str, cuts, tokens: int, size: int) -> None:
    """Refuse chunks that are empty, longer than `size`, or do not span 0 ... `tokens`."""
    if not len(cuts) or first_fault(op, FAMILY, "ssd_cuts_fit", len(cuts), [cuts, tokens, size]) is not None:
        got = current().read(cuts).tolist()
        raise ContractError(op, "cu_chunk_seqlens", got, f"0 to {tokens} in steps of 1 to {size}")


def check_ascent(op: str, name: str, numbers, least: int, most: int, ends: bool) -> None:
    """Refuse numbers that fall or lie outside of `least` ... `most`; ends: the last one must be `most`."""
    args = [numbers, least, most, int(ends)]
    if first_fault(op, FAMILY, "ssd_ascends", len(numbers), args) is not None:
        got = current().read(numbers).tolist()
        raise ContractError(op, name, got, f"never falling, from {least} {'up' if ends else 'at most'} to {most}")


def run_plan(op: str, starts, size: int, chunks: int, cuts, last, owner) -> None:
    """cu_chunk_seqlens, last_chunk_indices and seq_idx of `chunks` places, the last of which may be empty."""
    args = [starts, len(starts) - 1, size, chunks, cuts, last, owner]
    start(op, FAMILY, "ssd_plan", len(starts) - 1, (THREADS, 1), args)


def run_cumsum(op: str, steps: list, A, cuts, chunks: int, size: int, tokens: int, sums, dts) -> None:
    args = [*steps, A, cuts, chunks, size, tokens, sums, dts]
    start(op, FAMILY, "ssd_chunk_cumsum", -(-chunks * len(A) // THREADS), (THREADS, 1), args)


def run_states(op: str, x, B, dts, sums, cuts, chunks: int, size: int, states) -> None:
    tokens, heads, width = x.shape
    args = [x, B, kind(x), heads, width, *B.shape[1:], dts, sums, cuts, chunks, size, tokens, states]
    start(op, FAMILY, "ssd_chunk_state", chunks * heads, (THREADS, 1), args, 4 * fits(op, size))


def run_passing(op: str, form, states, sums, last, sequences: int, size: int, initial, out, dtype, final) -> None:
    """form: chunks, heads, and the elements of a head's state."""
    chunks, heads, elements = form
    args = [
        states, sums, last, sequences, chunks, heads, size, elements, initial,
        0 if initial is None else kind(initial), out, kind(dtype), final,
    ]  # fmt: skip
    start(op, FAMILY, "ssd_state_passing", -(-sequences * heads * elements // THREADS), (THREADS, 1), args)


def run_bmm(op: str, C, B, cuts, chunks: int, size: int, CB) -> None:
    tokens, groups, length = C.shape
    args = [C, B, kind(C), groups, length, cuts, chunks, size, tokens, CB]
    start(op, FAMILY, "ssd_bmm_chunk", -(-chunks * groups * size * size // THREADS), (THREADS, 1), args)


@providers.provider("ssd_chunk_cumsum", "cuda", PROVIDER)
def ssd_chunk_cumsum(
    dt, A, cu_chunk_seqlens, dt_bias=None, *, chunk_size, dt_softplus=False, dt_min=0.0, dt_max=math.inf, out=None
):
    """oracle.ssd.ssd_chunk_cumsum."""
    op, (tokens, heads), chunks = "ssd_chunk_cumsum", dt.shape, max(len(cu_chunk_seqlens) - 1, 0)
    form = (heads, chunks, chunk_size), _FLOAT32
    sums, dts = results(op, out, (dt, A, cu_chunk_seqlens, dt_bias), form, form)
    check_cuts(op, cu_chunk_seqlens, tokens, chunk_size)
    steps = steps_arguments(dt, dt_bias, dt_softplus, dt_min, dt_max)
    run_cumsum(op, steps, A, cu_chunk_seqlens, chunks, chunk_size, tokens, sums, dts)
    return sums, dts


@providers.provider("ssd_chunk_state", "cuda", PROVIDER)
def ssd_chunk_state(x, B, dt, dA_cumsum, cu_chunk_seqlens, *, out=None):
    """oracle.ssd.ssd_chunk_state."""
    op, (heads, chunks, size) = "ssd_chunk_state", dt.shape
    form = (chunks, heads, x.shape[2], B.shape[2]), _FLOAT32
    (states,) = results(op, out, (x, B, dt, dA_cumsum, cu_chunk_seqlens), form)
    check_cuts(op, cu_chunk_seqlens, len(x), size)
    run_states(op, x, B, dt, dA_cumsum, cu_chunk_seqlens, chunks, size, states)
    return states


@providers.provider("ssd_state_passing", "cuda", PROVIDER)
def ssd_state_passing(states, dA_cumsum, last_chunk_indices, initial_states=None, *, state_dtype=None, out=None):
    """oracle.ssd.ssd_state_passing."""
    op, (chunks, heads, width, length) = "ssd_state_passing", states.shape
    dtype, last = np.dtype(state_dtype or _FLOAT32), last_chunk_indices
    (target,) = results(op, out, (states, dA_cumsum, last, initial_states), (states.shape, dtype))
    check_ascent(op, "last_chunk_indices", last, -1, chunks - 1, True)
    form = (chunks, heads, width * length)
    run_passing(op, form, states, dA_cumsum, last, len(last), dA_cumsum.shape[2], initial_states, target, dtype, None)
    return target


@providers.provider("ssd_bmm_chunk", "cuda", PROVIDER)
def ssd_bmm_chunk(C, B, cu_chunk_seqlens, *, chunk_size, out=None):
    """oracle.ssd.ssd_bmm_chunk."""
    op, chunks = "ssd_bmm_chunk", max(len(cu_chunk_seqlens) - 1, 0)
    (CB,) = results(op, out, (C, B, cu_chunk_seqlens), ((chunks, C.shape[1], chunk_size, chunk_size), _FLOAT32))
    check_cuts(op, cu_chunk_seqlens, len(C), chunk_size)
    run_bmm(op, C, B, cu_chunk_seqlens, chunks, chunk_size, CB)
    return CB
