"""GGML quantisers, lookups and the interleave: scalar loops, llama.cpp's own bytes, identities, edges."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.gguf.dequant import dequantize
from vtlab.goldens.capture import ggml_library
from vtlab.ops.blocks import LAYOUTS, quant_traits, row_size_bytes
from vtlab.ops.errors import ContractError

from . import ggml_loops as loops
from .compare import assert_bytes
from .goldens import op_cases
from .harness import case, checks, mutations
from .scalar import draw

F32 = np.float32
QUICK = settings(max_examples=10, deadline=None, derandomize=True)
QUANTISERS = {"quantize_row_q8_0": "Q8_0", "quantize_row_q8_1": "Q8_1", "quantize_row_q8_k": "Q8_K"}
BOTH = [case(op=op, kind=kind) for op in QUANTISERS for kind in ("float32", "bfloat16", "float16")]


def both(op):
    return getattr(oracle, op), getattr(oracle, op).mirror


def blocks(kind: str, rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Random bytes under scales of either sign and moderate size."""
    rng = np.random.Generator(np.random.PCG64([seed, *kind.encode()]))
    raw = rng.integers(0, 256, (rows, row_size_bytes(kind, length)), dtype=np.uint8)
    fields = raw.reshape(-1).view(LAYOUTS[kind].block)
    for name, size in (("d", 0.0125), ("dmin", 0.0075), ("m", 0.05), ("s", 1.0)):
        if name in LAYOUTS[kind].block.names:
            fields[name] = size * rng.standard_normal(len(fields))
    return raw


def edge_rows(length: int = 512) -> np.ndarray:
    """Spikes of either sign, ties of the extremum in either order, halves, zeros, tiny and infinite values, NaN."""
    x = np.zeros((14, length), F32)
    x[0, 77], x[1, 77] = 3.25, -3.25
    x[2, [3, 9]], x[3, [3, 9]] = (1.5, -1.5), (-1.5, 1.5)
    x[4] = (np.arange(length) % 255 - 127) / 2 + 0.25
    x[4, ::32] = 127
    x[5] = 1e-40 * np.arange(length)
    x[6], x[6, 5] = 1, np.inf
    x[7], x[7, 40] = 1, -np.inf
    x[8], x[8, 300] = 2, np.nan
    x[9] = 1e7 * np.cos(np.arange(length))
    x[10] = 3e-39
    x[11] = np.linspace(-1, 1, length) * 3e38
    x[12] = np.nextafter(F32(0.5), F32(0)) + np.arange(length) % 2 * 126.5
    x[13], x[13, ::7] = -127.0, 63.5
    return x


@checks(*QUANTISERS, cases=BOTH)
def test_quantisers_against_scalar_loop(case):
    kind = QUANTISERS[case.op]
    with np.errstate(all="ignore"):
        edges = edge_rows().astype(getattr(ml_dtypes, case.kind, case.kind))
    for x in (draw((3, 512), case.kind, 1, scale=3), edges):
        want = np.stack([np.frombuffer(loops.quantised(kind, row.astype(F32)), np.uint8) for row in x])
        for run in both(case.op):
            assert_bytes(run(x), want, case.op)


@checks(*QUANTISERS)
def test_quantisers_against_llama_cpp():
    for op in QUANTISERS:
        found = op_cases("ggml", op)
        assert len(found) == 8
        for golden in found:
            for run in both(op):
                assert_bytes(run(**golden.call()), golden.outputs["out"], str(golden))


@checks(*QUANTISERS)
def test_the_page_s_round_trip():
    """0.1 + 2 cos(i): root of the summed squares over n below 0.002, as upstream's own test asks."""
    x = (0.1 + 2 * np.cos(np.arange(4096) + 3.0)).astype(F32)[None]
    for op, kind in QUANTISERS.items():
        back = loops.dequantised(kind, getattr(oracle, op)(x)[0])
        assert np.sqrt(np.sum((back - x[0]).astype(np.float64) ** 2)) / x.size < 0.002


@checks("quantize_row_q8_k")
@QUICK
@given(st.integers(0, 255), st.floats(0.5, 100), st.integers(0, 99))
def test_the_extremum_becomes_minus_127(place, size, seed):
    x = draw((1, 256), "float32", seed) / F32(10)
    x = np.clip(x, -0.4, 0.4)
    for sign in (1, -1):
        x[0, place] = sign * size
        block = oracle.quantize_row_q8_k(x).view(LAYOUTS["Q8_K"].block)[0, 0]
        assert block["qs"][place] == -127 and np.sign(block["d"]) == -sign
        assert (block["bsums"] == block["qs"].reshape(16, 16).sum(-1, dtype=int)).all()


@checks("quantize_row_q8_0", "quantize_row_q8_1")
def test_q8_1_is_q8_0_with_its_sum():
    x = draw((4, 256), "float32", 3)
    plain, more = oracle.quantize_row_q8_0(x), oracle.quantize_row_q8_1(x)
    one, two = plain.view(LAYOUTS["Q8_0"].block), more.view(LAYOUTS["Q8_1"].block)
    assert_bytes(one["qs"].copy(), two["qs"].copy())
    assert_bytes(one["d"].copy(), two["d"].copy())


@checks(*QUANTISERS)
def test_rows_may_be_strided():
    x = draw((4, 1024), "float32", 4)
    for op in QUANTISERS:
        assert_bytes(getattr(oracle, op)(x[:, 256:768]), getattr(oracle, op)(x[:, 256:768].copy()))
        assert_bytes(getattr(oracle, op)(x[::2]), getattr(oracle, op)(x)[::2])


@pytest.mark.parametrize("op", QUANTISERS)
@pytest.mark.parametrize("length", [16, 33, 255])
def test_ragged_rows_are_refused(op, length):
    with pytest.raises(ContractError) as caught:
        getattr(oracle, op)(np.zeros((2, length), F32))
    assert (caught.value.op, caught.value.argument) == (op, "x")


@checks("embedding_quant", cases=[case(kind=kind) for kind in loops.WEIGHTS])
def test_lookups_against_scalar_loop_and_decoder(case):
    """Mirror: dequantize_row's bytes, by a scalar loop, by gguf/ and by llama.cpp; truth: the exact values, rounded."""
    table = blocks(case.kind, 5, 512)
    ids = np.array([4, 0, 3], np.int32)
    want = np.stack([loops.dequantised(case.kind, table[i]) for i in ids])
    got = oracle.embedding_quant.mirror(table, ids, quant_type=case.kind)
    assert_bytes(got, want, case.kind)
    assert_bytes(got, dequantize(table, case.kind)[ids], case.kind)
    exact = [[block.exact(e) for block in loops.blocks(case.kind, table[i]) for e in range(len(block.q))] for i in ids]
    assert_bytes(oracle.embedding_quant(table, ids, quant_type=case.kind), np.array(exact).astype(F32), case.kind)
    (golden,) = (g for g in op_cases("ggml", "embedding_quant") if g.name == case.kind)
    assert_bytes(oracle.embedding_quant.mirror(**golden.call()), golden.outputs["out"], str(golden))


@checks("embedding_quant")
def test_lookups_store_once_and_take_strided_tables():
    table = np.concatenate([blocks("Q6_K", 6, 256), blocks("Q6_K", 6, 256, 1)], axis=1)
    ids = np.array([5, 5, 1])
    wide = oracle.embedding_quant.mirror(table, ids, quant_type="Q6_K")
    half = oracle.embedding_quant.mirror(table, ids, quant_type="Q6_K", out_dtype="bfloat16")
    assert_bytes(half, wide.astype(ml_dtypes.bfloat16))
    part = oracle.embedding_quant.mirror(table[:, 210:], ids, quant_type="Q6_K")
    assert_bytes(part, wide[:, 256:].copy())


@pytest.mark.parametrize(
    ("change", "argument"),
    [({"table": np.zeros((3, 35), np.uint8)}, "table"), ({"ids": np.array([3])}, "ids"),
     ({"ids": np.array([-1])}, "ids"), ({"quant_type": "Q8_K"}, "quant_type"), ({"quant_type": "F16"}, "quant_type")],
)  # fmt: skip
def test_bad_lookups_are_refused(change, argument):
    good = {"table": np.zeros((3, 34), np.uint8), "ids": np.array([0]), "quant_type": "Q8_0"}
    with pytest.raises(ContractError) as caught:
        oracle.embedding_quant(**(good | change))
    assert (caught.value.op, caught.value.argument) == ("embedding_quant", argument)


@checks("repack_q8_0x4")
def test_interleave_by_its_definition_and_llama_cpp():
    b = blocks("Q8_0", 8, 96)
    out = oracle.repack_q8_0x4(b)
    for four in range(2):
        for block in range(3):
            rows = [b[4 * four + r, 34 * block : 34 * block + 34] for r in range(4)]
            want = [byte for row in rows for byte in row[:2]]
            for chunk in range(16):
                at = 2 + 8 * (chunk // 4)
                want += list(rows[chunk % 4][at : at + 8])
            assert out[four, 136 * block : 136 * block + 136].tolist() == want
    (golden,) = op_cases("ggml", "repack_q8_0x4")
    assert_bytes(oracle.repack_q8_0x4(**golden.call()), golden.outputs["out"])


@pytest.mark.parametrize("shape", [(3, 34), (4, 33), (6, 68)])
def test_bad_interleaves_are_refused(shape):
    with pytest.raises(ContractError) as caught:
        oracle.repack_q8_0x4(np.zeros(shape, np.uint8))
    assert caught.value.argument == "b"


def test_traits():
    for kind in loops.SIZES:
        found = quant_traits(kind)
        assert (found.elements, found.nbytes) == loops.SIZES[kind]
        assert found.has_vec_dot == (kind in loops.WEIGHTS)
        assert found.activation == (loops.PARTNER[kind] if kind in loops.WEIGHTS else None)
    assert row_size_bytes("Q4_K", 512) == 288 and row_size_bytes("Q8_0", 0) == 0
    for call in (lambda: quant_traits("F16"), lambda: quant_traits("nonsense"), lambda: row_size_bytes("Q4_K", 640)):
        with pytest.raises(ContractError):
            call()


LIBRARY = ggml_library.installed()


@pytest.mark.skipif(LIBRARY is None, reason="llama-cpp-python is not installed, and VTLAB_GGML names no folder")
def test_quantisers_and_decoders_live():
    library = ggml_library.Library(LIBRARY)
    x = np.concatenate([draw((40, 512), "float32", 9, scale=5), edge_rows()[[0, 1, 2, 3, 4, 9, 12, 13]]])
    for op, kind in QUANTISERS.items():
        assert_bytes(getattr(oracle, op)(x), np.stack([library.quantise(row, kind) for row in x]), op)
    for kind in loops.WEIGHTS:
        table = blocks(kind, 8, 512, seed=7)
        want = np.stack([library.dequantise(row, 512, kind) for row in table])
        assert_bytes(oracle.embedding_quant.mirror(table, np.arange(8), quant_type=kind), want, kind)


_SHARED = {
    "divide by 128": ("nx.max(nx.abs(x), keepdims=True), 127)", "nx.max(nx.abs(x), keepdims=True), 128)",
                      "_eight_bits"),
    "halves to even": ("np.sign(v) * (low + (size - low >= 0.5))", "np.rint(np.nan_to_num(v))", "_half_away"),
    "divide by d": ("single(nx, nx.mul(x, inverse))", "single(nx, nx.div(x, nx.where(d > 0, d, 1)))", "_eight_bits"),
    "unbounded reciprocal": ("nx.where(np.isfinite(inverse), inverse, 0)", "nx.minimum(inverse, 3.4e38)",
                             "_eight_bits"),
}  # fmt: skip
mutations("quantize_row_q8_0", {**_SHARED, "d before its rounding to float16 scales codes": (
    "d, blocks[\"qs\"] = _eight_bits(nx, x)", "d, blocks[\"qs\"] = _eight_bits(nx, x); blocks[\"qs\"] = "
    "_half_away(np.nan_to_num(np.asarray(nx.div(x, nx.load(nx.store(d, np.float16))), float)))")})  # fmt: skip
mutations(
    "quantize_row_q8_1",
    {
        **_SHARED,
        "sum of the inputs": ("nx.load(codes.sum(-1))", "nx.load(nx.sum(x))"),
        "sum by the stored d": ("nx.mul(d[..., 0],", "nx.mul(nx.load(nx.store(d[..., 0], np.float16)),"),
    },
)
mutations(
    "quantize_row_q8_k",
    {
        "the last extremum wins": ("size.argmax(-1, keepdims=True)", "255 - size[..., ::-1].argmax(-1, keepdims=True)"),
        "the magnitude, not the extremum": ("nx.div(-127, extremum)", "nx.div(-127, nx.abs(extremum))"),
        "+127": ("nx.div(-127, extremum)", "nx.div(127, extremum)"),
        "halves away from zero": ("np.rint(np.asarray(", "_half_away(np.asarray("),
        "no sums": ('blocks["bsums"] = codes', 'blocks["bsums"] = 0 * codes'),
        "sums of 32": (".reshape(*codes.shape[:2], 16, 16).sum(-1)", ".reshape(*codes.shape[:2], 16, 16).sum(-1) * 2"),
    },
)
mutations(
    "embedding_quant",
    {
        "minimum added": ("out = nx.sub(out, minimum", "out = nx.add(out, minimum", "ggml_blocks.values"),
        "no fold": ("nx.mul(nx.load(parts.s), parts.fold)", "nx.load(parts.s)", "ggml_blocks.values"),
        "offset 31 of Q6_K": ("<< 4) - 32", "<< 4) - 31", "ggml_blocks._q6_k"),
        "high nibbles first": ("qs\"], 4, 16) - 8", "qs\"][..., ::-1], 4, 16) - 8", "ggml_blocks._q4_0"),
        "row ids ignored": ("table[ids]", "table[np.sort(ids)]"),
    },
)  # fmt: skip
mutations(
    "repack_q8_0x4",
    {
        "chunks of four": ("4, 4, 8).swapaxes(2, 3)", "4, 8, 4).swapaxes(2, 3)"),
        "rows not interleaved": ("4, 4, 8).swapaxes(2, 3)", "4, 4, 8)"),
        "scales of one row": ("blocks[..., :2].reshape", "blocks[:, :, :1, :2].repeat(4, 2).reshape"),
    },
)
