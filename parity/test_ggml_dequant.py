"""ggml blocks to float32: equal to the `gguf` package on random and extreme blocks, to the byte."""

from __future__ import annotations

import hashlib
import tracemalloc

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

import gguf
from gguf import quants
from vtlab.gguf import dequant
from vtlab.gguf.dequant import TYPES, dequantize, dequantize_rows
from vtlab.gguf.reader import BlockTensor, read_gguf
from vtlab.models.demo import demo_installed, demo_path
from vtlab.ops.block_grids import grid
from vtlab.ops.blocks import LAYOUTS
from vtlab.ops.errors import ContractError

from .compare import assert_bytes

SPECIAL_F16 = np.array([0.0, -0.0, 6e-8, -6.1e-5, 1.0, -1.5, 65504.0, np.inf, -np.inf, np.nan], np.float16)
PACKAGE_DECODES = [name for name in TYPES if name != "Q8_K"]
QUANTIZED_BY_PACKAGE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def random_blocks(name: str, rows: int, blocks_a_row: int) -> np.ndarray:
    rng = np.random.Generator(np.random.PCG64([rows, *name.encode()]))
    return rng.integers(0, 256, (rows, blocks_a_row * LAYOUTS[name].nbytes), dtype=np.uint8)


def by_package(raw: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return quants.dequantize(raw, gguf.GGMLQuantizationType[name])


def assert_same(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Bytes equal where not NaN, NaN at the same places (payloads depend on the CPU's operand order)."""
    assert_bytes(
        np.where(np.isnan(got), np.float32(np.nan), got), np.where(np.isnan(want), np.float32(np.nan), want), what
    )


@pytest.mark.parametrize("name", PACKAGE_DECODES)
def test_random_bytes(name):
    raw = random_blocks(name, 37, 8192 // LAYOUTS[name].elements)  # five chunks, the last one short
    assert_same(dequantize(raw, name), by_package(raw, name), name)


@pytest.mark.parametrize("name", [name for name in PACKAGE_DECODES if LAYOUTS[name].elements > 1])
def test_special_scales(name):
    scales = [field for field in LAYOUTS[name].block.names if field in ("d", "dmin", "m")]
    for fill in (0x00, 0xFF, 0x5A):
        pairs = np.stack(np.meshgrid(SPECIAL_F16, SPECIAL_F16), axis=-1).reshape(-1, 2)
        blocks = np.full(len(pairs) * LAYOUTS[name].nbytes, fill, np.uint8).view(LAYOUTS[name].block)
        for index, field in enumerate(scales):
            blocks[field] = pairs[:, index]
        raw = blocks.view(np.uint8).reshape(len(pairs), -1)
        assert_same(dequantize(raw, name), by_package(raw, name), f"{name}, codes {fill:#x}")


def test_every_half_and_every_bf16():
    codes = np.arange(1 << 16, dtype=np.uint16)
    for name in ("F16", "BF16"):
        assert_same(dequantize(codes.view(np.uint8), name), by_package(codes.view(np.uint8), name), name)


def test_q8_k_by_its_definition():
    blocks = random_blocks("Q8_K", 5, 1).view(LAYOUTS["Q8_K"].block)[:, 0]
    blocks["d"] = [0.0, -1.5, 3e-39, 1e37, np.inf]
    got = dequantize(blocks.view(np.uint8).reshape(5, -1), "Q8_K")
    for row, raw in enumerate(blocks):
        for i in range(256):
            with np.errstate(all="ignore"):
                want = np.float32(float(raw["d"]) * int(raw["qs"][i]))  # exact in float64, rounded once
            assert_same(got[row, i : i + 1], np.array([want]), f"Q8_K value {i}")


# The package's quantisers divide by d: below about 2^-120 its reciprocal overflows, so tiny values become zero here.
_FLOATS = st.floats(-(2.0**15), 2.0**15, width=32).map(lambda x: x if abs(x) > 2.0**-100 else 0.0)


@pytest.mark.parametrize("name", QUANTIZED_BY_PACKAGE)
@settings(max_examples=15, deadline=None)
@given(values=hnp.arrays(np.float32, (3, 64), elements=_FLOATS))
def test_quantised_then_dequantised(name, values):
    """Two pieces of the package around ours: same as the package's own decoder, and within a step of the input."""
    with np.errstate(all="ignore"):
        raw = quants.quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8)
    got = dequantize(raw, name, values.shape)
    assert_same(got, by_package(raw, name), name)
    blocks = values.reshape(3, -1, 32)
    span = np.ptp(blocks, axis=-1, keepdims=True)
    peak = np.abs(blocks).max(axis=-1, keepdims=True)
    # half a step of the code; a whole one where the largest magnitude has no code on its other side (q4_0, q5_0);
    # then the float16 rounding of d and m: 2^-11 of what they contribute, or half the smallest subnormal a code step.
    step = {"F32": 0, "F16": 0, "BF16": 0, "Q4_0": peak / 8, "Q4_1": span / 30, "Q5_0": peak / 16, "Q5_1": span / 62}
    step["Q8_0"] = peak / 254
    half = {"F32": 0, "BF16": peak * 2**-8}.get(name, (span + 2 * peak) * 2.0**-11 + 128 * 2.0**-25)
    assert np.all(np.abs(got.reshape(blocks.shape) - blocks.astype(np.float64)) <= step[name] + half)


@pytest.mark.parametrize("name", TYPES)
def test_rows_equal_the_whole(name):
    raw = random_blocks(name, 11, 2)
    tensor = BlockTensor("t", name, (11, 2 * LAYOUTS[name].elements), raw, 0)
    whole = dequantize(tensor)
    for rows in (np.array([[10, 0, 0], [3, 10, 7]]), np.uint8(4), np.empty((0, 2), np.int64), [5]):
        assert_same(dequantize_rows(tensor, rows), whole[np.asarray(rows)], name)


@pytest.mark.parametrize("name", TYPES)
def test_bytes_do_not_depend_on_the_chunk(name, monkeypatch):
    raw = random_blocks(name, 3, 7)
    whole = dequantize(raw, name)
    monkeypatch.setattr(dequant, "_CHUNK", LAYOUTS[name].elements)
    assert_same(dequantize(raw, name), whole, name)


@pytest.mark.parametrize("name", TYPES)
def test_peak_memory_is_the_output(name):
    raw = random_blocks(name, 64, (1 << 15) // LAYOUTS[name].elements)
    dequantize(raw[:1], name)  # grids are made once
    tracemalloc.start()
    try:
        out = dequantize(raw, name)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    chunk = 4 * dequant._CHUNK
    assert out.nbytes == 4 << 21
    assert peak <= (0 if name == "F32" else out.nbytes) + 3 * chunk


def test_f32_is_a_view_and_shapes_are_kept():
    raw = np.arange(96, dtype=np.float32).view(np.uint8).reshape(2, 3, 64)
    assert np.shares_memory(dequantize(raw, "F32"), raw)
    assert dequantize(raw, "F32").shape == (2, 3, 16)
    assert dequantize(raw.tobytes(), 0, (4, 24)).shape == (4, 24)
    assert dequantize(bytes(4), "F32", ()).shape == ()
    assert dequantize(b"", "Q4_K", (0, 256)).shape == (0, 256)
    assert dequantize(raw[:, ::2], "F32").tobytes() == raw[:, ::2].tobytes()


def test_grids_are_ggmls():
    """SHA-256 of ggml's little-endian tables, so that a changed `gguf` package cannot change the formats."""
    digest = {name: hashlib.sha256(grid(name).tobytes()).hexdigest()[:16] for name in ("IQ2_XXS", "IQ3_XXS")}
    assert digest == {"IQ2_XXS": "05826b5d3e472a3a", "IQ3_XXS": "46e35f5a997efdee"}


TABLE = BlockTensor("t", "Q8_0", (3, 32), np.zeros((3, 34), np.uint8), 0)
BAD_CALLS = {
    "unknown type": (lambda: dequantize(bytes(18), "Q9_9", (32,)), "ggml_type"),
    "type without decoder": (lambda: dequantize(bytes(74), "IQ2_XS", (256,)), "ggml_type"),
    "type a list": (lambda: dequantize(bytes(18), ["Q4_0"], (32,)), "ggml_type"),
    "type left out": (lambda: dequantize(bytes(18)), "ggml_type"),
    "shape beside a BlockTensor": (lambda: dequantize(TABLE, shape=(96,)), "ggml_type, shape"),
    "float array": (lambda: dequantize(np.zeros(18, np.float32), "Q4_0"), "tensor"),
    "half a block": (lambda: dequantize(bytes(17), "Q4_0"), "tensor"),
    "too few bytes": (lambda: dequantize(bytes(18), "Q4_0", (64,)), "tensor"),
    "too many bytes": (lambda: dequantize(bytes(36), "Q4_0", (32,)), "tensor"),
    "ragged row": (lambda: dequantize(bytes(18), "Q4_0", (16,)), "shape"),
    "negative axes": (lambda: dequantize(bytes(72), "Q4_0", (-2, -64)), "shape"),
    "negative row": (lambda: dequantize_rows(TABLE, [-1]), "rows"),
    "row past the end": (lambda: dequantize_rows(TABLE, np.array([3])), "rows"),
    "row 2^64-1": (lambda: dequantize_rows(TABLE, np.array([2**64 - 1], np.uint64)), "rows"),
    "float rows": (lambda: dequantize_rows(TABLE, [1.0]), "rows"),
    "one axis": (lambda: dequantize_rows(BlockTensor("t", "F32", (2,), np.zeros(8, np.uint8), 0), [0]), "tensor"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_are_refused(name):
    call, argument = BAD_CALLS[name]
    with pytest.raises(ContractError) as caught:
        call()
    assert caught.value.argument == argument


@pytest.mark.demo
@pytest.mark.skipif(not demo_installed(), reason="the demo extra is not installed")
def test_a_real_file():
    """Gemma-3-270m in Q4_K_M: opened whole, and of every kind of tensor in it the first rows."""
    with read_gguf(demo_path()) as file:
        assert file.arch == "gemma3" and len(file.tensors) == 236
        assert len(file.metadata["tokenizer.ggml.tokens"]) == 262_144
        kinds = {(tensor.type, tensor.shape[-1]): tensor for tensor in file.tensors.values()}
        assert {kind for kind, _ in kinds} == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}
        for tensor in kinds.values():
            raw = tensor.data[:64]
            assert_same(dequantize(raw, tensor.type), by_package(raw, tensor.type), tensor.name)
