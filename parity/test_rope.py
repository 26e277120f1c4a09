"""Rotations against scalar loops (Python floats for truth, float32 steps for the mirror) and vLLM's goldens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError

from .compare import assert_bytes, assert_within
from .goldens import op_cases
from .harness import case, checks, mutations
from .rope_loops import Rows, loop, table
from .scalar import draw

QUICK = settings(max_examples=20, deadline=None, derandomize=True)


CACHED = [
    case(T=1, Hq=1, Hk=1, D=2, rot=2, x="float32", cache="float32"),
    case(T=7, Hq=4, Hk=2, D=16, rot=16, x="float32", cache="float32"),
    case(T=7, Hq=3, Hk=1, D=32, rot=8, x="bfloat16", cache="bfloat16"),
    case(T=3, Hq=2, Hk=2, D=16, rot=8, x="bfloat16", cache="float32", is_neox=False),
    case(T=3, Hq=2, Hk=5, D=16, rot=16, x="float16", cache="float16", is_neox=False),
    case(T=3, Hq=2, Hk=1, D=24, rot=8, x="bfloat16", cache="float32", offset=16, inverse=True),
    case(T=3, Hq=2, Hk=1, D=24, rot=8, x="float32", cache="float32", offset=9, is_neox=False),
]


@checks("rope_from_cache", cases=[case(**c, **native) for c in CACHED for native in ({}, {"native": True})])
def test_rope_from_cache_against_scalar_loop(case):
    q, k = (draw((case.T, h, case.D), case.x, h) for h in (case.Hq, case.Hk))
    cache = table(11, case.rot, case.cache)
    positions = np.random.Generator(np.random.PCG64(3)).integers(0, 11, case.T)
    positions[0] = 10
    product = None
    if "native" in case:
        product = "float32" if case.cache == "float32" else case.x
    how = {"is_neox": case.get("is_neox", True), "inverse": case.get("inverse", False)}
    call = {**how, "rope_dim_offset": case.get("offset", 0), "rounding": "vllm_native" if product else "vt"}
    rows = Rows(cache, lambda t, i: positions[t])
    for run, step in ((oracle.rope_from_cache, "float64"), (oracle.rope_from_cache.mirror, "float32")):
        found = run(q, k, positions, cache, **call)
        for got, x in zip(found, (q, k)):
            assert_bytes(got, loop(x, rows, **how, offset=case.get("offset", 0), product=product, step=step))
    if product is None:  # float64 knows no fusion
        fused = oracle.rope_from_cache(q, k, positions, cache, **{**call, "rounding": "vllm"})
        for got, want in zip(fused, oracle.rope_from_cache(q, k, positions, cache, **call)):
            assert_bytes(got, want)
    assert_bytes(oracle.rope_from_cache(q, None, positions.astype(np.int32), cache, **call), oracle.rope_from_cache(
        q, k, positions, cache, **call)[0])  # fmt: skip


def axis_of(i, section, interleaved):
    """The upstream slices: time everywhere, then height and width over their strided or contiguous pairs."""
    axes = [0] * sum(section)
    if interleaved:
        axes[1 : 3 * section[1] : 3] = [1] * len(axes[1 : 3 * section[1] : 3])
        axes[2 : 3 * section[2] : 3] = [2] * len(axes[2 : 3 * section[2] : 3])
    else:
        axes = [0] * section[0] + [1] * section[1] + [2] * section[2]
    return axes[i]


@checks("rope_from_cache", cases=[
    case(section=s, interleaved=i, kind=kind)
    for s, kind in (((11, 11, 10), "float32"), ((16, 24, 24), "bfloat16"), ((2, 3, 1), "float32"),
                    ((0, 4, 0), "float32"),
                    ((1, 0, 3), "bfloat16"))
    for i in (False, True)
])  # fmt: skip
def test_three_axis_positions_against_scalar_loop(case):
    half = sum(case.section)
    q, k = draw((4, 2, 2 * half + 3), case.kind, 1), draw((4, 1, 2 * half + 3), case.kind, 2)
    cache = table(20, 2 * half, case.kind)
    positions = np.random.Generator(np.random.PCG64(8)).integers(0, 20, (3, 4))
    found = oracle.rope_from_cache(
        q, k, positions, cache, mrope_section=case.section, mrope_interleaved=case.interleaved
    )
    rows = Rows(cache, lambda t, i: positions[axis_of(i, case.section, case.interleaved), t])
    for got, x in zip(found, (q, k)):
        assert_bytes(got, loop(x, rows))
    text = np.stack([positions[0]] * 3)
    for one, two in zip(
        oracle.rope_from_cache(q, k, text, cache, mrope_section=list(case.section), mrope_interleaved=case.interleaved),
        oracle.rope_from_cache(q, k, positions[0], cache, mrope_section=case.section),
    ):
        assert_bytes(one, two, "three equal rows are one")


@checks("rope_neox", cases=[case(T=5, D=16, rot=16, x="float32"), case(T=5, D=16, rot=6, x="bfloat16", llama3=True)])
def test_rope_neox_against_scalar_loop_over_its_rows(case):
    positions = np.int64([0, 1, 4095, 131071, 17])
    llama3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}
    how = {"base": 1e4, "rotary_dim": case.rot, "llama3": llama3 if "llama3" in case else None}
    q, k = draw((5, 3, case.D), case.x, 1), draw((5, 1, case.D), case.x, 2)
    rows = oracle.rope_cos_sin_cache(positions, **how)
    for run, step in ((oracle.rope_neox, "float64"), (oracle.rope_neox.mirror, "float32")):
        for got, x in zip(run(q, k, positions.astype(np.int32), **how), (q, k)):
            assert_bytes(got, loop(x, Rows(rows, lambda t, i: t), step=step))
    for one, two in zip(oracle.rope_neox(q, k, positions, **how), oracle.rope_from_cache(q, k, np.arange(5), rows)):
        assert_bytes(one, two, "rope_neox is rope_from_cache over its rows")


@checks("rope_from_cache", "rope_neox")
def test_position_zero_is_the_identity_but_for_special_partners():
    x = draw((1, 1, 10), "float32", 4)
    x[0, 0, :4] = [np.nan, np.inf, -0.0, 1.0]
    zero = np.zeros(1, np.int64)
    for out in (
        oracle.rope_from_cache(x, None, zero, np.float32([[1, 1, 1, 1, 0, 0, 0, 0]])),
        oracle.rope_neox(x, x, zero, base=1e4, rotary_dim=8)[0],
    ):
        assert np.isnan(out[0, 0, [0, 4, 5]]).all(), "0 * NaN and 0 * inf spoil the partner"
        assert out[0, 0, 1] == np.inf
        assert_bytes(out[0, 0, [3, 7, 8, 9]], x[0, 0, [3, 7, 8, 9]])
        assert out[0, 0, 2] == 0 and out[0, 0, 6] == x[0, 0, 6]


@checks("rope_from_cache", "rope_neox")
def test_untouched_lanes_keep_their_bytes():
    x = draw((2, 3, 12), "bfloat16", 4)
    x.view(np.uint16)[..., 6:] = np.arange(0x7F81, 0x7F81 + 36).reshape(2, 3, 6)  # NaNs with payloads
    position = np.int64([3, 1])
    out = oracle.rope_from_cache(x, None, position, table(4, 6))
    assert_bytes(out[..., 6:], x[..., 6:])
    assert_bytes(oracle.rope_neox(x, x, position, base=1e4, rotary_dim=6)[1][..., 6:], x[..., 6:])
    trailing = oracle.rope_from_cache(x[..., ::-1].copy(), None, position, table(4, 6), rope_dim_offset=6)
    assert_bytes(trailing[..., :6], x[..., :5:-1])


@checks("rope_from_cache", "rope_neox")
def test_strided_heads_and_no_tokens():
    fused = draw((4, 3 * 24), "bfloat16", 6)
    q, k = fused[:, :48].reshape(4, 2, 24), fused[:, 48:].reshape(4, 1, 24)[..., 8:]
    cache, positions = table(9, 16), np.int64([8, 0, 2, 2])
    before = fused.copy()
    found = oracle.rope_from_cache(q[..., 8:], k, positions, cache)
    packed = oracle.rope_from_cache(q[..., 8:].copy(), k.copy(), positions, cache)
    for one, two in zip(found, packed):
        assert_bytes(one, two)
        assert one.flags.c_contiguous
    assert_bytes(fused, before)
    for one, two in zip(
        oracle.rope_neox(q[..., 8:], k, positions, base=1e4, rotary_dim=16),
        oracle.rope_neox(q[..., 8:].copy(), k.copy(), positions, base=1e4, rotary_dim=16),
    ):
        assert_bytes(one, two)
    for out in (
        *oracle.rope_from_cache(q[:0, :, 8:], k[:0], positions[:0], cache),
        *oracle.rope_neox(q[:0, :, 8:], k[:0], positions[:0], base=1e4, rotary_dim=16),
    ):
        assert out.shape[0] == 0


@checks("rope_from_cache")
@QUICK
@given(st.integers(1, 16), st.booleans(), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_inverse_undoes_the_rotation(half, is_neox, offset, seed):
    """Each way adds two roundings of at most sqrt(2) times the largest lane; the cache's pair is unit to 2^-24."""
    x = draw((3, 2, 2 * half + offset), "float32", seed)
    cache, positions = table(5, 2 * half, seed=seed), np.int64([4, 0, 2])
    how = {"is_neox": is_neox, "rope_dim_offset": offset}
    turned = oracle.rope_from_cache(x, None, positions, cache, **how)
    back = oracle.rope_from_cache(turned, None, positions, cache, inverse=True, **how)
    assert_within(back, x, 8 * 2.0**-24 * np.abs(x).max())


@checks("rope_from_cache")
@QUICK
@given(st.integers(0, 400), st.integers(0, 400), st.integers(0, 2**32 - 1))
def test_scores_depend_on_the_distance_only(near, far, seed):
    """q . k after rotation: cache entries and lanes each carry 2^-24, angles of the float64 cache none to speak of."""
    q, k = draw((1, 1, 32), "float32", seed), draw((1, 1, 32), "float32", seed + 1)
    cache = oracle.rope_build_cache({}, head_size=32, max_position=900)
    scores = []
    for shift in (0, 57):
        at = [np.int64([p + shift]) for p in (near, far)]
        turned = [oracle.rope_from_cache(x, None, p, cache).astype(np.float64) for x, p in zip((q, k), at)]
        scores.append(float((turned[0] * turned[1]).sum()))
    assert abs(scores[0] - scores[1]) <= 16 * 2.0**-24 * np.linalg.norm(q) * np.linalg.norm(k)


@checks("rope_from_cache")
def test_rope_from_cache_against_vllm():
    """The mirror's bytes are those of the Python forwards, and with "vllm" those of the CUDA op."""
    goldens = [*op_cases("rope_frequencies", "rope_from_cache"), *op_cases("rope", "rope_from_cache")]
    assert {golden.build for golden in goldens} == {"cpu", "cuda"} and len(goldens) >= 70
    for golden in goldens:
        arguments = {"k": None, **golden.call()}
        if golden.build == "cuda":
            arguments["rounding"] = "vllm"
        found = oracle.rope_from_cache.mirror(**arguments)
        found = found if isinstance(found, tuple) else (found,)
        for got, (name, want) in zip(found, golden.outputs.items(), strict=True):
            assert_bytes(got, want, f"{golden.name} {name}")


REFUSED = {
    "gptj to rope_neox": ("rope_neox", "is_neox", {"is_neox": False}),
    "odd width": ("rope_neox", "rotary_dim", {"rotary_dim": 3}),
    "wide": ("rope_neox", "rotary_dim", {"rotary_dim": 10}),
    "no width": ("rope_neox", "rotary_dim", {"rotary_dim": 0}),
    "negative position": ("rope_neox", "positions", {"positions": np.int32([0, -1])}),
    "three-row positions": ("rope_neox", "positions", {"positions": np.zeros((3, 2), np.int32)}),
    "float positions": ("rope_neox", "positions", {"positions": np.zeros(2, np.float32)}),
    "no k": ("rope_neox", "k", {"k": None}),
    "dtypes": ("rope_neox", "k", {"k": np.zeros((2, 1, 8), np.float16)}),
    "reversed lanes": ("rope_neox", "q", {"q": np.zeros((2, 2, 8), np.float32)[..., ::-1]}),
    "llama3": ("rope_neox", "llama3", {"llama3": {"factor": 2.0}}),
    "cached: position P": ("rope_from_cache", "positions", {"positions": np.int64([0, 4])}),
    "cached: position -1": ("rope_from_cache", "positions", {"positions": np.int64([-1, 0])}),
    "cached: two rows": ("rope_from_cache", "positions", {"positions": np.zeros((2, 2), np.int64)}),
    "cached: short": ("rope_from_cache", "positions", {"positions": np.zeros(1, np.int64)}),
    "cached: rows without sections": ("rope_from_cache", "mrope_section", {"positions": np.zeros((3, 2), np.int64)}),
    "sections short": ("rope_from_cache", "mrope_section", {"mrope_section": (1, 1, 1)}),
    "four sections": ("rope_from_cache", "mrope_section", {"mrope_section": (1, 1, 1, 1)}),
    "negative section": ("rope_from_cache", "mrope_section", {"mrope_section": (5, -1, 0)}),
    "odd cache": ("rope_from_cache", "cos_sin_cache", {"cos_sin_cache": np.ones((4, 7), np.float32)}),
    "empty cache row": ("rope_from_cache", "cos_sin_cache", {"cos_sin_cache": np.ones((4, 0), np.float32)}),
    "wide cache": ("rope_from_cache", "cos_sin_cache", {"cos_sin_cache": np.ones((4, 10), np.float32)}),
    "beyond the head": ("rope_from_cache", "cos_sin_cache", {"rope_dim_offset": 1}),
    "half cache": ("rope_from_cache", "cos_sin_cache", {"cos_sin_cache": np.ones((4, 8), np.float16)}),
    "k of other tokens": ("rope_from_cache", "k", {"k": np.zeros((3, 1, 8), np.float32)}),
    "rounding": ("rope_from_cache", "rounding", {"rounding": "cuda"}),
}  # fmt: skip


@pytest.mark.parametrize("op, argument, wrong", REFUSED.values(), ids=REFUSED)
def test_bad_calls_are_refused(op, argument, wrong):
    arguments = {"q": np.zeros((2, 2, 8), np.float32), "k": np.zeros((2, 1, 8), np.float32), "positions": np.arange(2)}
    own = {"base": 1e4, "rotary_dim": 8} if op == "rope_neox" else {"cos_sin_cache": np.ones((4, 8), np.float32)}
    with pytest.raises(ContractError) as refusal:
        getattr(oracle, op)(**{**arguments, **own, **wrong})
    assert (refusal.value.op, refusal.value.argument) == (op, argument)


_ROTATION = {
    "sign of the first product": ("nx.sub(point", "nx.add(point", "rope_rotation.rotated"),
    "sine and cosine swapped": ("nx.mul(second, cos)), point(nx.mul(first, sin))",
                                "nx.mul(second, sin)), point(nx.mul(first, cos))", "rope_rotation.rotated"),
    "pairs one lane on": ("slice(offset + half, offset + 2 * half)", "slice(offset + half - 1, offset + 2 * half - 1)",
                          "rope_rotation.pairs"),
}  # fmt: skip
mutations("rope_neox", {
    **_ROTATION,
    "rotated as GPT-J": ("is_neox=True", "is_neox=False"),
    "k kept": ("rotate(nx, (q, k), cos, sin, is_neox=True)", "(rotate(nx, (q, k), cos, sin, is_neox=True)[0], k)"),
    "llama3 ignored": ("base, rotary_dim, llama3)", "base, rotary_dim, None)"),
})  # fmt: skip
mutations("rope_from_cache", {
    **_ROTATION,
    "GPT-J pairs as NeoX": ("if is_neox:", "if True:", "rope_rotation.pairs"),
    "leading lanes": ('"offset": rope_dim_offset', '"offset": 0'),
    "never inverse": ('"inverse": inverse', '"inverse": False'),
    "products unrounded": ('if rounding == "vllm_native":', "if False:"),
    "never contracted": ('rounding == "vllm"}', "False}"),
    "the other product contracted": ("nx.fma(first, sin, nx.mul(second, cos))",
                                     "nx.fma(second, cos, nx.mul(first, sin))",
                                     "rope_rotation.rotated"),
    "products rounded to q's dtype": ("cos.dtype if cos.dtype == np.float32 else q.dtype", "q.dtype"),
    "interleaved bound on i + 1": ("(i <= 3 * section[1])", "(i + 1 <= 3 * section[1] - 3)",
                                   "rope_rotation.section_axes"),
    "width before height": ("np.where(tall, 1, np.where(wide, 2, 0))", "np.where(tall, 2, np.where(wide, 1, 0))",
                            "rope_rotation.section_axes"),
    "sections end late": ('side="right"', 'side="left"', "rope_rotation.section_axes"),
    "always contiguous sections": ("mrope_section, mrope_interleaved)", "mrope_section, False)"),
})  # fmt: skip
