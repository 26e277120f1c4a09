"""ggml blocks to float32, in chunks that stay in cache, so that peak memory is the output and little more."""

from __future__ import annotations

import math

import numpy as np

from vtlab.ops.blocks import LAYOUT_BY_ID, LAYOUTS, BlockLayout
from vtlab.ops.errors import ContractError

from . import dequant_iq, dequant_k, dequant_legacy
from .reader import BlockTensor

_DECODERS = dequant_legacy.DECODERS | dequant_k.DECODERS | dequant_iq.DECODERS
_CHUNK = 1 << 16  # values decoded at a time: 256 KiB of output

TYPES = ("F32", *_DECODERS)


def dequantize(tensor: BlockTensor | np.ndarray | bytes, ggml_type: str | int | None = None, shape=None) -> np.ndarray:
    """out[..., i] = the value that ggml's `dequantize_row_<type>` gives element i of the row.

    Parameters
    ----------
    tensor : a BlockTensor, which knows its type and shape; or raw blocks, bytes or a uint8 array, row after row.
    ggml_type : name or number of the type ("Q4_K", 12); `TYPES` lists those that can be decoded.
    shape : row-major shape of the result; of raw blocks given as an array, [..., bytes of a row] by default.

    Returns float32 [*shape]; for F32 a view of `tensor`, read-only where that is.
    Rounding: float32, each operation rounded, in ggml's order (the decoders give the formulas); f16 and bf16 are exact.
    Errors: ContractError for a type that cannot be decoded and for bytes that are not whole rows of `shape`.
    Source: ggml/src/ggml-quants.c; equal to `gguf.quants.dequantize` to the bit, NaN payloads aside.
    """
    layout, raw, shape = _resolve("dequantize", tensor, ggml_type, shape)
    return _decode(layout, raw, math.prod(shape)).reshape(shape)


def dequantize_rows(tensor: BlockTensor, rows: np.ndarray) -> np.ndarray:
    """out[..., :] = dequantize(tensor)[rows[...], :], decoding only the rows that are asked for.

    Shapes: tensor [V, K], rows integer [...] -> float32 [*rows.shape, K]. Rounding: as `dequantize`.
    Errors: ContractError unless the tensor has two axes and 0 <= rows < V.
    """
    layout, raw, shape = _resolve("dequantize_rows", tensor, None, None)
    rows = np.asarray(rows)
    if len(shape) != 2:
        raise ContractError("dequantize_rows", "tensor", f"shape {shape}", "two axes [V, K]")
    if rows.size == 0:
        return np.empty((*rows.shape, shape[1]), np.float32)
    if rows.dtype.kind not in "iu":
        raise ContractError("dequantize_rows", "rows", rows.dtype, "integers")
    if rows.min() < 0 or rows.max() >= shape[0]:
        raise ContractError("dequantize_rows", "rows", f"{rows.min()} to {rows.max()}", f"0 to {shape[0] - 1}")
    picked = raw.reshape(shape[0], -1)[rows.ravel()]
    return _decode(layout, picked.reshape(-1), rows.size * shape[1]).reshape(*rows.shape, shape[1])


def _resolve(op: str, tensor, ggml_type, shape) -> tuple[BlockLayout, np.ndarray, tuple[int, ...]]:
    """Layout, flat bytes and shape, from either form of call."""
    if isinstance(tensor, BlockTensor):
        if ggml_type is not None or shape is not None:
            raise ContractError(op, "ggml_type, shape", "given", "none: a BlockTensor has its own")
        raw, ggml_type, shape = tensor.data, tensor.type, tensor.shape
    else:
        raw = np.frombuffer(tensor, np.uint8) if isinstance(tensor, bytes | bytearray | memoryview) else tensor
    layout = LAYOUT_BY_ID.get(ggml_type) if isinstance(ggml_type, int) else LAYOUTS.get(str(ggml_type))
    if layout is None or layout.name not in TYPES:
        raise ContractError(op, "ggml_type", ggml_type, ", ".join(TYPES))
    if not isinstance(raw, np.ndarray) or raw.dtype != np.uint8:
        raise ContractError(op, "tensor", getattr(raw, "dtype", type(raw).__name__), "bytes or a uint8 array of blocks")
    if shape is None:
        blocks, left = divmod(raw.shape[-1], layout.nbytes) if raw.ndim else (0, 1)
        if left:
            raise ContractError(op, "tensor", f"shape {raw.shape}", f"rows of whole {layout.nbytes}-byte blocks")
        shape = (*raw.shape[:-1], blocks * layout.elements)
    shape = tuple(int(n) for n in shape)
    row = shape[-1] if shape else 1
    if row % layout.elements or any(n < 0 for n in shape):
        raise ContractError(op, "shape", shape, f"rows of a multiple of {layout.elements} for {layout.name}")
    nbytes = math.prod(shape[:-1]) * layout.row_nbytes(row)
    if raw.size != nbytes:
        raise ContractError(op, "tensor", f"{raw.size} bytes", f"{nbytes} bytes for {layout.name} {shape}")
    return layout, np.ascontiguousarray(raw).reshape(-1), shape


def _decode(layout: BlockLayout, raw: np.ndarray, count: int) -> np.ndarray:
    blocks = raw.view(layout.block)
    if layout.name == "F32":
        return blocks
    out = np.empty(count, np.float32)
    grouped = out.reshape(-1, layout.elements)
    decode, step = _DECODERS[layout.name], max(1, _CHUNK // layout.elements)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), step):
            decode(blocks[start : start + step], grouped[start : start + step])
    return out
