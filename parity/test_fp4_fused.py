"""Activations and norms into NVFP4 against scalar loops, and against their two ops in a row, on the device tier too."""

from __future__ import annotations

import math

import numpy as np
import pytest

import vtlab.device  # noqa: F401  registers the ops' providers
from vtlab import oracle
from vtlab.device import runtime
from vtlab.ops import providers
from vtlab.ops.errors import ContractError
from vtlab.ops.table import lookup

from .compare import assert_bytes
from .device_run import Cuda, Framed, tupled
from .emulation import compiler
from .harness import case, checks, mutations
from .scalar import draw, floats, stored
from .test_fp4 import by_blocks, in_tiles

F32 = np.float32
G = F32([448 * 6 / 4.1])
LAYOUTS = (False, True)
KINDS = ("bfloat16", "float32", "float16")


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def silu_product(gate, up):
    return stored((g * sigmoid(g) * u for g, u in zip(floats(gate.reshape(-1)), floats(up.reshape(-1)))), gate)


def normed(x, weight, residual=None, eps=1e-6):
    """(y, new residual) row by row."""
    if residual is not None:
        sums = (a + b for a, b in zip(floats(x.reshape(-1)), floats(residual.reshape(-1))))
        residual = stored(sums, residual)
    rows = []
    for row in (x if residual is None else residual).reshape(-1, x.shape[-1]):
        inverse = 1 / math.sqrt(math.fsum(v * v for v in floats(row)) / len(row) + eps)
        rows += [v * inverse * w for v, w in zip(floats(row), floats(weight))]
    return stored(rows, x), residual


def expected(y, swizzled):
    codes, scales = by_blocks(y, float(G[0]), "vt")
    return codes, in_tiles(scales) if swizzled else scales


def same(got, want, what=""):
    for one, other in zip(got, want, strict=True):
        assert_bytes(one, other, what)


@checks("silu_mul_fp4_quant", cases=[case(kind=kind, swizzled=s) for kind in KINDS for s in LAYOUTS])
def test_silu_of_two_tensors(case):
    for shape in ((3, 64), (2, 2, 16), (48,), (0, 32)):
        gate, up = draw(shape, case.kind, 1, scale=2), draw(shape, case.kind, 2)
        want = expected(silu_product(gate, up), case.swizzled)
        same(oracle.silu_mul_fp4_quant(gate, up, G, is_sf_swizzled_layout=case.swizzled), want)


@checks("silu_and_mul_fp4_quant", cases=[case(kind=kind, swizzled=s) for kind in KINDS for s in LAYOUTS])
def test_silu_of_two_halves(case):
    for shape in ((3, 128), (2, 2, 32), (96,), (0, 64)):
        x = draw(shape, case.kind, 3, scale=2)
        gate, up = (np.ascontiguousarray(part) for part in np.split(x, 2, axis=-1))
        want = expected(silu_product(gate, up), case.swizzled)
        same(oracle.silu_and_mul_fp4_quant(x, G, is_sf_swizzled_layout=case.swizzled), want)


@checks("sigmoid_gate_fp4_quant", cases=[case(kind=kind, swizzled=s) for kind in KINDS[:2] for s in LAYOUTS])
def test_a_sigmoid_gate(case):
    for shape in ((3, 64), (2, 2, 16), (48,), (0, 32)):
        attn, gate = draw(shape, case.kind, 4), draw(shape, "float32", 5, scale=2)
        products = (a * sigmoid(g) for a, g in zip(floats(attn.reshape(-1)), floats(gate.reshape(-1))))
        want = expected(stored(products, attn, "bfloat16"), case.swizzled)
        same(oracle.sigmoid_gate_fp4_quant(attn, gate, G, is_sf_swizzled_layout=case.swizzled), want)


@checks("sigmoid_gate_fp4_quant")
def test_the_gated_value_is_rounded_whatever_it_was():
    """float32 attention that holds bfloat16 values gives the bytes of bfloat16."""
    attn, gate = draw((5, 64), "bfloat16", 6), draw((5, 64), "float32", 7)
    same(oracle.sigmoid_gate_fp4_quant(attn.astype(F32), gate, G), oracle.sigmoid_gate_fp4_quant(attn, gate, G))


@checks("rms_norm_fp4_quant", cases=[case(kind=k, swizzled=s, add=a) for k in KINDS for s in LAYOUTS for a in (0, 1)])
def test_rms_norm(case):
    for shape in ((3, 64), (2, 2, 16), (48,), (0, 32)):
        x, weight = draw(shape, case.kind, 8, scale=3), draw(shape[-1:], case.kind, 9)
        residual = draw(shape, case.kind, 10) if case.add else None
        y, new = normed(x, weight, residual, eps=0.25)
        want = (*expected(y, case.swizzled), *(() if new is None else (new,)))
        same(oracle.rms_norm_fp4_quant(x, weight, G, residual=residual, eps=0.25,
                                       is_sf_swizzled_layout=case.swizzled), want)  # fmt: skip


def calls() -> dict[str, tuple[dict, object]]:
    """Op -> (arguments, its ops in a row in the mirror: a function of the same arguments)."""
    x, wide, up = draw((5, 128), "bfloat16", 11), draw((5, 256), "bfloat16", 12), draw((5, 128), "bfloat16", 13)
    gate, weight = draw((5, 128), "float32", 14), draw((128,), "bfloat16", 15)

    def norm(x, weight, residual=None):
        return oracle.rms_norm.mirror(x, weight, residual=residual)

    return {
        "silu_mul_fp4_quant": ({"gate": x, "up": up}, oracle.moe_silu_mul.mirror),
        "silu_and_mul_fp4_quant": ({"x": wide}, oracle.silu_and_mul.mirror),
        "sigmoid_gate_fp4_quant": ({"attn": x, "gate": gate}, oracle.sigmoid_gate_bf16.mirror),
        "rms_norm_fp4_quant": ({"x": x, "weight": weight}, norm),
        "rms_norm_fp4_quant, residual": ({"x": x, "weight": weight, "residual": up}, norm),
    }


@checks("silu_mul_fp4_quant", "silu_and_mul_fp4_quant", "sigmoid_gate_fp4_quant", "rms_norm_fp4_quant")
def test_the_bytes_are_those_of_two_ops():
    for name, (arguments, first) in calls().items():
        op = getattr(oracle, name.partition(",")[0])
        for swizzled in LAYOUTS:
            y, *rest = tupled(first(**arguments))
            want = (*oracle.scaled_fp4_quant.mirror(y, G, is_sf_swizzled_layout=swizzled), *rest)
            same(op.mirror(**arguments, input_global_scale=G, is_sf_swizzled_layout=swizzled), want, name)


@pytest.mark.parametrize("swizzled", LAYOUTS)
@pytest.mark.parametrize("name", calls())
def test_a_gpu_takes_the_generated_kernels(name, swizzled, device):
    """Each op is a chain there: fresh and into `out`."""
    if not isinstance(device, Cuda) and compiler() is None:
        pytest.skip("emulation needs a C++ compiler")
    op, arguments = name.partition(",")[0], calls()[name][0]
    host = {**arguments, "input_global_scale": G, "is_sf_swizzled_layout": swizzled}
    want = getattr(oracle, op).mirror(**host)
    sent = {key: device.send(value) for key, value in host.items()}
    frames = [Framed(device, one.shape, one.dtype) for one in want]
    for out in (None, tuple(frame.inner for frame in frames)):
        with runtime.using(device.runtime):
            bound = lookup(op).bind((), sent) | ({} if out is None else {"out": out})
            got = providers.call(op, "cuda", bound)
        same([device.fetch(one) for one in got], want, name)
    for frame in frames:
        frame.check_frame(name)


X, GATE, W = draw((2, 32), "bfloat16", 16), draw((2, 32), "float32", 17), draw((32,), "bfloat16", 18)
REFUSED = {
    "silu_mul_fp4_quant": [("gate", lambda f: f(X[:, :24].copy(), X[:, :24].copy(), G)),
                           ("up", lambda f: f(X, GATE, G)),
                           ("input_global_scale", lambda f: f(X, X, F32([math.nan])))],
    "silu_and_mul_fp4_quant": [("x", lambda f: f(X[:, :16].copy(), G)), ("x", lambda f: f(X[:, :31].copy(), G)),
                               ("input_global_scale", lambda f: f(X, F32([math.inf])))],
    "sigmoid_gate_fp4_quant": [("gate", lambda f: f(X, X, G)),
                               ("attn", lambda f: f(X[:, :8].copy(), GATE[:, :8].copy(), G)),
                               ("input_global_scale", lambda f: f(X, GATE, F32([math.inf])))],
    "rms_norm_fp4_quant": [("eps", lambda f: f(X, W, G, eps=-1.0)), ("weight", lambda f: f(X, W[:16], G)),
                           ("x", lambda f: f(X[:, :24].copy(), W[:24], G)),
                           ("input_global_scale", lambda f: f(X, W, F32([math.inf])))],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_fused_fp4_refuses(name):
    for argument, call in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name))
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


_LAST = "input_global_scale, is_sf_swizzled_layout)"
_SHARED = {
    "always in rows": (_LAST, "input_global_scale, False)"),
    "twice the global scale": (_LAST, "input_global_scale * 2, is_sf_swizzled_layout)"),
    "vLLM's rule": ('"vt"', '"vllm_native"', "_quantised"),
}
mutations("silu_mul_fp4_quant", _SHARED | {"the gate for the factor": ("body(nx, gate, up)", "body(nx, up, gate)")})
mutations("silu_and_mul_fp4_quant", _SHARED | {
    "two roundings": ("silu_and_mul.body(nx, x)", 'silu_and_mul.body(nx, x, rounding="vllm")'),
})  # fmt: skip
mutations("sigmoid_gate_fp4_quant", _SHARED | {
    "attn's dtype": ("(nx, attn, gate)", '(nx, attn, gate, rounding="vllm")'),
})  # fmt: skip
mutations("rms_norm_fp4_quant", _SHARED | {
    "the residual forgotten": ("residual=residual", "residual=None"),
    "another eps": ("eps=eps", "eps=1e-6"),
    "the old residual": ("*new = y if", "*new = (y[0], residual) if"),
})  # fmt: skip
