"""Dense products by cuBLAS, for those who would rather have speed than one order: ``ops.using("cublas", "cuda-c++")``.

cuBLAS picks the order of a sum by the shape of the whole product, so a row's bytes here depend on how many rows stand
beside it. It therefore serves only where a `using` names it, and declines what it cannot do: operands of two dtypes,
results it has no kernel for, sizes beyond 31 bits, K = 0, and calls under graph capture, where it would allocate.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.contract import Parity
from vtlab.ops.providers.steering import steered

from .cupy_runtime import import_cupy
from .launch import results
from .runtime import current

PROVIDER = "cublas"
PARITY = Parity(
    "rel_l2",
    2.0**-8,
    "one store, 2^-8 at most in bfloat16, beside which K float32 sums of unit-variance products are negligible",
)
"""Against truth: no bytes are promised but those of the same call on the same GPU."""

_NORMAL, _TRANSPOSED = 0, 1  # cublasOperation_t
_FLOAT32_COMPUTE, _DEFAULT_ALGORITHM = 68, -1  # cublasComputeType_t, cublasGemmAlgo_t
_KEEP_PARTIAL_SUMS = 16  # cublasMath_t: no tf32, and split sums are not rounded to the result's dtype
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType_t
_COMBINATIONS = {(kind, out) for kind in _TYPES for out in (kind, "float32")}
_MOST = 2**31 - 1
_SCALES = np.array([1, 0], np.float32)
_ONE, _ZERO = (_SCALES.ctypes.data + 4 * i for i in range(2))


def _library():
    """(CuPy's cuBLAS bindings, the handle of the current device and thread)."""
    cuda = import_cupy().cuda
    return cuda.cublas, cuda.get_cublas_handle()


def _product(op: str, a, b, transposed: bool, out_dtype, out):
    """a [G?, M, K] by b [G?, K, N], or by the rows of b [N, K]; cuBLAS, whose columns are our rows, gets b by a."""
    *lead, rows, depth = a.shape
    columns = b.shape[-2 if transposed else -1]
    dtype, batches = np.dtype(out_dtype or a.dtype), lead[0] if lead else 1
    left, right = (_leading(array) for array in (a, b))
    known = a.dtype == b.dtype and (a.dtype.name, dtype.name) in _COMBINATIONS
    if not known or not depth or max(rows, columns, depth, batches, left, right) > _MOST or current().capturing():
        return NotImplemented
    (target,) = results(op, out, (a, b), ((*lead, rows, columns), dtype))
    if not batches * rows * columns:
        return target
    pointer = current().pointer
    kind, out_kind = _TYPES[a.dtype.name], _TYPES[dtype.name]
    how = (_TRANSPOSED if transposed else _NORMAL, _NORMAL, columns, rows, depth, _ONE)
    last = (_FLOAT32_COMPUTE, _DEFAULT_ALGORITHM)
    library, handle = _library()
    before = library.getMathMode(handle)
    library.setMathMode(handle, _KEEP_PARTIAL_SUMS)
    try:
        if lead:
            library.gemmStridedBatchedEx(
                handle, *how, pointer(b), kind, right, _between(b), pointer(a), kind, left, _between(a),
                _ZERO, pointer(target), out_kind, columns, rows * columns, batches, *last,
            )  # fmt: skip
        else:
            library.gemmEx(
                handle, *how, pointer(b), kind, right, pointer(a), kind, left, _ZERO, pointer(target), out_kind,
                columns, *last,
            )  # fmt: skip
    finally:
        library.setMathMode(handle, before)
    return target


def _leading(array) -> int:
    """Elements from one row to the next; a matrix of one row has none, and any length will do."""
    return array.strides[-2] // array.dtype.itemsize if array.shape[-2] > 1 else max(1, array.shape[-1])


def _between(array) -> int:
    """Elements from one matrix of a batch to the next."""
    return array.strides[0] // array.dtype.itemsize if array.shape[0] > 1 else 0


def _asked(capabilities) -> bool:
    return PROVIDER in (steered() or ())


@providers.provider("matmul", "cuda", PROVIDER, priority=10, supports=_asked)
def matmul(a, b, *, out_dtype=None, out=None):
    """oracle.matmul.matmul, within `PARITY`."""
    return _product("matmul", a, b, False, out_dtype, out)


@providers.provider("matmul_bt", "cuda", PROVIDER, priority=10, supports=_asked)
def matmul_bt(a, b, *, out_dtype=None, out=None):
    """oracle.matmul.matmul_bt, within `PARITY`."""
    return _product("matmul_bt", a, b, True, out_dtype, out)


@providers.provider("batched_matmul", "cuda", PROVIDER, priority=10, supports=_asked)
def batched_matmul(a, b, *, out_dtype=None, out=None):
    """oracle.matmul.batched_matmul, within `PARITY`."""
    return _product("batched_matmul", a, b, False, out_dtype, out)
