"""NVFP4 caches against scalar loops over exact fractions, and the order of scales that trtllm-gen's attention reads."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops import kv_formats
from vtlab.ops.errors import ContractError

from .compare import assert_bytes
from .harness import case, checks, mutations
from .quant_codes import divided, f32
from .scalar import draw
from .test_fp4 import by_blocks, e4m3_value, nearest

F32, U8, I64 = np.float32, np.uint8, np.int64
WRITE = "reshape_and_cache_nvfp4"
SLOTS = I64([5, -1, 2, 2, 15, 0, 9])
NB, BS, H = 2, 8, 2
SCALES = 0.0037, 0.0119


def both():
    return oracle.reshape_and_cache_nvfp4, oracle.reshape_and_cache_nvfp4.mirror


def flashinfer_order(scales, heads_first):
    """Scales of values [NB, BS, H, S] as flashinfer reorders them for its attention: fours of tokens interleaved."""
    if heads_first:
        fours = scales.swapaxes(1, 2).reshape(NB, H, BS // 4, 4, 4, -1)
        return fours.transpose(0, 1, 2, 4, 5, 3).reshape(NB, H, BS, -1)
    fours = scales.reshape(NB, BS // 4, 4, H, 4, scales.shape[-1] // 4)
    return fours.transpose(0, 1, 4, 3, 5, 2).reshape(scales.shape)


def stored(rows, scale):
    """(codes [NB, BS, H, D/2], scales [NB, BS, H, D/16]), tokens at their slots, 0 elsewhere."""
    width = rows.shape[-1]
    codes, scales = np.zeros((NB, BS, H, width // 2), U8), np.zeros((NB, BS, H, width // 16), U8)
    for i, slot in enumerate(SLOTS):
        if slot >= 0:
            codes[slot // BS, slot % BS], scales[slot // BS, slot % BS] = by_blocks(rows[i], divided(1, scale), "vt")
    return codes, scales


def allocated(width, heads_first, gap, fill=0):
    """A cache [NB, BS, H, F] whose blocks lie `gap` bytes apart, and its memory [NB, bytes]."""
    size = width // 16 * 9
    memory = np.full((NB, BS * H * size + gap), fill, U8)
    blocks = memory[:, : BS * H * size]
    if heads_first:
        return blocks.reshape(NB, H, BS, size).swapaxes(1, 2), memory
    return blocks.reshape(NB, BS, H, size), memory


@checks(WRITE, cases=[
    case(kind=kind, order=order, D=D, Dv=Dv)
    for kind, D, Dv in (("float32", 48, 64), ("bfloat16", 64, 128), ("float16", 16, 64)) for order in ("NHD", "HND")
])  # fmt: skip
def test_blocks_against_scalar_loop(case):
    """Codes of all heads and tokens, then scales; of values in the order of flashinfer's own permutation."""
    key, value = draw((7, H, case.D), case.kind, 1, 3), draw((7, H, case.Dv), case.kind, 2)
    key[0, 0, :16] = 0
    value[4, 1, :16] *= 1e-7 if case.kind == "float32" else 1e-3
    heads_first = case.order == "HND"
    turned = lambda array: array.swapaxes(1, 2) if heads_first else array
    want = []
    for rows, scale, values in ((key, f32(SCALES[0]), False), (value, f32(SCALES[1]), True)):
        codes, scales = stored(rows, scale)
        scales = flashinfer_order(scales, heads_first) if values else turned(scales)
        parts = np.ascontiguousarray(turned(codes)), np.ascontiguousarray(scales)
        want.append(np.concatenate([part.reshape(NB, -1) for part in parts], axis=1))
    for run in both():
        (keys, k_memory), (values, v_memory) = (allocated(D, heads_first, 16) for D in (case.D, case.Dv))
        assert run(key, value, keys, values, SLOTS, *(F32([s]) for s in SCALES)) is None
        for memory, expected in ((k_memory, want[0]), (v_memory, want[1])):
            assert_bytes(np.ascontiguousarray(memory[:, :-16]), expected)
            assert not memory[:, -16:].any()


@checks(WRITE, cases=[case(order=order) for order in ("NHD", "HND")])
def test_other_bytes_stay(case):
    """On zeros and on ones the same bytes appear, as many as the tokens' codes and scales, and none beside them."""
    key, value = draw((7, H, 64), "bfloat16", 3), draw((7, H, 64), "bfloat16", 4)
    for run in both():
        found = []
        for fill in (0, 0xFF):
            (keys, k_memory), (values, v_memory) = (allocated(64, case.order == "HND", 0, fill) for _ in "kv")
            run(key, value, keys, values, SLOTS, F32([0.01]), F32([0.01]))
            found.append((k_memory, v_memory))
        for zeros, ones in zip(*found):
            written = len({slot for slot in SLOTS.tolist() if slot >= 0}) * H * 36
            assert int((zeros == ones).sum()) == written
            assert not zeros[zeros != ones].any() and (ones[zeros != ones] == 0xFF).all()


@checks(WRITE)
def test_values_come_back_within_half_a_step():
    """e2m1 * scale * k_scale, by the definition; a step is at most a third of a number's size, or of the least one."""
    key = draw((1, 1, 64), "float32", 5)
    scale = float(np.abs(key).max() / (448 * 6))
    for run in both():
        keys, values = np.zeros((1, 4, 1, 36), U8), np.zeros((1, 4, 1, 36), U8)
        run(key, key, keys, values, I64([0]), F32([scale]), F32([scale]))
        memory = keys.reshape(-1)
        codes, scales = memory[:32], memory[4 * 32 : 4 * 32 + 4]
        sizes = {nearest(v, "vt"): v for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)}
        for j, x in enumerate(key.reshape(-1).tolist()):
            code, step = int(codes[j // 2]) >> 4 * (j % 2) & 15, e4m3_value(int(scales[j // 16])) * scale
            read = sizes[code % 8] * (-1 if code >= 8 else 1) * step
            assert abs(read - x) <= max(abs(x) / 3.99, 0.26 * step) + abs(x) / 16


def test_page_bytes_of_nvfp4():
    assert kv_formats.page_bytes("nvfp4", 16, 8, 128) == 2 * 16 * 8 * 72
    with pytest.raises(ContractError):
        kv_formats.page_bytes("nvfp4", 16, 8, 72)


def write(f, key=None, value=None, keys=None, slots=(0, 1), k_scale=0.01, v_scale=0.01):
    key = draw((2, 1, 64), "float32", 6) if key is None else key
    value = draw((2, 1, 64), "float32", 6) if value is None else value
    keys = np.zeros((1, 4, 1, 36), U8) if keys is None else keys
    values = np.zeros((*keys.shape[:3], value.shape[-1] // 16 * 9), U8)
    return f(key, value, keys, values, I64(slots), F32([k_scale]), F32([v_scale]))


REFUSED = [
    ("value_cache", {"keys": np.zeros((1, 6, 1, 36), U8)}),
    ("value", {"value": draw((2, 1, 48), "float32", 7)}),
    ("key", {"key": draw((2, 1, 40), "float32", 7)}),
    ("key_cache", {"keys": np.zeros((1, 4, 1, 40), U8)[..., :36]}),
    ("key_cache", {"keys": np.zeros((1, 4, 1, 36), np.int8)}),
    ("slot_mapping", {"slots": (0, 4)}),
    ("slot_mapping", {"slots": (0, 1, 2)}),
    ("k_scale", {"k_scale": 0.0}),
    ("v_scale", {"v_scale": np.inf}),
]


@pytest.mark.parametrize("argument, replaced", REFUSED)
def test_nvfp4_caches_refuse(argument, replaced):
    with pytest.raises(ContractError) as refusal:
        write(oracle.reshape_and_cache_nvfp4, **replaced)
    assert (refusal.value.op, refusal.value.argument) == (WRITE, argument)


mutations(WRITE, {
    "the scale for its reciprocal": ("nx.div(1, nx.load(scale))", "nx.load(scale)", "_reciprocal"),
    "the key's scale for both": ("(value, value_cache, v_scale)", "(value, value_cache, k_scale)"),
    "scales of values in order": ("if cache is key_cache:", "if True:"),
    "turns within the token": ("group % quarter * _TOKENS + offset % _TOKENS", "group", "interleaved"),
    "scales first": ("flat[:, :cut].reshape(blocks, *shape, 8 * groups), flat[:, cut:]",
                     "flat[:, -cut:].reshape(blocks, *shape, 8 * groups), flat[:, :-cut]", "planes"),
    "signs on zeros": ('False, "vt")', 'False, "vllm_native")'),
})  # fmt: skip
