"""Elementwise kernels: which function runs is a number, looked at once for 16 elements.

The items are stretches of CHUNK elements of a row; contiguous arrays are one long row.
"""

from __future__ import annotations

import numpy as np

from ..compiling import device, kernel
from .lanes import where
from .memory import address, copy_bytes, get_i32, get_i64, load, store, through
from .transcendental import exp, sigmoid, silu, softplus, tanh

CHUNK = 2048
COPY, RELU, SCALE, CAP = 0, 1, 2, 3
ADD, PRODUCT, SILU, GELU, CLAMP, GATE = 0, 1, 2, 3, 4, 5


@device
def _unary(x, what, point, a):
    if what == RELU:
        return where(x > np.float32(0), x, np.float32(0))
    if what == SCALE:
        return x * a
    if what == CAP:
        return through(tanh(through(x / a, point)), point) * a
    return x


@kernel("iiaiaiiiiiif")
def unary(begin, end, x, x_stride, out, x_kind, out_kind, width, chunks, what, point, a):
    """out = f(x). `point`: the kind to which vLLM's intermediate values round, 0 for none."""
    for item in range(begin, end):
        row, first = item // chunks, item % chunks * CHUNK
        for i in range(first, min(first + CHUNK, width), 16):
            value = load(x, row * x_stride + i, width - i, x_kind)
            store(_unary(value, what, point, a), out, row * width + i, width - i, out_kind)


@device
def _clamped(gate, up, point, act_point, limit, alpha, beta):
    """gate * sigmoid(alpha * gate) * (up + beta) with the gate clamped above, up on both sides."""
    gate = through(where(gate > limit, limit, gate), point)
    up = where(up < -limit, -limit, up)
    up = through(where(up > limit, limit, up), point)
    act = gate * through(sigmoid(through(gate * alpha, point)), point)
    return through(act, act_point) * through(up + beta, point)


@device
def _gelu(x):
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), tanh rounded: what the contract defines."""
    cube = ((x * np.float32(0.044715)) * x) * x
    t = tanh((x + cube) * np.float32(0.7978845608028654))
    return (x * np.float32(0.5)) * (t + np.float32(1))


@device
def _binary(x, y, what, point, act_point, a, b, c):
    if what == ADD:
        return x + y
    if what == PRODUCT:
        return x * y
    if what == SILU:
        return through(silu(x), act_point) * y
    if what == GELU:
        return through(_gelu(x), act_point) * y
    if what == CLAMP:
        return _clamped(x, y, point, act_point, a, b, c)
    return x * through(sigmoid(y), act_point)


@kernel("iiaiaiiaiiiiiiiifff")
def binary(
    begin, end, x, x_stride, y, y_first, y_stride, out, x_kind, y_kind, out_kind, width, chunks, what, point, act_point,
    a, b, c,
):  # fmt: skip
    """out = f(x, y); y begins at element y_first and has rows y_stride apart, 0 for one row that all share."""
    for item in range(begin, end):
        row, first = item // chunks, item % chunks * CHUNK
        for i in range(first, min(first + CHUNK, width), 16):
            left = width - i
            u = load(x, row * x_stride + i, left, x_kind)
            v = load(y, y_first + row * y_stride + i, left, y_kind)
            store(_binary(u, v, what, point, act_point, a, b, c), out, row * width + i, left, out_kind)


@kernel("iiaiaiaiii")
def gather(begin, end, table, table_kind, ids, wide, out, out_kind, width, size):
    """out[t] = table[ids[t]]: bytes where the kinds agree."""
    for t in range(begin, end):
        row = get_i64(ids, t) if wide else np.int64(get_i32(ids, t))
        if table_kind == out_kind:
            copy_bytes(address(out) + t * width * size, address(table) + row * width * size, width * size)
        else:
            for i in range(0, width, 16):
                store(load(table, row * width + i, width - i, table_kind), out, t * width + i, width - i, out_kind)


@kernel("iiaiaaaiii")
def columns(begin, end, x, stride, first, second, third, a, b, c):
    """Rows of x, `stride` bytes apart, cut into the rows of three contiguous arrays of a, b and c bytes."""
    for row in range(begin, end):
        at = address(x) + row * stride
        copy_bytes(address(first) + row * a, at, a)
        copy_bytes(address(second) + row * b, at + a, b)
        copy_bytes(address(third) + row * c, at + a + b, c)


@kernel("iiaaii")
def rows(begin, end, x, out, stride, size):
    """Rows of `size` bytes of contiguous x to rows `stride` bytes apart."""
    for row in range(begin, end):
        copy_bytes(address(out) + row * stride, address(x) + row * size, size)


@kernel("iiaiaaii")
def halves(begin, end, x, stride, first, second, heads, size):
    """Rows of x, `stride` bytes apart, of heads of two halves of `size` bytes, cut into two contiguous arrays."""
    for row in range(begin, end):
        for head in range(heads):
            at, to = address(x) + row * stride + 2 * head * size, (row * heads + head) * size
            copy_bytes(address(first) + to, at, size)
            copy_bytes(address(second) + to, at + size, size)


@kernel("iiaiaiaaaaiiii")
def gates(begin, end, a, a_stride, b, b_stride, A_log, dt_bias, g, beta, a_kind, b_kind, beta_kind, heads):
    """g = -exp(A_log) * softplus(a + dt_bias) in float32, beta = sigmoid(b), rows of `heads`."""
    for row in range(begin, end):
        for i in range(0, heads, 16):
            left, to = heads - i, row * heads + i
            y = load(a, row * a_stride + i, left, a_kind) + load(dt_bias, i, left, 0)
            store(-exp(load(A_log, i, left, 0)) * softplus(y), g, to, left, 0)
            store(sigmoid(load(b, row * b_stride + i, left, b_kind)), beta, to, left, beta_kind)
