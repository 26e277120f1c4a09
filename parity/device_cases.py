"""What every CUDA kernel is tried on: the contracts' examples, shapes at the edges of each variant, special values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from vtlab.device.launch import PROVIDER
from vtlab.ops import providers
from vtlab.ops.contract import Tensor, example
from vtlab.ops.table import Op, lookup, table

from .device_edges_attention import EDGES as ATTENTION
from .device_edges_casts import EDGES as CASTS
from .device_edges_chunks import EDGES as CHUNKS
from .device_edges_experts import EDGES as EXPERTS
from .device_edges_fp4 import EDGES as FP4
from .device_edges_fp8 import EDGES as FP8
from .device_edges_ggml import EDGES as GGML
from .device_edges_int8 import EDGES as INT8
from .device_edges_kv import EDGES as KV
from .device_edges_kv_quant import EDGES as KV_QUANT
from .device_edges_lowbit import EDGES as LOWBIT
from .device_edges_matmul import EDGES as MATMUL
from .device_edges_moe import EDGES as MOE
from .device_edges_quant import EDGES as QUANT
from .device_edges_recurrent import EDGES as RECURRENT
from .device_edges_rope import EDGES as ROPE
from .device_edges_sampling import EDGES as SAMPLING
from .device_edges_ssd import EDGES as SSD

_16 = {"x": "bfloat16", "weight": "bfloat16"}
_F16 = {"x": "float16", "weight": "float16"}
_NORM_WIDTHS = (1, 8, 24, 64, 72, 128, 136, 250, 512, 1032, 2048, 8200)
_MANY = (16385, 65539)  # rows from which on a team has two or four
_LONG = {"...": (3,), "H": 33000}


def _every_gate(up: float) -> np.ndarray:
    """[1, 2 * 65536]: every bfloat16 as a gate, against one factor."""
    codes = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    return np.concatenate([codes, np.full(1 << 16, up, ml_dtypes.bfloat16)])[None]


EDGES: dict[str, list[dict]] = {
    "rms_norm": [
        *({"...": (5,), "H": H, **_16, "residual": "bfloat16"} for H in _NORM_WIDTHS),
        *({"...": (1030,), "H": H, **_16} for H in (8, 136)),
        *({"...": (rows,), "H": 24, **_16} for rows in _MANY),
        *({"...": (2,), "H": H, **_16} for H in (512, 2056, 8192)),
        {"...": (300,), "H": 520, **_16, "residual": "bfloat16"}, {"...": (300,), "H": 520, **_16},
        *({"...": (rows,), "H": 2056, **_16, **more} for rows in (3, 265) for more in ({}, {"residual": "bfloat16"})),
        {"...": (1030,), "H": 264, **_16, "residual": "bfloat16"},
        {"...": (1030,), "H": 16, **_16, "residual": "float32", "gemma": True},
        {"...": (1030,), "H": 24, **_F16, "residual": "float16", "rounding": "vllm_native"},
        {"...": (1030,), "H": 8, "x": "float32", "weight": "bfloat16", "residual": "float32"},
        {"...": (3,), "H": 640, "x": "float32", "weight": "float32", "residual": "bfloat16"},
        {"...": (3,), "H": 640, "x": "float16", "weight": "bfloat16", "rounding": "vllm"},
        {"...": (0,), "H": 64}, {"...": (2, 3), "H": 0}, {"...": (), "H": 40, **_16}, _LONG | _16,
    ],
    "layer_norm": [
        *({"...": (1030,), "D": D, **_16, "weight": "float32"} for D in (8, 136)),
        {"...": (1030,), "D": 520, "x": "float32", "bias": "float16"},
        {"...": (2,), "D": 2056, "x": "float32", "bias": "float16"},
        *({"...": (rows,), "D": 2056, **_16, "bias": "bfloat16"} for rows in (3, 265)),
        *({"...": (1030,), "D": D, **_16, "bias": "bfloat16"} for D in (24, 520)),
        *({"...": (5,), "D": D, **_16, "bias": "bfloat16"} for D in _NORM_WIDTHS),
        {"...": (40,), "D": 264, "x": "float16", "bias": "float32"}, {"...": (2,), "D": 33000},
        {"...": (0,), "D": 64, **_16}, {"...": (), "D": 40},
    ],
    "rms_norm_gated": [
        *({"...": (5,), "D": D, **_16, "gate": "bfloat16", "eps": 1e-5} for D in _NORM_WIDTHS),
        {"...": (33, 4), "D": 128, "x": "float16", "gate": "float32", "weight": "float16", "out_dtype": "float32"},
        {"...": (2,), "D": 33000, "sigmoid_gate": True}, {"...": (0,), "D": 8}, {"...": (2,), "D": 0},
        *({"...": (rows,), "D": 24, **_16, "gate": "bfloat16"} for rows in _MANY),
    ],
    "l2norm": [
        *({"...": (5,), "D": D, "x": "bfloat16", "out_dtype": "float32"} for D in _NORM_WIDTHS),
        {"...": (70, 3), "D": 128, "x": "float16"}, {"...": (5,), "D": 304, "x": "bfloat16"},
        *({"...": (rows,), "D": 24, "x": "bfloat16"} for rows in _MANY),
        {"...": (0,), "D": 8}, {"...": (2,), "D": 0},
    ],
    "silu_and_mul": [
        *({"...": (3,), "D": D, "x": kind, "rounding": rounding}
          for D in (1, 8, 264, 2056, 4100) for kind in ("bfloat16", "float16", "float32")
          for rounding in ("vt", "vllm")),
        {"...": (300,), "D": 8, "x": "bfloat16"}, {"...": (0,), "D": 8}, {"...": (2,), "D": 0},
        *({"...": (249,), "D": 264, "x": kind, "rounding": "vllm"} for kind in ("float16", "float32")),
        *({"...": (1,), "D": 1 << 16, "x": _every_gate(up), "rounding": rounding}
          for up in (1.0, 0.7109375, 300.0) for rounding in ("vt", "vllm")),
    ],
    "gelu_and_mul": [
        *({"...": (3,), "D": D, "x": kind, "rounding": "vllm"}
          for D in (1, 8, 264) for kind in ("bfloat16", "float16", "float32")),
        {"...": (2, 0), "D": 8}, {"...": (249,), "D": 264, "x": "float32"},
        *({"...": (1,), "D": 1 << 16, "x": _every_gate(up), "rounding": rounding}
          for up in (1.0, 0.7109375, 300.0) for rounding in ("vt", "vllm")),
    ],
    "silu_and_mul_clamp": [
        *({"...": (3,), "D": 264, "x": kind, "rounding": rounding, "limit": 0.5, "alpha": 1.702, "beta": 1.0}
          for kind in ("bfloat16", "float16", "float32") for rounding in ("vt", "vllm", "vllm_native")),
        *({"...": (249,), "D": 264, "x": kind, "limit": 0.5} for kind in ("bfloat16", "float32")),
    ],
    "moe_silu_mul": [{"...": (3, 5), "D": 16, "gate": kind} for kind in ("bfloat16", "float16", "float32")],
    "relu": [{"...": (300,), "D": 8, "x": "bfloat16"}, {"...": (2,), "D": 4, "x": "float32"}],
    "soft_cap": [
        {"...": (3,), "V": 264, "x": kind, "cap": 30.0, "rounding": rounding}
        for kind in ("bfloat16", "float16", "float32") for rounding in ("vt", "vllm")
    ],
    "add": [
        {"...": (3,), "D": 264, "a": a, "b": b}
        for a in ("bfloat16", "float16", "float32") for b in ("bfloat16", "float32")
    ] + [{"...": (4,), "D": 16, "a": "bfloat16", "b": np.linspace(-3, 3, 16, dtype=np.float32)}, {"...": (0,), "D": 3}],
    "mul_scalar": [{"...": (3,), "D": 88, "x": "float16", "scale": 1e-3}, {"...": (3,), "D": 3, "scale": 1e300}],
    "mul_col_vec_f32": [{"M": 300, "N": 8}, {"M": 3, "N": 2056}, {"M": 0, "N": 8}],
    "cast_bf16": [{"...": (3,), "D": 264}, {"...": (0,), "D": 3}],
    "cast_f32": [{"...": (3,), "D": 264}, {"...": (0,), "D": 3}],
    "embedding": [
        {"V": 20, "H": 264, "T": 7, "table": "bfloat16"},
        {"V": 20, "H": 8, "T": 300, "table": "float16", "ids": "int64"},
        {"V": 20, "H": 40, "T": 7, "table": "bfloat16", "out_dtype": "float16"}, {"V": 4, "H": 0, "T": 7},
    ],
    "qkv_split": [
        {"...": (300,), "dq": 64, "dk": 8, "dv": 16, "qkv": "bfloat16"}, {"...": (3,), "dq": 0, "dk": 1, "dv": 2},
        {"...": (3,), "dq": 2048, "dk": 512, "dv": 512, "qkv": "float16"}, {"...": (0,), "dq": 3, "dk": 1, "dv": 2},
        {"...": (3,), "dq": 5, "dk": 3, "dv": 1, "qkv": "bfloat16"},
    ],
    "gdn_conv_split": [
        {"...": (3,), "C": 8, "key_dim": 0}, {"...": (40,), "C": 160, "key_dim": 64, "conv": "bfloat16"},
    ],
    "attn_gate_split": [
        {"T": 33, "C": 2 * 3 * 64, "head_dim": 64, "qgate": "bfloat16"}, {"T": 3, "C": 20, "head_dim": 5},
    ],
    "sigmoid_gate_bf16": [
        {"...": (3,), "N": 264, "attn": "float16", "gate": "float16", "rounding": "vllm"},
        {"...": (0,), "N": 8, "attn": "float32"},
    ],
    "shared_expert_gate": [
        {"T": 33, "H": 264, "...": (33,), "G": 1},
        {"T": 3, "H": 7, "...": (), "G": 3, "sd": "float16", "gl": "float16", "rounding": "vllm"},
    ],
    "gdn_g_beta": [
        {"T": 40, "Hv": 48, "a": "bfloat16", "b": "bfloat16"}, {"T": 0, "Hv": 4},
        {"T": 3, "Hv": 5, "a": "float16", "b": "float16", "rounding": "vllm"},
    ],
    "gdn_post_conv": [
        {"T": 3, "C": 2 * 2 * 128 + 4 * 128, "Hv": 4, "num_k_heads": 2, "head_k_dim": 128, "conv": "bfloat16",
         "a": "bfloat16", "b": "bfloat16", "out_dtype": "float32"},
        {"T": 2, "C": 2 * 300 + 2 * 40, "Hv": 2, "num_k_heads": 1, "head_k_dim": 300, "conv": "float16"},
        {"T": 150, "C": 2 * 3 * 8 + 4 * 16, "Hv": 4, "num_k_heads": 3, "head_k_dim": 8, "conv": "bfloat16"},
        {"T": 120, "C": 2 * 8 * 128 + 12 * 64, "Hv": 12, "num_k_heads": 8, "head_k_dim": 128, "conv": "bfloat16"},
        {"T": 700, "C": 2 * 3 * 64 + 9 * 64, "Hv": 9, "num_k_heads": 3, "head_k_dim": 64, "conv": "float16"},
        {"T": 0, "C": 2 * 4 + 2 * 4, "Hv": 2, "num_k_heads": 1, "head_k_dim": 4},
    ],
    **ATTENTION, **CASTS, **CHUNKS, **EXPERTS, **FP4, **FP8, **GGML, **INT8, **KV, **KV_QUANT, **LOWBIT, **ROPE,
    **MATMUL, **MOE, **QUANT, **RECURRENT, **SAMPLING, **SSD,
}  # fmt: skip
"""Axes as in `Contract.examples`, by op: widths around 16-byte vectors, lanes, warps, blocks and chunks."""

MOVES = (
    "relu", "cast_bf16", "cast_f32", "qkv_split", "gdn_conv_split", "attn_gate_split", "reshape_and_cache",
    "reshape_and_cache_xpacked", "copy_blocks", "swap_blocks", "swap_blocks_batch", "cp_gather_cache",
    "concat_and_cache_mla", "gather_mla_cache", "cp_gather_indexer_k_quant_cache",
)  # fmt: skip
"""Ops whose NaN payloads and signs are part of the contract, because they move bits; elsewhere a NaN is a NaN."""

SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38, -3e38, 1e-30, 65504.0, -87.5, 104.0])


@dataclass(frozen=True)
class DeviceCase:
    """One call of one op: the contract's example or edge `number`; `special` plants SPECIAL in every float tensor."""

    op: str
    number: int
    special: bool = False

    def __str__(self) -> str:
        return f"{self.op}-{self.number}" + "-special" * self.special

    @property
    def family(self) -> str:
        return lookup(self.op).contract.family

    def arguments(self) -> dict[str, object]:
        """The arguments on the host, the same ones every time."""
        contract = lookup(self.op).contract
        axes = _axes(contract, self.number)
        arguments = example(contract, axes, np.random.Generator(np.random.PCG64([self.number, *self.op.encode()])))
        if self.special:
            refused = {name for check in contract.requires for name in getattr(check, "finite", ())}
            for name, spec in contract.args.items():
                value = arguments.get(name)
                if name in refused or not isinstance(spec, Tensor) or not isinstance(value, np.ndarray):
                    continue
                if value.dtype.kind not in "iu":
                    arguments[name] = value.copy()
                    plant(arguments[name], len(name))
        return arguments


def _axes(contract, number: int) -> Mapping[str, object]:
    return [*contract.examples, *EDGES[contract.name]][number]


def plant(value: np.ndarray, shift: int) -> None:
    """Overwrite every third element with special values, shifted so that operands meet in all combinations."""
    flat = value.reshape(-1)
    places = np.arange(shift % 3, flat.size, 3)
    with np.errstate(over="ignore"):
        flat[places] = SPECIAL[(places // 3 + shift * places // 40) % len(SPECIAL)].astype(value.dtype)


def device_ops() -> list[str]:
    """The ops that have a CUDA C++ provider."""
    return [name for name in table() if PROVIDER in provider_names(name)]


def provider_names(op: str) -> list[str]:
    return [providers.op_provider_name_at(op, "cuda", i) for i in range(providers.op_provider_count(op, "cuda"))]


def cases(ops: list[str]) -> Iterator[DeviceCase]:
    """All cases of the ops: examples and edges, then the same with special values where there is room for them."""
    for op in ops:
        for number in range(len(lookup(op).contract.examples) + len(EDGES[op])):
            yield DeviceCase(op, number)
            yield DeviceCase(op, number, special=True)


def halves(found: Op, arguments: dict[str, object]) -> tuple[dict[str, object], int] | None:
    """(the call with the first part of its rows, their number), or None where it has fewer than two.

    None too where a result does not begin with its rows, or rows are tokens of sequences: the family's own tests take
    such batches apart.
    """
    starts = found.contract.args.get("query_start_loc")
    if "cu_chunk_seqlens" in found.contract.args:
        return None
    if starts is not None and (found.contract.mutates or starts.shape == "S"):
        return None
    if any(spec.shape == "1" or spec.shape.split()[1:] == ["T"] for spec in found.contract.returns.values()):
        return None
    if {"m_indices", "block_m"} & found.contract.args.keys() or found.bind((), arguments).get("is_sf_swizzled_layout"):
        return None
    if getattr(found.contract.args.get("scale"), "shape", "") == "R C":
        return None  # scales of groups of rows
    first = next(iter(found.contract.args))
    if not isinstance(found.contract.args[first], Tensor):
        return None
    tokens = ("...", "T", "M", found.contract.rows)
    lined = arguments[first].ndim and found.contract.args[first].shape.split()[0] in tokens
    rows = arguments[first].shape[0] if lined else 0
    if first == "table":
        rows = len(arguments["ids"])
    elif arguments[first].ndim < max(2, len(found.contract.args[first].shape.split())):
        return None
    if rows < 2:
        return None
    kept = max(1, rows // 3)
    part = dict(arguments)
    for name, spec in found.contract.args.items():
        value = arguments.get(name)
        if (
            isinstance(spec, Tensor)
            and isinstance(value, np.ndarray)
            and _carries_rows(spec, value, arguments, first, tokens)
        ):
            part[name] = value[..., :kept].copy() if spec.shape == "... T" else value[:kept].copy()
    return part, kept


def _carries_rows(spec: Tensor, value: np.ndarray, arguments: dict, first: str, tokens: tuple) -> bool:
    token = spec.shape.split()[0]
    if token == "*" and spec.shape != "* Cb":  # scales of `b`
        return value.ndim == arguments[first].ndim or (first == "sd" and value.ndim == 1)
    return token in tokens or (token == "S" and "slot_mapping" in arguments)
