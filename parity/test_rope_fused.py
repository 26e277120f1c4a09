"""QK norm with rotation and gate, and rotation with the paged write: scalar loops, compositions, vLLM's CUDA op."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops.errors import ContractError

from .compare import assert_bytes, assert_ulp
from .goldens import op_cases
from .harness import case, checks, mutations
from .rope_loops import Rows, lanes, loop, table
from .scalar import draw, floats, rounded, tree256

F32 = np.float32


def head_truth(x, weight, eps, plus, cos_sin, is_neox=True, middle=None):
    """One head through norm and rotation in Python floats; `middle` rounds the norm."""
    v, half = floats(x), len(cos_sin) // 2
    rms = math.sqrt(math.fsum(t * t for t in v) / len(v) + eps)
    y = [t / rms * (w + plus) for t, w in zip(v, floats(weight))]
    y = y if middle is None else [rounded(t, middle) for t in y]
    out = list(y)
    for i in range(half):
        a, b = lanes(i, half, 0, is_neox)
        c, s = float(cos_sin[i]), float(cos_sin[half + i])
        out[a], out[b] = y[a] * c - y[b] * s, y[b] * c + y[a] * s
    return out


def head_f32(x, weight, eps, plus, cos_sin, is_neox=True, middle=None):
    """The same in float32 scalars, in the declared order."""
    v, half = [F32(t) for t in x], len(cos_sin) // 2
    inv = F32(1) / np.sqrt(tree256([t * t for t in v]) / F32(len(v)) + F32(eps))
    y = [t * inv * (F32(w) + F32(plus)) for t, w in zip(v, weight)]
    y = y if middle is None else [F32(rounded(float(t), middle)) for t in y]
    out = list(y)
    for i in range(half):
        a, b = lanes(i, half, 0, is_neox)
        c, s = F32(cos_sin[i]), F32(cos_sin[half + i])
        out[a], out[b] = y[a] * c - y[b] * s, y[b] * c + y[a] * s
    return [float(t) for t in out]


def heads(run_head, x, weight, cos_sin, kind, **how):
    """run_head over all [T, H, D], rounded to `kind`."""
    rows = [[run_head(x[t, h], weight, cos_sin=cos_sin[t], **how) for h in range(x.shape[1])] for t in range(len(x))]
    return F32([[[rounded(v, kind) for v in head] for head in row] for row in rows]).reshape(x.shape)


GATED = [
    case(T=3, Hq=2, Hk=1, D=16, rot=4, x="float32"),
    case(T=2, Hq=1, Hk=3, D=300, rot=64, x="bfloat16"),
    case(T=2, Hq=3, Hk=1, D=16, rot=16, x="bfloat16", out="float32"),
    case(T=2, Hq=3, Hk=1, D=16, rot=8, x="float32", out="bfloat16", gate="float32"),
    case(T=2, Hq=3, Hk=1, D=16, rot=8, x="bfloat16", gate="float32", gemma=False),
    case(T=3, Hq=2, Hk=2, D=32, rot=8, x="bfloat16", rounding="vllm"),
    case(T=3, Hq=2, Hk=2, D=32, rot=8, x="float16", rounding="vllm", cache="float16"),
]


@checks("attn_qk_norm_rope_gate", cases=GATED)
def test_gated_front_against_scalar_loop(case):
    qgate, kf = draw((case.T, case.Hq * 2 * case.D), case.x, 1), draw((case.T, case.Hk * case.D), case.x, 2)
    weights = [0.3 * draw((case.D,), "float32", s) for s in (3, 4)]
    cos_sin, out = table(case.T, case.rot, case.get("cache", "float32")), case.get("out", case.x)
    gemma, rounding = case.get("gemma", True), case.get("rounding", "vt")
    names = {"gemma": gemma, "out_dtype": case.get("out"), "gate_dtype": case.get("gate"), "rounding": rounding}
    how = {"eps": 1e-5, "plus": gemma, "middle": case.x if rounding == "vllm" else None}
    chunks = qgate.reshape(case.T, case.Hq, 2, case.D)
    for run, run_head in (
        (oracle.attn_qk_norm_rope_gate, head_truth),
        (oracle.attn_qk_norm_rope_gate.mirror, head_f32),
    ):
        q, k, gate = run(qgate, kf, *weights, cos_sin, eps=1e-5, **names)
        assert q.dtype == k.dtype == draw((1,), out, 0).dtype
        assert_bytes(q.astype(F32), heads(run_head, chunks[:, :, 0], weights[0], cos_sin, out, **how))
        assert_bytes(k.astype(F32), heads(run_head, kf.reshape(case.T, case.Hk, -1), weights[1], cos_sin, out, **how))
        assert_bytes(gate, chunks[:, :, 1].astype(case.get("gate", out)))


@checks("attn_qk_norm_rope_gate")
def test_gated_front_against_vllm():
    goldens = op_cases("rope_frequencies", "attn_qk_norm_rope_gate")
    assert goldens
    for golden in goldens:
        for got, want in zip(
            oracle.attn_qk_norm_rope_gate.mirror(**golden.call()), golden.outputs.values(), strict=True
        ):
            assert_bytes(got, want, golden.name)


@checks("attn_qk_norm_rope_gate")
def test_gated_front_in_float32_is_the_chain_of_four_ops():
    qgate, kf = draw((5, 4 * 2 * 64), "float32", 5), draw((5, 2 * 64), "float32", 6)
    q_norm, k_norm, cos_sin = draw((64,), "float32", 7), draw((64,), "float32", 8), table(5, 32)
    q, gate = oracle.attn_gate_split(qgate, head_dim=64)
    for name in ("mirror", "__call__"):
        run = lambda op, *args, **more: getattr(op, name)(*args, **more)
        normed = run(oracle.rms_norm, q.reshape(5, 4, 64), q_norm, gemma=True)
        k = run(oracle.rms_norm, kf.reshape(5, 2, 64), k_norm, gemma=True)
        chain = run(oracle.rope_from_cache, normed, k, np.arange(5), cos_sin)
        fused = run(oracle.attn_qk_norm_rope_gate, qgate, kf, q_norm, k_norm, cos_sin)
        for got, want in zip(fused[:2], chain):
            # In truth the chain rounds the norm to float32 and the fusion does not: two flips at the most.
            assert_bytes(got, want) if name == "mirror" else assert_ulp_of_row(got, want)
        assert_bytes(fused[2], gate.reshape(5, 4, 64))


def assert_ulp_of_row(got, want):
    """Within 3 float32 roundings of the row's largest lane."""
    size = np.abs(want).max(axis=-1, keepdims=True)
    assert np.all(np.abs(got.astype(np.float64) - want) <= 3 * 2.0**-24 * size)


@checks("attn_qk_norm_rope_gate")
def test_gate_keeps_its_bytes_and_rows_may_be_strided():
    fused = draw((3, 2 * 2 * 8 + 8 + 5), "bfloat16", 9)
    fused.view(np.uint16)[:, 8:16] = 0x7FA5  # the first head's gate: NaNs with a payload
    qgate, kf = fused[:, :32], fused[:, 32:40]
    weights = [draw((8,), "float32", s) for s in (1, 2)]
    found = oracle.attn_qk_norm_rope_gate(qgate, kf, *weights, table(3, 4))
    packed = oracle.attn_qk_norm_rope_gate(qgate.copy(), kf.copy(), *weights, table(3, 4))
    for one, two in zip(found, packed):
        assert_bytes(one, two)
    assert_bytes(found[2], qgate.reshape(3, 2, 2, 8)[:, :, 1])
    empty = oracle.attn_qk_norm_rope_gate(qgate[:0], kf[:0], *weights, table(3, 4)[:0])
    assert [part.shape for part in empty] == [(0, 2, 8), (0, 1, 8), (0, 2, 8)]


PACKED = [
    case(T=3, Hq=2, Hk=1, Hv=1, D=16, rot=16, x="float32", w="float32", cache="float32"),
    case(T=3, Hq=3, Hk=2, Hv=1, D=16, rot=8, x="bfloat16", w="bfloat16", cache="bfloat16"),
    case(T=2, Hq=1, Hk=1, Hv=2, D=260, rot=64, x="bfloat16", w="bfloat16", cache="float32", is_neox=False),
]


@checks("fused_qk_norm_rope", cases=PACKED)
def test_packed_qk_norm_rope_against_scalar_loop(case):
    count = case.Hq + case.Hk + case.Hv
    qkv = draw((case.T, count * case.D), case.x, 1)
    qkv.view(f"u{qkv.dtype.itemsize}")[0, -1] = 0x7FA5 << 8 * (qkv.dtype.itemsize - 2)
    weights = [draw((case.D,), case.w, s) for s in (2, 3)]
    cache, positions = table(9, case.rot, case.cache), np.int64([8, 0, 5][: case.T])
    is_neox = case.get("is_neox", True)
    how = {"eps": 1e-6, "plus": 0, "is_neox": is_neox}
    for run, run_head in ((oracle.fused_qk_norm_rope, head_truth), (oracle.fused_qk_norm_rope.mirror, head_f32)):
        out = run(qkv, *weights, cache, positions, num_heads_q=case.Hq, num_heads_k=case.Hk, num_heads_v=case.Hv,
                  head_dim=case.D, is_neox=is_neox)  # fmt: skip
        got, x = (a.reshape(case.T, count, case.D) for a in (out, qkv))
        for weight, part in ((weights[0], slice(0, case.Hq)), (weights[1], slice(case.Hq, case.Hq + case.Hk))):
            want = heads(run_head, x[:, part], weight, cache[positions], case.x, **how)
            assert_bytes(got[:, part].astype(F32), want)
        assert_bytes(got[:, case.Hq + case.Hk :], x[:, case.Hq + case.Hk :], "v")


@checks("fused_qk_norm_rope")
def test_packed_qk_norm_rope_takes_strided_rows_and_no_tokens():
    wide = draw((3, 4 * 8 + 5), "bfloat16", 1)
    how = {"num_heads_q": 2, "num_heads_k": 1, "num_heads_v": 1, "head_dim": 8}
    rest = draw((8,), "bfloat16", 2), draw((8,), "bfloat16", 3), table(4, 8)
    out = oracle.fused_qk_norm_rope(wide[:, :32], *rest, np.int64([3, 0, 1]), **how)
    assert_bytes(out, oracle.fused_qk_norm_rope(wide[:, :32].copy(), *rest, np.int64([3, 0, 1]), **how))
    assert oracle.fused_qk_norm_rope(wide[:0, :32], *rest, np.zeros(0, np.int64), **how).shape == (0, 32)


@checks("fused_qk_norm_rope")
def test_packed_qk_norm_rope_against_the_cuda_op():
    """A warp sums in another order and takes a reciprocal root: 16 float32 roundings flip a store in 2^11 or fewer."""
    goldens = op_cases("rope", "fused_qk_norm_rope", "cuda")
    assert goldens
    for golden in goldens:
        found = oracle.fused_qk_norm_rope.mirror(**golden.call())
        assert_ulp(found, golden.outputs["qkv"], 1, inexact_share=2.0**-11, what=golden.name)


@checks("rope_and_cache", cases=[
    case(x="bfloat16", is_neox=True, cache="float32"), case(x="float32", is_neox=False, cache="float32"),
])  # fmt: skip
def test_rope_and_cache_is_rope_then_write(case):
    q, k, v = (draw((4, h, 16), case.x, h) for h in (3, 2, 2))
    positions, slots, cos_sin = np.int64([7, 0, 2, 5]), np.int64([6, -1, 1]), table(8, 8, case.cache)
    pages = draw((3, 2, 4, 2, 16), case.x, 9)
    for run, step in ((oracle.rope_and_cache, "float64"), (oracle.rope_and_cache.mirror, "float32")):
        mine = pages.copy()
        got_q, got_k = run(q, k, v, positions, cos_sin, mine[:, 0], mine[:, 1], slots, is_neox=case.is_neox)
        rows = Rows(cos_sin, lambda t, i: positions[t])
        want_k = loop(k, rows, is_neox=case.is_neox, step=step)
        assert_bytes(got_q, loop(q, rows, is_neox=case.is_neox, step=step))
        assert_bytes(got_k, want_k)
        want = pages.copy()
        want[1, 0, 2], want[1, 1, 2], want[0, 0, 1], want[0, 1, 1] = want_k[0], v[0], want_k[2], v[2]
        assert_bytes(mine, want)


def _gated(**wrong):
    arguments = {
        "qgate": np.ones((2, 32), F32), "kf": np.ones((2, 8), F32), "q_norm": np.ones(8, F32),
        "k_norm": np.ones(8, F32), "cos_sin": np.ones((2, 4), F32),
    }  # fmt: skip
    return oracle.attn_qk_norm_rope_gate(**{**arguments, **wrong})


def _packed(**wrong):
    arguments = {
        "qkv": np.ones((2, 32), F32), "q_weight": np.ones(8, F32), "k_weight": np.ones(8, F32), "num_heads_q": 2,
        "num_heads_k": 1, "num_heads_v": 1, "head_dim": 8, "cos_sin_cache": np.ones((3, 4), F32),
        "positions": np.int64([0, 2]),
    }  # fmt: skip
    return oracle.fused_qk_norm_rope(**{**arguments, **wrong})


def _cached(**wrong):
    arguments = {
        "q": np.ones((2, 2, 8), F32), "k": np.ones((2, 1, 8), F32), "v": np.ones((2, 1, 8), F32),
        "positions": np.int64([0, 2]), "cos_sin_cache": np.ones((3, 4), F32), "key_cache": np.zeros((2, 2, 1, 8), F32),
        "value_cache": np.zeros((2, 2, 1, 8), F32), "slot_mapping": np.int64([0, 3]), **wrong,
    }  # fmt: skip
    try:
        return oracle.rope_and_cache(**arguments)
    finally:
        assert not arguments["key_cache"].any() and not arguments["value_cache"].any(), "a refused call wrote"


REFUSED = [
    (_gated, "qgate", {"qgate": np.ones((2, 24), F32)}),
    (_gated, "kf", {"kf": np.ones((2, 9), F32)}),
    (_gated, "kf", {"kf": np.ones((3, 8), F32)}),
    (_gated, "q_norm", {"q_norm": np.ones(8, np.float16)}),
    (_gated, "cos_sin", {"cos_sin": np.ones((2, 3), F32)}),
    (_gated, "cos_sin", {"cos_sin": np.ones((2, 10), F32)}),
    (_gated, "eps", {"eps": -1.0}),
    (_gated, "rounding", {"rounding": "vllm"}),
    (_gated, "out_dtype", {"out_dtype": "int8"}),
    (_packed, "qkv", {"num_heads_v": 2}),
    (_packed, "positions", {"positions": np.int64([0, 3])}),
    (_packed, "positions", {"positions": np.int64([-1, 0])}),
    (_packed, "cos_sin_cache", {"cos_sin_cache": np.ones((3, 4), np.float16)}),
    (_packed, "cos_sin_cache", {"cos_sin_cache": np.ones((3, 5), F32)}),
    (_packed, "k_weight", {"k_weight": np.ones(8, np.float16)}),
    (_packed, "num_heads_k", {"num_heads_k": 0}),
    (_cached, "positions", {"positions": np.int64([0, 3])}),
    (_cached, "slot_mapping", {"slot_mapping": np.int64([0, 4])}),
    (_cached, "slot_mapping", {"slot_mapping": np.int64([0, 1, 2])}),
    (_cached, "value_cache", {"value_cache": np.zeros((2, 2, 1, 8), np.float16)}),
    (_cached, "cos_sin_cache", {"cos_sin_cache": np.ones((3, 3), F32)}),
]


@pytest.mark.parametrize("call, argument, wrong", REFUSED)
def test_bad_calls_are_refused(call, argument, wrong):
    with pytest.raises(ContractError) as refusal:
        call(**wrong)
    names = {_gated: "attn_qk_norm_rope_gate", _packed: "fused_qk_norm_rope", _cached: "rope_and_cache"}
    assert (refusal.value.op, refusal.value.argument) == (names[call], argument)


mutations("attn_qk_norm_rope_gate", {
    "gate first": ("front(chunks[..., :width], q_norm)", "front(chunks[..., width:], q_norm)"),
    "gate from q": ("gate = chunks[..., width:]", "gate = chunks[..., :width]"),
    "weights swapped": ("width), k_norm), gate", "width), q_norm), gate"),
    "norm always rounded": ('if rounding == "vllm" else', "if True else"),
    "norm never rounded": ('if rounding == "vllm" else', "if False else"),
    "Gemma's weight without one": ("nx.const(1)) if gemma", "nx.const(0)) if gemma", "_normed"),
    "eps dropped": ("inverse_rms(nx, x, eps)", "inverse_rms(nx, x, 0.0)", "_normed"),
    "output in q's dtype": ("True, out_dtype)", "True, x.dtype)"),
    "second half rotated by the first": ("x[..., first], x[..., second] = ahead, behind",
                                         "x[..., first], x[..., second] = ahead, ahead", "_rotate_unrounded"),
})  # fmt: skip
mutations("fused_qk_norm_rope", {
    "v normed too": ("slice(num_heads_q, num_heads_q + num_heads_k)", "slice(num_heads_q, None)"),
    "k not normed": ("slice(num_heads_q, num_heads_q + num_heads_k)", "slice(0, 0)"),
    "one weight": ("(k_weight, slice", "(q_weight, slice"),
    "NeoX always": ("cos, sin, is_neox, qkv.dtype", "cos, sin, True, qkv.dtype"),
    "norm rounded first": ("normed = _normed(nx, nx.load(heads[:, part]), weight, eps, False)",
                           "normed = _normed(nx, nx.load(heads[:, part]), weight, eps, False)\n"
                           "        normed = nx.load(nx.store(normed, qkv.dtype))"),
})  # fmt: skip
mutations("rope_and_cache", {
    "cache the unrotated k": ("q, k = rope_from_cache.body", "q, _ = rope_from_cache.body"),
    "caches swapped": ("k, v, key_cache, value_cache, slot", "k, v, value_cache, key_cache, slot"),
    "NeoX always": ("is_neox=is_neox)\n", "is_neox=True)\n"),
})  # fmt: skip
