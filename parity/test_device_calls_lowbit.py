"""Around the low-bit kernels: any batch and any way to deal work out, views, refused calls, orders out of range."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import marlin_stream, runtime, w4a16
from vtlab.ops.errors import ContractError

from .compare import assert_bytes, assert_nmse
from .device_run import Emulated
from .emulation import EmulatedRuntime
from .scalar import draw

RNG = np.random.Generator(np.random.PCG64(5))


def words(*shape):
    return RNG.integers(-(2**31), 2**31, shape).astype(np.int32)


def scales(groups, columns, kind):
    return (np.abs(draw((groups, columns), "float32", 3)) / 100 + 0.004).astype(draw((1,), kind, 1).dtype)


K, N = 1152, 128
CALLS = {
    "marlin_gemm": lambda M, kind: {
        "a": draw((M, K), kind, 1), "b_q_weight": words(K // 16, 2 * N), "b_scales": scales(9, N, kind),
        "quant_type": "uint4b8",
    },
    "gptq_gemm": lambda M, kind: {
        "a": draw((M, K), kind, 1), "b_q_weight": words(K // 8, N), "b_gptq_qzeros": words(9, N // 8),
        "b_gptq_scales": scales(9, N, kind),
    },
    "awq_gemm": lambda M, kind: {
        "input": draw((M, K), kind, 1), "qweight": words(K, N // 8), "scales": scales(9, N, kind),
        "qzeros": words(9, N // 8),
    },
    "machete_mm": lambda M, kind: {
        "a": draw((M, K), kind, 1), "b_q": words(K // 8, N), "b_group_scales": scales(9, N, kind),
        "quant_type": "uint4b8",
    },
}  # fmt: skip
SMALL_GROUPS = {"b_scales": scales(72, N, "bfloat16")}
"""Groups that no tile of Hopper's copy engine has: they stay with the kernels of other GPUs."""
WIDE = [("marlin_gemm", "bfloat16"), ("gptq_gemm", "float16"), ("machete_mm", "bfloat16")]


def sent(device, call):
    return {name: device.send(value) for name, value in call.items()}


def first_of(call):
    return next(iter(call))


@pytest.mark.parametrize("op, kind", WIDE)
def test_a_row_has_its_bytes_in_any_batch(device, op, kind):
    """A decode step and a prompt: the kernels for few rows and for many give row 0 the same bytes."""
    call = CALLS[op](70, kind)
    rows = first_of(call)
    whole = device.fetch(device.call(op, sent(device, call)))
    for M in (1, 9, 17):
        got = device.fetch(device.call(op, sent(device, call | {rows: call[rows][:M]})))
        assert_bytes(got, whole[:M], f"{M} rows")


@pytest.mark.parametrize("settings", [{"_BLOCKS": 0}, {"_BLOCKS": 1 << 20}, {"_MANY_WARPS": 4}, {"FEW": 0}], ids=str)
def test_how_the_work_is_dealt_out_changes_no_byte(device, settings, monkeypatch):
    call = CALLS["marlin_gemm"](9, "bfloat16") | SMALL_GROUPS
    want = device.fetch(device.call("marlin_gemm", sent(device, call)))
    for name, value in settings.items():
        monkeypatch.setattr(w4a16, name, value)
    assert_bytes(device.fetch(device.call("marlin_gemm", sent(device, call))), want)


@pytest.mark.parametrize("M", [3, 40])
@pytest.mark.parametrize("quant_type", ["uint4", "uint8b128"])
def test_how_marlins_tiles_are_dealt_out_changes_no_byte(device, quant_type, M, monkeypatch):
    """In so many shares that they end within tiles, and within their parts."""
    k, n, bits = 1152, 1088, 8 if quant_type == "uint8b128" else 4
    call = {"a": draw((M, k), "bfloat16", 1), "b_q_weight": words(k // 16, n * bits // 2), "quant_type": quant_type,
            "b_scales": scales(9, n, "bfloat16")} | ({"b_zeros": words(9, n // 8)} if bits == 4 else {})  # fmt: skip
    truth = oracle.marlin_gemm(**call)
    for run in (132, 1):
        monkeypatch.setattr(marlin_stream, "_RUN", run)
        monkeypatch.setattr(marlin_stream, "MULTIPROCESSORS", 132)
        want = device.fetch(device.call("marlin_gemm", sent(device, call)))
        assert_nmse(want, truth, 2.0**-16)
        for multiprocessors in (1, 3, 4, 5):
            monkeypatch.setattr(marlin_stream, "MULTIPROCESSORS", multiprocessors)
            for _ in range(2):  # what a call leaves behind serves the next
                assert_bytes(device.fetch(device.call("marlin_gemm", sent(device, call))), want, f"{multiprocessors}")


def test_little_shared_memory_deals_chains_out(monkeypatch):
    """A GPU with 99 KiB a block."""
    small = EmulatedRuntime()
    small.shared_memory = lambda: 99 << 10
    for M in (9, 20):
        call = CALLS["marlin_gemm"](M, "bfloat16") | SMALL_GROUPS
        assert_bytes(Emulated(small).call("marlin_gemm", call), Emulated().call("marlin_gemm", call))


@pytest.mark.parametrize("M", [3, 18])
@pytest.mark.parametrize("op", sorted(CALLS))
def test_operands_at_any_address(device, op, M):
    """Where no 16-byte copy may touch them."""
    call = CALLS[op](M, "float16")
    want = device.fetch(device.call(op, sent(device, call)))
    moved = sent(device, call)
    for name, value in call.items():
        if isinstance(value, np.ndarray):
            shift = value.dtype.itemsize
            moved[name] = device.raw(value.nbytes + shift)[shift:].view(value.dtype).reshape(value.shape)
            moved[name][...] = device.send(value)
    assert_bytes(device.fetch(device.call(op, moved)), want)


def _moves():
    order = RNG.permutation(128).astype(np.int32)
    along_k, along_n, codes = words(16, 128), words(128, 16), words(128, 128) & 15
    yield from (("gptq_marlin_repack", {"b_q_weight": along_k, "bits": 4, "perm": perm}) for perm in (None, order))
    yield "gptq_marlin_repack", {"b_q_weight": along_k, "bits": 4, "is_a_8bit": True}
    yield "awq_marlin_repack", {"b_q_weight": along_n}
    yield "machete_prepack_b", {"b_q_weight": along_k, "bits": 4}
    yield "gptq_shuffle", {"qweight": along_k, "bits": 4, "q_perm": order}
    yield "gptq_unshuffle", {"qweight": along_k, "bits": 4, "q_perm": order}
    yield from (("gptq_pack", {"q": codes, "bits": 4}), ("gptq_unpack", {"qweight": along_k, "bits": 4}))
    yield from (("awq_pack", {"q": codes, "bits": 4}), ("awq_unpack", {"qweight": along_n, "bits": 4}))


@pytest.mark.parametrize("op, call", list(_moves()), ids=lambda part: part if isinstance(part, str) else "")
def test_words_at_any_address(device, op, call):
    """Where no 16-byte access may touch them, codes move one by one, to the same bytes."""
    name = first_of(call)
    shifted = device.raw(call[name].nbytes + 4)[4:].view(np.int32).reshape(call[name].shape)
    shifted[...] = device.send(call[name])
    want = device.fetch(device.call(op, sent(device, call)))
    assert_bytes(device.fetch(device.call(op, sent(device, call) | {name: shifted})), want)
    assert_bytes(want, getattr(oracle, op).mirror(**call))


def test_shuffled_weights_take_columns_in_their_order(device):
    """Activation order sorted beforehand and named row by row: the same product, in another order."""
    g_idx = RNG.permutation(K).astype(np.int32) // 128
    q, qzeros, s = RNG.integers(0, 16, (K, N)).astype(np.int32), words(9, N // 8), scales(9, N, "float16")
    a, perm = draw((5, K), "float16", 1), np.argsort(g_idx, kind="stable").astype(np.int32)
    plain, shuffled = oracle.gptq_pack(q, bits=4), oracle.gptq_shuffle(oracle.gptq_pack(q, bits=4), perm, bits=4)
    named = {"a": a, "b_q_weight": plain, "b_gptq_qzeros": qzeros, "b_gptq_scales": s, "b_g_idx": g_idx}
    ordered = named | {"b_q_weight": shuffled, "b_g_idx": perm, "use_exllama": True}
    truth = oracle.gptq_gemm(**named)
    for call in (named, ordered):
        assert_nmse(device.fetch(device.call("gptq_gemm", sent(device, call))), truth, 2.0**-16)


def test_an_order_out_of_range_writes_and_reads_nothing_else(device):
    """On a GPU the host does not look at an order: rows that are not there are row 0."""
    if isinstance(device, Emulated):
        pytest.skip("the host looks: parity/test_gptq_awq.py")
    x, perm = draw((2, 8), "float16", 1), np.array([0, 1, -5, 99, 4, 5, 6, 7], np.int32)
    got = device.fetch(device.call("permute_cols", sent(device, {"x": x, "perm": perm})))
    assert_bytes(got, x[:, [0, 1, 0, 0, 4, 5, 6, 7]])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"b_scales": lambda s: s[:5]}, "5 groups, want a number that divides K = 1152"),
        ({"b_q_weight": lambda w: w[:, :-1]}, r"b_q_weight\): got shape"),
        ({"a": lambda a: a.astype(np.float32)}, "float32"),
        ({"quant_type": lambda q: "uint4"}, "got None, want zero points for uint4"),
        ({"out": lambda out: np.empty((3, N), np.float32)}, r"marlin_gemm\(out\): got float32"),
    ],
    ids=["groups", "words", "dtype", "zeros", "out"],
)
def test_refused_calls(device, change, message):
    call = CALLS["marlin_gemm"](3, "float16")
    for name, edit in change.items():
        call[name] = edit(call.get(name))
    with pytest.raises(ContractError, match=message):
        device.call("marlin_gemm", sent(device, call))


def test_groups_that_no_copy_fits_are_declined():
    call = CALLS["marlin_gemm"](3, "float16") | {"b_scales": scales(144, N, "float16")}
    from vtlab.device.marlin_matmul import marlin_gemm

    with runtime.using(EmulatedRuntime()):
        assert marlin_gemm(**call) is NotImplemented
