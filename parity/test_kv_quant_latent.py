"""Quantised caches of latent attention against scalar loops over their bytes, and vLLM's interpreted kernels."""

from __future__ import annotations

import math
import struct

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.table import lookup

from .compare import assert_bytes
from .goldens import op_cases
from .harness import case, checks, mutations
from .quant_codes import code_of, divided, f32, largest, times
from .scalar import draw, floats, rounded
from .test_fp8_weights import value_of
from .test_quant_fp8 import near_ties

F32, U8, I32, I64 = np.float32, np.uint8, np.int32, np.int64
BF16 = ml_dtypes.bfloat16
WRITE, READ = "concat_and_cache_ds_mla", "dequantize_ds_mla"
KEYS, GATHER = "indexer_k_quant_and_cache", "cp_gather_indexer_k_quant_cache"
SLOTS = I64([5, -1, 2, 2, 7])


def both(op):
    return getattr(oracle, op), getattr(oracle, op).mirror


def noise(*shape):
    return np.random.Generator(np.random.PCG64(1)).integers(0, 256, shape).astype(U8)


def latents(kind):
    rows = draw((5, 512), kind, 2, 3)
    rows[0, :128], rows[0, 130] = 0, math.nan
    rows[3, 128:256] = 0
    rows[4, :9] = (math.inf, *rows[4, 1:9])
    return rows, draw((5, 64), kind, 3)


def entry(row, rope) -> bytes:
    """656 bytes of one token."""
    codes, scales = [], []
    for start in range(0, 512, 128):
        values = floats(row[start : start + 128])
        scales.append(max(divided(largest(values), 448), 2.0**-126))
        codes += [code_of(divided(v, scales[-1])) for v in values]
    return bytes(codes) + struct.pack("<4f", *scales) + rope.tobytes()


@checks(WRITE, cases=[case(kind=kind) for kind in ("bfloat16", "float16")])
def test_entries_against_scalar_loop(case):
    (latent, rope), before = latents(case.kind), noise(3, 4, 656)
    want = before.copy()
    for i, slot in enumerate(SLOTS):
        if slot >= 0:
            want[slot // 4, slot % 4] = np.frombuffer(entry(latent[i], rope[i]), U8)
    for run in both(WRITE):
        cache = before.copy()
        assert run(latent, rope, cache, SLOTS) is None
        assert_bytes(cache, want)


@checks(READ, cases=[case(out=out) for out in ("bfloat16", "float32", "float16")])
def test_entries_are_read_back(case):
    codes = np.arange(2 * 512).reshape(2, 512) % 256
    codes[codes % 128 == 127] = 0
    scales = np.array([[0.0321, 2.0**-126, 1.9, 3.0], [1, 0.37, 2, 0.5]], "<f4")
    rope = draw((2, 64), "bfloat16", 4)
    entries = np.concatenate([codes.astype(U8), scales.view(U8), rope.view(U8)], axis=1)
    want = [[rounded(times(value_of(int(c)), float(scales[i, k // 128])), case.out) for k, c in enumerate(codes[i])]
            + [rounded(float(v), case.out) for v in rope[i]] for i in range(2)]  # fmt: skip
    for run in both(READ):
        for given in (entries, np.pad(entries, ((0, 0), (0, 3)))[:, :656]):
            got = run(given, out_dtype=case.out)
            assert got.dtype.name == case.out
            assert_bytes(got.astype(F32), F32(want))


@checks(WRITE, READ)
def test_what_is_written_is_read():
    """Codes of a quantised latent are those of itself, and each value is within 2^-4 of the real one."""
    latent, rope = draw((4, 512), "bfloat16", 5), draw((4, 64), "bfloat16", 6)
    cache = np.zeros((1, 4, 656), U8)
    oracle.concat_and_cache_ds_mla(latent, rope, cache, np.arange(4))
    out = oracle.dequantize_ds_mla(cache, out_dtype="float32")[0]
    assert_bytes(out[:, 512:].astype(BF16), rope)
    wide = latent.astype(F32)
    assert (np.abs(out[:, :512] - wide) <= np.abs(wide) * 2.0**-4 + 2.0**-10 * np.abs(wide).max() / 448).all()


@checks(WRITE, KEYS)
def test_quotients_near_ties():
    """Codes of true quotients, where a product with the reciprocal would choose another. bfloat16 has few of them."""
    row = near_ties(f32(0.7))[:127]
    row = np.append(row, F32(448 * f32(0.7)))[None]
    scale = divided(float(row.max()), 448)
    cache = np.zeros((1, 1, 132), U8)
    oracle.indexer_k_quant_and_cache(row, cache, I64([0]))
    assert_bytes(cache[0, 0, :128], U8([code_of(divided(float(v), scale)) for v in row[0]]))
    latent = np.tile(draw((80, 128), "bfloat16", 7), (1, 4))
    cache = np.zeros((1, 80, 656), U8)
    oracle.concat_and_cache_ds_mla(latent, latent[:, :64], cache, np.arange(80))
    for t in range(80):
        values = floats(latent[t, :128])
        scale = divided(largest(values), 448)
        assert_bytes(cache[0, t, 384:512], U8([code_of(divided(v, scale)) for v in values]))


def key_scale(values, ue8m0):
    scale = divided(max(largest(values), f32(1e-4)), 448)
    if ue8m0 and math.isfinite(scale):
        fraction, exponent = math.frexp(scale)
        scale = math.ldexp(1, exponent - (fraction == 0.5))
    return scale


@checks(KEYS, cases=[case(kind=kind, ue8m0=u) for kind in ("bfloat16", "float32", "float16") for u in (False, True)])
def test_keys_against_scalar_loop(case):
    k, before = latents(case.kind)[0][:, 64:192].copy(), noise(3, 4, 132)
    k[2], k[4, 3] = 0, math.inf
    want = before.copy()
    for i, slot in enumerate(SLOTS):
        if slot >= 0:
            values, (block, at) = floats(k[i]), divmod(int(slot), 4)
            scale = key_scale(values, case.ue8m0)
            memory = want[block].reshape(-1)
            memory[at * 128 : at * 128 + 128] = [code_of(divided(v, scale)) for v in values]
            memory[4 * 128 + at * 4 : 4 * 128 + at * 4 + 4] = np.frombuffer(struct.pack("<f", scale), U8)
    for run in both(KEYS):
        cache = before.copy()
        assert run(k, cache, SLOTS, ue8m0=case.ue8m0) is None
        assert_bytes(cache, want)


@checks(KEYS)
def test_a_key_of_zeros_has_the_least_scale():
    for ue8m0, want in ((False, divided(f32(1e-4), 448)), (True, 2.0**-22)):
        cache = noise(1, 1, 132)
        oracle.indexer_k_quant_and_cache(np.zeros((1, 128), F32), cache, I64([0]), ue8m0=ue8m0)
        assert not cache[0, 0, :128].any() and cache[0, 0, 128:].view(F32)[0] == F32(want)


@checks(GATHER)
def test_gathers_against_scalar_loop():
    cache, table, bounds = noise(6, 4, 132), I32([[3, 1, 99], [0, 0, 0], [5, 2, -1]]), I32([0, 5, 5, 8])
    for run in both(GATHER):
        keys, scales = noise(10, 128), np.arange(10).astype(F32)
        want = keys.copy(), scales.copy()
        for request in range(3):
            for position, i in enumerate(range(bounds[request], bounds[request + 1])):
                memory, at = cache[table[request, position // 4]].reshape(-1), position % 4
                want[0][i] = memory[at * 128 : at * 128 + 128]
                want[1][i : i + 1].view(U8)[:] = memory[512 + at * 4 : 512 + at * 4 + 4]
        assert run(cache, keys, scales, table, bounds) is None
        assert_bytes(keys, want[0])
        assert_bytes(scales.view(np.uint32), want[1].view(np.uint32))


@checks(KEYS, GATHER, WRITE, READ)
def test_latents_and_keys_against_vllm():
    """To the byte: its Triton kernels for pages of one token, interpreted, and its CUDA ops once they are captured."""
    for golden in [one for name in (KEYS, GATHER, WRITE, READ) for one in op_cases("kv_quant", name)]:
        for run in both(golden.op):
            call = golden.call()
            found = run(**call)
            if golden.op == READ:
                assert_bytes(found, golden.outputs["out"], str(golden))
                continue
            assert lookup(golden.op).contract.mutates == tuple(golden.outputs)
            for name, want in golden.outputs.items():
                assert_bytes(call[name], want, str(golden))


LATENT, ROPE = draw((2, 512), "bfloat16", 8), draw((2, 64), "bfloat16", 9)
K, PAGES, TABLE = draw((2, 128), "float32", 10), np.zeros((2, 2, 132), U8), I32([[0, 1]])


def write(f, latent=LATENT, rope=ROPE, cache=None, slots=(0, 1)):
    return f(latent, rope, np.zeros((1, 4, 656), U8) if cache is None else cache, I64(slots))


def gather(f, bounds=(0, 3), table=TABLE, keys=4):
    return f(PAGES, np.zeros((keys, 128), U8), np.zeros(keys, F32), table, I32(bounds))


REFUSED = {
    WRITE: [
        ("kv_c", lambda f: write(f, LATENT.astype(F32))), ("kv_c", lambda f: write(f, LATENT[:, :256].copy())),
        ("k_pe", lambda f: write(f, rope=ROPE.astype(np.float16))), ("slot_mapping", lambda f: write(f, slots=(0, 4))),
        ("kv_cache", lambda f: write(f, cache=np.zeros((1, 4, 576), U8))),
        ("kv_cache", lambda f: write(f, cache=np.broadcast_to(np.zeros((1, 1, 656), U8), (1, 4, 656)))),
    ],
    READ: [("entries", lambda f: f(np.zeros((2, 655), U8))), ("entries", lambda f: f(np.zeros((2, 656), np.int8)))],
    KEYS: [
        ("k", lambda f: f(K[:, :64].copy(), PAGES, I64([0]))), ("slot_mapping", lambda f: f(K, PAGES, I64([4]))),
        ("kv_cache", lambda f: f(K, PAGES[..., :128].copy(), I64([0]))),
        ("ue8m0", lambda f: f(K, PAGES, I64([0]), ue8m0="ue8m0")),
        ("slot_mapping", lambda f: f(K, PAGES, I64([0, 1, 2]))),
    ],
    GATHER: [
        ("cu_seq_lens", lambda f: gather(f, (0, 5))), ("cu_seq_lens", lambda f: gather(f, (1, 3))),
        ("block_table", lambda f: gather(f, (0, 5), keys=9)), ("block_table", lambda f: gather(f, table=I32([[0, 2]]))),
        ("block_table", lambda f: gather(f, table=I32([[-1, 0]]))), ("cu_seq_lens", lambda f: gather(f, (0, 3, 2))),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_latent_caches_refuse(name):
    for argument, call in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name))
        assert (refusal.value.op, refusal.value.argument) == (name, argument)
    assert not PAGES.any()


mutations(WRITE, {
    "multiply by the reciprocal": ("nx.div(tiles, scale)",
                                   "nx.mul(tiles, single(nx, nx.div(1, scale)))"),
    "the first scale for all": ("largest(nx, tiles)", "np.repeat(largest(nx, tiles)[:, :1], LATENT // TILE, axis=1)"),
    "no least scale": ("nx.maximum(single(nx, nx.div(largest(nx, tiles), LARGEST)), _LEAST)",
                       "single(nx, nx.div(largest(nx, tiles), LARGEST))"),
    "rope before scales": ("np.concatenate(parts, axis=-1)", "np.concatenate([parts[0], parts[2], parts[1]], axis=-1)"),
})  # fmt: skip
mutations(
    READ,
    {
        "the scale forgotten": ("nx.mul(nx.load(codes), nx.load(scale)[..., None])", "nx.load(codes)"),
        "one tile further on": ("nx.load(scale)[..., None]", "np.roll(nx.load(scale), 1, -1)[..., None]"),
        "rope scaled away": ("[latent, nx.load(rope)]", "[latent, 0 * nx.load(rope)]"),
    },
)
mutations(KEYS, {
    "multiply by the reciprocal": ("nx.div(value, scale)", "nx.mul(value, single(nx, nx.div(1, scale)))"),
    "no least maximum": ("nx.maximum(largest(nx, value), _LEAST_KEY)", "largest(nx, value)"),
    "scales beside their keys": ("flat[:, : size * INDEXER].reshape(blocks, size, INDEXER), "
                                 "flat[:, size * INDEXER :].reshape(blocks, size, 4)",
                                 "kv_cache[..., :INDEXER], kv_cache[..., INDEXER:]", "planes"),
    "a power of two always": ("if ue8m0:", "if True:"),
})  # fmt: skip
mutations(GATHER, {
    "positions without their request": ("places(token, request, cu_seq_lens, None",
                                        "places(token, 0 * request, cu_seq_lens, None"),
    "the first request's table": ("block_table[request, page]", "block_table[0, page]"),
    "scales of the first slot": ("scales[block, offset]", "scales[block, 0 * offset]"),
})  # fmt: skip
