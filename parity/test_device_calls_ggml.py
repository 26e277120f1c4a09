"""Around the kernels of GGML blocks: rows at any address, one row among many, graphs, calls that are refused."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import ggml_groups, ggml_matmul, ggml_rows
from vtlab.ops.blocks import WEIGHT_TYPES, quant_traits
from vtlab.ops.errors import ContractError
from vtlab.oracle.ggml import random_blocks

from .compare import assert_bytes
from .device_run import Cuda
from .scalar import draw
from .side_streams import side_stream
from .test_device_calls_w4a8 import older

QUANTISERS = {"quantize_row_q8_0": 34, "quantize_row_q8_1": 36, "quantize_row_q8_k": 292}


def weights(kind: str, rows: int, length: int) -> np.ndarray:
    return random_blocks(np.random.default_rng([rows, length]), kind, rows, length)


def placed(device, rows: np.ndarray, shift: int, gap: int):
    """The rows on the device, `shift` elements after a multiple of 16 bytes and `gap` elements apart."""
    count, width = rows.shape
    item = rows.itemsize
    raw = device.raw((count * (width + gap) + shift) * item + 16)
    flat = raw[: (count * (width + gap) + shift) * item].view(rows.dtype)[shift:]
    view = flat.reshape(count, width + gap)[:, :width]
    view[...] = device.send(rows)
    return view


@pytest.mark.parametrize("shift, gap", [(1, 0), (2, 2), (4, 12), (0, 7), (16, 48)])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_K", "Q6_K", "IQ3_XXS"])
def test_weights_at_any_address(device, kind, shift, gap):
    """Rows of blocks where words, or even halves, are not aligned: products and lookups."""
    a, b, ids = draw((2, 768), "float32", 1), weights(kind, 9, 768), np.array([8, 0, 3])
    for M in (1, 2):
        call = {"a": device.send(a[:M]), "b": placed(device, b, shift, gap), "quant_type": kind}
        got = device.fetch(device.call("matmul_bt_quant", call))
        assert_bytes(got, oracle.matmul_bt_quant.mirror_on("cuda", a[:M], b, quant_type=kind), f"{M} rows")
    table = placed(device, b, shift, gap)
    got = device.call("embedding_quant", {"table": table, "ids": device.send(ids), "quant_type": kind})
    assert_bytes(device.fetch(got), oracle.embedding_quant.mirror(b, ids, quant_type=kind))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q6_K", "IQ2_XXS"])
@pytest.mark.parametrize("size", [1e-34, 1e34])
def test_one_row_of_sizes_far_from_one(device, kind, size):
    """Too small or too large for quotients that do not ask where sizes lie: such blocks are coded again."""
    a, b = (draw((1, 1024), "float32", 3) * size).astype(np.float32), weights(kind, 40, 1024)
    got = device.fetch(device.call("matmul_bt_quant", {"a": device.send(a), "b": device.send(b), "quant_type": kind}))
    assert_bytes(got, oracle.matmul_bt_quant.mirror_on("cuda", a, b, quant_type=kind))


@pytest.mark.parametrize("shift, gap", [(1, 0), (0, 3), (8, 8)])
def test_activations_at_any_address(device, shift, gap):
    x, b = draw((3, 512), "bfloat16", 2), weights("Q5_K", 5, 512)
    for op in QUANTISERS:
        got = device.call(op, {"x": placed(device, x, shift, gap)})
        assert_bytes(device.fetch(got), getattr(oracle, op).mirror(x), op)
    got = device.call(
        "matmul_bt_quant", {"a": placed(device, x, shift, gap), "b": device.send(b), "quant_type": "Q5_K"}
    )
    assert_bytes(device.fetch(got), oracle.matmul_bt_quant.mirror_on("cuda", x, b, quant_type="Q5_K"))


@pytest.mark.parametrize("op", QUANTISERS)
def test_blocks_go_to_any_address(device, op):
    x = draw((3, 256), "float32", 3)
    want = getattr(oracle, op).mirror(x)
    raw = device.raw(want.size + 32)
    raw[...] = 0x5A
    out = raw[1 : 1 + want.size].reshape(want.shape)
    device.call(op, {"x": device.send(x), "out": out})
    left = device.fetch(raw)
    assert_bytes(left[1 : 1 + want.size].reshape(want.shape), want)
    assert np.all(left[:1] == 0x5A) and np.all(left[1 + want.size :] == 0x5A)


@pytest.mark.parametrize("kind", ["Q5_0", "Q2_K", "Q3_K"])
def test_a_row_has_its_bytes_in_any_batch(device, kind):
    """A decode step and a prompt: the kernels for one row and for four give it the same bytes."""
    a, b = draw((6, 1280), "float32", 4), weights(kind, 11, 1280)
    whole = device.fetch(device.call("matmul_bt_quant", {"a": device.send(a), "b": device.send(b), "quant_type": kind}))
    for M in (1, 5):  # one row: the kernel for it where rows of the weight are aligned
        call = {"a": device.send(a[:M]), "b": device.send(b), "quant_type": kind}
        assert_bytes(device.fetch(device.call("matmul_bt_quant", call)), whole[:M], f"{M} rows")
    call = {"a": device.send(a), "b": device.send(b[3:]), "quant_type": kind}
    assert_bytes(device.fetch(device.call("matmul_bt_quant", call)), whole[:, 3:].copy(), "fewer columns")


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "Q8_K"])
def test_products_beside_each_other(device, kind):
    """Columns of a wider result: the parts of q, k and v in different types."""
    a, b = draw((3, 256), "float32", 9), weights(kind, 5, 256)
    wide = device.send(np.full((3, 12), 7, np.float32))
    call = {"a": device.send(a), "b": device.send(b), "quant_type": kind, "out": wide[:, 4:9]}
    device.call("matmul_bt_quant", call)
    want = np.full((3, 12), 7, np.float32)
    want[:, 4:9] = oracle.matmul_bt_quant.mirror_on("cuda", a, b, quant_type=kind)
    assert_bytes(device.fetch(wide), want)


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_few_multiprocessors_have_many_rows_each(device, kind, monkeypatch):
    """One row of a: tiles of rows one after the other, rounds of blocks, chunks, whoever has how many of them."""
    monkeypatch.setattr(ggml_matmul, "MULTIPROCESSORS", 2)
    a, b = draw((1, 4864), "bfloat16", 10), weights(kind, 150, 4864)
    for K in (4864, 2304):
        few = b[:, : K // quant_traits(kind).elements * quant_traits(kind).nbytes]
        got = device.call("matmul_bt_quant", {"a": device.send(a[:, :K]), "b": device.send(few), "quant_type": kind})
        want = oracle.matmul_bt_quant.mirror_on("cuda", a[:, :K], few, quant_type=kind)
        assert_bytes(device.fetch(got), want, f"K = {K}")


@pytest.mark.parametrize("kind", ["Q3_K", "IQ3_XXS"])
def test_more_terms_than_a_block_has_room_for(device, kind, monkeypatch):
    """More blocks than multiprocessors, each with fewer rows; and more of them than the ring holds."""
    monkeypatch.setattr(ggml_matmul, "MULTIPROCESSORS", 1)
    a, b = draw((1, 1280), "float32", 2), weights(kind, 500, 1280)
    for room in (1 << 20, 1000):
        monkeypatch.setattr(ggml_matmul, "_TERMS", room)
        got = device.call("matmul_bt_quant", {"a": device.send(a), "b": device.send(b), "quant_type": kind})
        want = oracle.matmul_bt_quant.mirror_on("cuda", a, b, quant_type=kind)
        assert_bytes(device.fetch(got), want, f"room for {room} bytes")


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_K", "Q2_K"])
def test_a_share_of_many_rows_for_several(device, kind, monkeypatch):
    """A block takes its share in parts, whose stages follow each other in the same places."""
    monkeypatch.setattr(ggml_rows, "MULTIPROCESSORS", 1)
    a, b = draw((9, 1536), "bfloat16", 12), weights(kind, 270, 1536)
    got = device.call("matmul_bt_quant", {"a": device.send(a), "b": device.send(b), "quant_type": kind})
    assert_bytes(device.fetch(got), oracle.matmul_bt_quant.mirror_on("cuda", a, b, quant_type=kind))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_tiles_one_after_the_other(device, kind, monkeypatch):
    """Groups of warps go on from tile to tile, the last of which are cut in two, in the same places."""
    monkeypatch.setattr(ggml_groups, "MULTIPROCESSORS", 3)
    a, b = draw((130, 1280), "bfloat16", 13), weights(kind, 430, 1280)
    got = device.call("matmul_bt_quant", {"a": device.send(a), "b": device.send(b), "quant_type": kind})
    assert_bytes(device.fetch(got), oracle.matmul_bt_quant.mirror_on("cuda", a, b, quant_type=kind))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "IQ2_XXS"])
def test_a_gpu_with_less_shared_memory(kind):
    """One row of a goes the way of several where its codes, tables, or two slots of a ring do not fit."""
    a, b = draw((1, 512), "float32", 11), weights(kind, 9, 512)
    device = older(shared_memory=50 << 10)
    got = device.call("matmul_bt_quant", {"a": device.send(a), "b": device.send(b), "quant_type": kind})
    assert_bytes(device.fetch(got), oracle.matmul_bt_quant.mirror_on("cuda", a, b, quant_type=kind))
    assert device.runtime.launched == [f"ggml_codes_{quant_traits(kind).elements}", f"ggml_{kind.lower()}_few_early"]


def test_many_rows_go_in_pieces(device, monkeypatch):
    monkeypatch.setattr(ggml_matmul, "_MOST", 1024)
    a, b = draw((9, 256), "float32", 8), weights("Q4_K", 5, 256)
    got = device.call("matmul_bt_quant", {"a": device.send(a), "b": device.send(b), "quant_type": "Q4_K"})
    assert_bytes(device.fetch(got), oracle.matmul_bt_quant.mirror_on("cuda", a, b, quant_type="Q4_K"))


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_nothing_to_add_is_zero(device, kind):
    a, b = np.zeros((2, 0), np.float32), np.zeros((3, 0), np.uint8)
    got = device.call("matmul_bt_quant", {"a": device.send(a), "b": device.send(b), "quant_type": kind})
    assert_bytes(device.fetch(got), np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("a, width, kind, match", [
    ((2, 48), 34, "Q8_0", "multiple of 32"),
    ((2, 128), 144, "Q4_K", "multiple of 256"),
    ((2, 256), 143, "Q4_K", "144 bytes"),
    ((2, 256), 288, "Q4_K", "144 bytes"),
    ((2, 32), 18, "Q4_2", "quant_type"),
])  # fmt: skip
def test_rows_that_do_not_match_are_refused(device, a, width, kind, match):
    call = {"a": device.send(np.zeros(a, np.float32)), "b": device.send(np.zeros((3, width), np.uint8))}
    with pytest.raises(ContractError, match=match):
        device.call("matmul_bt_quant", call | {"quant_type": kind})


def test_results_of_another_form_are_refused(device):
    a, b = device.send(draw((2, 64), "float32", 5)), device.send(weights("Q4_0", 3, 64))
    call = {"a": a, "b": b, "quant_type": "Q4_0"}
    for shape, dtype in (((2, 4), np.float32), ((2, 3), np.float16)):
        with pytest.raises(ContractError, match="out"):
            device.call("matmul_bt_quant", call | {"out": device.send(np.zeros(shape, dtype))})
    with pytest.raises(ContractError, match="memory shared with another argument"):
        device.call("quantize_row_q8_0", {"x": a, "out": a.view(np.uint8).reshape(-1)[: 2 * 68].reshape(2, 68)})
    with pytest.raises(ContractError, match="table"):
        table = device.send(np.zeros((2, 33), np.uint8))
        device.call(
            "embedding_quant", {"table": table, "ids": device.send(np.zeros(1, np.int32)), "quant_type": "Q8_0"}
        )


def test_a_captured_product_reads_what_is_there_later(device):
    """Scratch that was there before the capture serves it; a replay codes the activations anew."""
    if not isinstance(device, Cuda):
        pytest.skip("graphs are a GPU's")
    cupy, inputs = device.cupy, [draw((1, 1024), "float32", seed) for seed in (6, 7)]
    b = weights("Q4_K", 40, 1024)
    call = {"a": device.send(inputs[0]), "b": device.send(b), "quant_type": "Q4_K"}
    out = device.call("matmul_bt_quant", dict(call))
    stream = side_stream(cupy)
    with stream:
        device.call("matmul_bt_quant", call | {"out": out})
        stream.synchronize()
        stream.begin_capture()
        device.call("matmul_bt_quant", call | {"out": out})
        graph = stream.end_capture()
        call["a"][...] = device.send(inputs[1])
        graph.launch(stream)
        stream.synchronize()
    assert_bytes(device.fetch(out), oracle.matmul_bt_quant.mirror_on("cuda", inputs[1], b, quant_type="Q4_K"))
