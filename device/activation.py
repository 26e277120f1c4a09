"""Activations on a GPU: launchers of cuda/activation.cu."""

from __future__ import annotations

import math

import numpy as np

from vtlab.ops import providers

from .early import EARLY
from .launch import KINDS, PROVIDER, kind, map_rows, results, vectors

_DEPTH = 2
"""Groups a thread of the gated kernels, as in the .cu file."""
_BLOCK, _GUESS_BLOCK = 256, 128
"""Threads of a block; of one that guesses and checks."""
_FEW_ELEMENTS = 1 << 16
"""Under this an element a thread and access: it is the functions' own latency that takes the time."""
_VARIANT = {"vt": 0, "vllm": 1, "vllm_native": 2}


def _flat(array) -> tuple[int, int]:
    """A contiguous array as one row."""
    return 1, math.prod(array.shape)


def _gated(op, kernel, rows, width, wide, args):
    """Launch a gated kernel, or its form for the kind args[3] and the variant args[5]."""
    wide, ending = wide and rows * width >= _FEW_ELEMENTS, ""
    if wide and args[3] == KINDS["float32"]:
        kernel += "_f32"
    elif wide and args[3] == KINDS["bfloat16"] and kernel in ("silu", "gelu"):
        kernel, ending = kernel + ("_rounded_bf16" if args[5] else "_bf16"), EARLY
    map_rows(op, "activation", kernel, rows, width, wide, args, _DEPTH, _GUESS_BLOCK if ending else _BLOCK, ending)


def _halves(op, kernel, x, out, rounding, *more):
    half = x.shape[-1] // 2
    (target,) = results(op, out, (x,), ((*x.shape[:-1], half), x.dtype))
    rows, stride = math.prod(x.shape[:-1]), 2 * half
    gate, up = x[..., :half], x[..., half:]
    wide = vectors(half, (x, stride), (target, half))
    args = [gate, up, stride, kind(x), target, _VARIANT[rounding], *(np.float32(value) for value in more)]
    _gated(op, kernel, rows, half, wide, args)
    return target


@providers.provider("silu_and_mul", "cuda", PROVIDER)
def silu_and_mul(x, *, rounding="vt", out=None):
    """oracle.activation.silu_and_mul."""
    return _halves("silu_and_mul", "silu", x, out, rounding)


@providers.provider("silu_and_mul_clamp", "cuda", PROVIDER)
def silu_and_mul_clamp(x, *, limit, alpha=1.0, beta=0.0, rounding="vt", out=None):
    """oracle.activation.silu_and_mul_clamp."""
    return _halves("silu_and_mul_clamp", "silu_clamp", x, out, rounding, limit, alpha, beta)


@providers.provider("gelu_and_mul", "cuda", PROVIDER)
def gelu_and_mul(x, *, rounding="vt", out=None):
    """oracle.activation.gelu_and_mul."""
    return _halves("gelu_and_mul", "gelu", x, out, rounding)


@providers.provider("moe_silu_mul", "cuda", PROVIDER)
def moe_silu_mul(gate, up, *, out=None):
    """oracle.activation.moe_silu_mul: the kernel of silu_and_mul on two tensors."""
    (target,) = results("moe_silu_mul", out, (gate, up), (gate.shape, gate.dtype))
    rows, width = _flat(gate)
    wide = vectors(width, (gate, width), (up, width), (target, width))
    args = [gate, up, width, kind(gate), target, 0]
    _gated("moe_silu_mul", "silu", rows, width, wide, args)
    return target


def _unary(op, x, out, *more):
    (target,) = results(op, out, (x,), (x.shape, x.dtype))
    rows, width = _flat(x)
    wide = vectors(width, (x, width), (target, width))
    map_rows(op, "activation", op, rows, width, wide, [x, kind(x), target, *more])
    return target


@providers.provider("relu", "cuda", PROVIDER)
def relu(x, *, out=None):
    """oracle.activation.relu."""
    return _unary("relu", x, out)


@providers.provider("soft_cap", "cuda", PROVIDER)
def soft_cap(x, cap, *, rounding="vt", out=None):
    """oracle.activation.soft_cap."""
    return _unary("soft_cap", x, out, _VARIANT[rounding], np.float32(cap))
