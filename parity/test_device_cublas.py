"""cuBLAS as a provider: what is asked of it, on a BLAS of NumPy, and what comes back, on a GPU (``--device cuda``)."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from vtlab import ops, oracle
from vtlab.device import cublas, runtime
from vtlab.device.launch import PROVIDER
from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .compare import assert_bytes, assert_rel_l2, assert_within
from .emulation import EmulatedRuntime
from .scalar import draw

F32 = np.dtype(np.float32)
_DTYPES = {0: F32, 2: np.dtype(np.float16), 14: np.dtype(ml_dtypes.bfloat16)}
_STORE = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}

CALLS = [
    ("matmul_bt", (1, 40), (33, 40), "bfloat16", None), ("matmul_bt", (70, 513), (65, 513), "bfloat16", "float32"),
    ("matmul_bt", (5, 64), (9, 64), "float16", None), ("matmul_bt", (9, 130), (17, 130), "float32", None),
    ("matmul", (3, 65), (65, 12), "bfloat16", None), ("matmul", (130, 256), (256, 40), "float32", None),
    ("batched_matmul", (3, 5, 64), (3, 64, 24), "bfloat16", None),
    ("batched_matmul", (2, 1, 7), (2, 7, 3), "float32", None),
]  # fmt: skip


def operands(op, a, b, kind, out_dtype):
    """Arguments of one call, by name."""
    call = {"a": draw(a, kind, 1), "b": draw(b, kind, 2)}
    return call if out_dtype is None else call | {"out_dtype": out_dtype}


def bound(op, call, truth, kind):
    """One store, and float32 sums of K products that tensor cores may truncate, which costs up to 2^-23 each."""
    a, b = (np.abs(call[name].astype(np.float64)) for name in ("a", "b"))
    sums = a.shape[-1] * 2.0**-23 * (a @ (b.T if op == "matmul_bt" else b))
    return _STORE[kind] * (np.abs(truth.astype(np.float64)) + sums) + sums


def assert_close(op, call, got):
    kind = got.dtype.name
    truth = getattr(oracle, op)(**call | {"out_dtype": "float32"})
    assert_within(got, truth, bound(op, call, truth, kind), op)
    assert_rel_l2(got, truth, cublas.PARITY.bound)


class Blas:
    """The calls of CuPy 14.2's ``cupy.cuda.cublas`` that the provider makes, on NumPy's memory, with BLAS's columns."""

    def __init__(self):
        self.mode, self.modes = 3, []

    def getMathMode(self, handle):
        return self.mode

    def setMathMode(self, handle, mode):
        self.mode = mode
        self.modes.append(mode)

    def _matrix(self, address, kind, rows, columns, leading, turned):
        if turned:
            rows, columns = columns, rows
        assert leading >= max(1, rows)
        dtype = _DTYPES[kind]
        count = (columns - 1) * leading + rows
        flat = np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)
        view = np.lib.stride_tricks.as_strided(flat, (rows, columns), (dtype.itemsize, leading * dtype.itemsize))
        return view.T if turned else view

    def gemmEx(self, handle, transa, transb, m, n, k, alpha, A, Atype, lda, B, Btype, ldb, beta, C, Ctype, ldc,
               computeType, algo):  # fmt: skip
        assert (computeType, algo, self.mode) == (68, -1, 16)
        one, zero = (ctypes.c_float.from_address(pointer).value for pointer in (alpha, beta))
        assert (one, zero) == (1, 0)
        left = self._matrix(A, Atype, m, k, lda, transa)
        right = self._matrix(B, Btype, k, n, ldb, transb)
        self._matrix(C, Ctype, m, n, ldc, 0)[...] = (left.astype(F32) @ right.astype(F32)).astype(_DTYPES[Ctype])

    def gemmStridedBatchedEx(self, handle, transa, transb, m, n, k, alpha, A, Atype, lda, strideA, B, Btype, ldb,
                             strideB, beta, C, Ctype, ldc, strideC, batchCount, computeType, algo):  # fmt: skip
        for g in range(batchCount):
            shifted = [
                address + g * stride * _DTYPES[kind].itemsize
                for address, stride, kind in ((A, strideA, Atype), (B, strideB, Btype), (C, strideC, Ctype))
            ]
            self.gemmEx(handle, transa, transb, m, n, k, alpha, shifted[0], Atype, lda, shifted[1], Btype, ldb, beta,
                        shifted[2], Ctype, ldc, computeType, algo)  # fmt: skip


@pytest.fixture
def blas(monkeypatch):
    found = Blas()
    monkeypatch.setattr(cublas, "_library", lambda: (found, 7))
    with runtime.using(EmulatedRuntime()):
        yield found


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_call_to_blas(blas, call):
    op, *_ = call
    arguments = operands(*call)
    got = getattr(cublas, op)(**arguments)
    assert got.dtype == np.dtype(arguments.get("out_dtype", arguments["a"].dtype)) and got.flags.c_contiguous
    assert_close(op, arguments, got)
    assert blas.modes == [16, 3]


def test_views(blas):
    """Column slices of packed tensors, and batches that interleave, go as they are."""
    a, b = draw((6, 96), "bfloat16", 1)[:, 8:48], draw((9, 64), "bfloat16", 2)[:, 24:]
    assert_close("matmul_bt", {"a": a, "b": b}, cublas.matmul_bt(a, b))
    a, b = draw((5, 3, 16), "float32", 1).transpose(1, 0, 2), draw((16, 3, 8), "float32", 2).transpose(1, 0, 2)
    assert_close("batched_matmul", {"a": a, "b": b}, cublas.batched_matmul(a, b))


def test_out_and_empty_results(blas):
    a, b = draw((4, 8), "float32", 1), draw((6, 8), "float32", 2)
    out = runtime.current().empty((4, 6), F32)
    assert cublas.matmul_bt(a, b, out=out) is out
    assert_close("matmul_bt", {"a": a, "b": b}, out)
    with pytest.raises(ContractError, match=r"matmul_bt\(out\): got"):
        cublas.matmul_bt(a, b, out=np.zeros((4, 6), np.float16))
    blas.modes.clear()
    assert cublas.matmul_bt(a[:0], b).shape == (0, 6) and not blas.modes


def test_what_it_declines(blas):
    f32, bf16 = draw((4, 8), "float32", 1), draw((6, 8), "bfloat16", 2)
    assert cublas.matmul_bt(f32, bf16) is NotImplemented
    assert cublas.matmul_bt(f32, f32, out_dtype="bfloat16") is NotImplemented
    assert cublas.matmul_bt(bf16, bf16, out_dtype="float16") is NotImplemented
    assert cublas.matmul_bt(f32[:, :0], f32[:, :0]) is NotImplemented
    runtime.current().in_capture = True
    assert cublas.matmul_bt(bf16, bf16) is NotImplemented
    assert not blas.modes


def test_the_mode_is_put_back_after_an_error(blas, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no")

    monkeypatch.setattr(blas, "gemmEx", fail)
    a = draw((4, 8), "float32", 1)
    with pytest.raises(RuntimeError, match="no"):
        cublas.matmul_bt(a, a)
    assert blas.mode == 3


@pytest.mark.parametrize("op", ["matmul", "matmul_bt", "batched_matmul"])
def test_it_serves_where_it_is_asked_for(op):
    assert providers.get_op(op, "cuda").__module__ == "vtlab.device.matmul"
    with ops.using("cublas", PROVIDER):
        assert providers.get_op(op, "cuda").__module__ == "vtlab.device.cublas"
        assert providers.get_op("rms_norm", "cuda").__module__ == "vtlab.device.norm"
        assert providers.get_op_fallback(op, "cuda", "cublas").__module__ == "vtlab.device.matmul"
    with ops.using(PROVIDER):
        assert providers.get_op(op, "cuda").__module__ == "vtlab.device.matmul"


@pytest.mark.parametrize("call", [*CALLS, ("matmul_bt", (512, 2048), (1024, 2048), "bfloat16", None)], ids=str)
def test_on_a_gpu(call, request):
    """Within the bound of truth, and the same bytes again."""
    if request.config.getoption("--device") != "cuda":
        pytest.skip("needs a GPU: --device cuda")
    import cupy

    op, *_ = call
    host = operands(*call)
    sent = {name: cupy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in host.items()}
    with ops.using("cublas"):
        first, second = (cupy.asnumpy(getattr(ops, op)(**sent)) for _ in range(2))
    assert_bytes(second, first)
    assert_close(op, host, first)
