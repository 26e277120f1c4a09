"""Calls of the quantised ops that a user gets wrong: each is refused alike by truth, mirror and the CPU tier.

A refusal names the op and the argument at fault and says in words what was given and what belongs there.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vtlab import ops, oracle
from vtlab.ops.errors import ContractError

F32, BF16, E4M3 = np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
ONE = np.ones(1, F32)


def x(*shape, dtype=BF16):
    return np.ones(shape, dtype)


def words(*shape):
    return np.full(shape, 0x12345678, np.int32)


def code(*shape):
    return np.full(shape, 0x38, np.uint8)


def sizes(*values, dtype=np.int32):
    return np.array(values, dtype)


NEIGHBOURS = np.arange(128, dtype=np.int32)
GPTQ = {"a": x(2, 128), "b_q_weight": words(16, 64), "b_gptq_qzeros": words(2, 8), "b_gptq_scales": x(2, 64),
        "b_g_idx": None, "use_exllama": False, "use_v2_format": False, "bits": 4}  # fmt: skip
AWQ = {"input": x(2, 128), "qweight": words(128, 8), "scales": x(2, 64), "qzeros": words(2, 8)}
MARLIN = {"a": x(2, 128), "b_q_weight": words(8, 128), "b_scales": x(2, 64), "quant_type": "uint4b8"}
REPACK = {"b_q_weight": words(16, 64), "perm": None, "bits": 4}
MACHETE = {"a": x(2, 128), "b_q": words(16, 128), "b_group_scales": x(2, 128), "quant_type": "uint4b8"}
ALLSPARK = {"a": x(2, 64), "b_qweight": code(64, 64), "b_scales": x(1, 64), "n": 64}
SCALED = {"a": code(3, 64), "b": code(32, 64).T, "scale_a": ONE, "scale_b": ONE, "out_dtype": "bfloat16"}
BLOCKS = {"a": code(3, 256), "b": code(129, 256), "scale_a": x(3, 2, dtype=F32), "scale_b": x(2, 2, dtype=F32),
          "block_n": 128, "block_k": 128}  # fmt: skip
DEEP = {"a": code(3, 256), "scale_a": x(3, 2, dtype=F32), "b": code(128, 256), "scale_b": x(1, 2, dtype=F32)}
GROUPED = {"a": code(128, 256), "scale_a": x(128, 2, dtype=F32), "b": code(2, 128, 256),
           "scale_b": x(2, 1, 2, dtype=F32), "m_indices": np.zeros(128, np.int32)}  # fmt: skip
NVFP4 = {"x": x(3, 128), "b": code(100, 64), "block_scale_b": code(128, 8), "global_scale": ONE}
FP4 = {"a": code(3, 64), "b": code(128, 64), "block_scale_a": code(128, 8), "block_scale_b": code(128, 8), "alpha": ONE}
MXFP4 = {"x": x(3, 128), "b": code(100, 64), "b_sf": code(128, 4)}
FP4_MARLIN = {
    "input": x(2, 128),
    "weight": words(8, 128),
    "weight_scale": 0x80 | code(8, 64),
    "weight_global_scale": ONE,
}
W4A8 = {"a": code(2, 256), "b_q": words(128, 32).T, "b_group_scales": code(2, 128, 8),
        "b_channel_scales": x(128, dtype=F32), "a_token_scales": x(2, dtype=F32)}  # fmt: skip
GGML = {"a": x(2, 256, dtype=F32), "b": np.zeros((3, 144), np.uint8), "quant_type": "Q4_K"}
CACHE = {"key": x(1, 2, 8), "value": x(1, 2, 8), "key_cache": code(2, 4, 2, 8), "value_cache": code(2, 4, 2, 8),
         "slot_mapping": sizes(0, dtype=np.int64), "k_scale": ONE, "v_scale": ONE, "kind": "fp8"}  # fmt: skip
MOE = {"x": x(2, 64), "qweight": code(3, 32, 32), "scales": x(3, 32, 2), "ids": sizes([1], [0]), "bits": 4}
WIDTHS = {"weight": code(96, 64), "weight_scale": x(2, dtype=F32), "logical_widths": [32, 64]}

CALLS = [
    # op, a good call, what is changed, the argument at fault, what is said of it
    ("matmul_bt_quant", GGML, {"a": x(2, 100, dtype=F32)}, "a", "got K = 100, want a multiple of 256 for Q4_K"),
    ("matmul_bt_quant", GGML, {"a": x(2, 512, dtype=F32)}, "b", "got rows of 144 bytes, want 288 bytes: 512 values of"),
    ("matmul_bt_quant", GGML, {"quant_type": "Q4K"}, "quant_type", "got 'Q4K', want one of Q4_0, "),
    ("matmul_bt_quant", GGML, {"b": np.zeros((3, 144), np.int8)}, "b", "dtype int8, want dtype uint8"),
    ("matmul_bt_quant", GGML, {"a": [[1.0] * 256]}, "a", "got list, want an array"),
    ("gptq_gemm", GPTQ, {"a": x(2, 120)}, "b_q_weight", "got 128 codes a column, want K = 120"),
    ("gptq_gemm", GPTQ, {"b_g_idx": NEIGHBOURS // 64 + 1}, "b_g_idx", "got groups 1 to 2, want 0 to 1"),
    ("gptq_gemm", GPTQ, {"b_g_idx": NEIGHBOURS // 64 - 1}, "b_g_idx", "got groups -1 to 0, want 0 to 1"),
    ("gptq_gemm", GPTQ, {"b_g_idx": 0 * NEIGHBOURS, "use_exllama": True}, "b_g_idx", "want a permutation"),
    ("gptq_gemm", GPTQ, {"b_gptq_scales": x(64, 2)}, "b_gptq_scales", "shape (64, 2)"),
    ("gptq_gemm", GPTQ, {"b_gptq_scales": x(2, 64, dtype=np.float16)}, "b_gptq_scales", "bfloat16, that of a"),
    ("gptq_gemm", GPTQ, {"b_gptq_scales": x(3, 64), "b_gptq_qzeros": words(3, 8)}, "b_gptq_scales",
     "got 3 groups, want a number that divides K = 128"),
    ("gptq_gemm", GPTQ, {"b_gptq_scales": x(2, 64) * BF16(np.nan)}, "b_gptq_scales", "a NaN or an infinity, want"),
    ("gptq_unpack", {"qweight": words(3, 8), "bits": 3}, {"qweight": words(4, 8)}, "qweight", "a multiple of 3"),
    ("gptq_pack", {"q": 0 * words(32, 8), "bits": 4}, {"q": np.full((32, 8), 16, np.int32)}, "q", "codes 16 to 16"),
    ("awq_pack", {"q": 0 * words(32, 8), "bits": 4}, {"q": 0 * words(32, 12)}, "q", "axis 1 a multiple of 8"),
    ("permute_cols", {"x": x(2, 4), "perm": sizes(3, 2, 1, 0)}, {"perm": sizes(1, 2, 3, 4)}, "perm", "want 0 to 3"),
    ("sort_weights", {"q": 0 * words(4, 2), "g_idx": sizes(0, 1, 0, 1)}, {"g_idx": sizes(0, -1, 0, 1)}, "g_idx", "-1"),
    ("quantize_weights", {"w": x(96, 32), "quant_type": "uint4b8", "group_size": 32}, {"group_size": 64}, "group_size",
     "got 64, want -1, or a divisor of K = 96"),
    ("awq_gemm", AWQ, {"scales": x(2, 60)}, "qweight", "with N = 60"),
    ("awq_gemm", AWQ, {"scales": x(3, 64), "qzeros": words(3, 8)}, "scales", "3 groups, want a number that divides K"),
    ("awq_gemm", AWQ, {"scales": x(2, 64) * BF16(np.inf)}, "scales", "a NaN or an infinity"),
    ("gptq_marlin_repack", REPACK, {"b_q_weight": words(16, 60)}, "b_q_weight", "axis 1 a multiple of 64"),
    ("gptq_marlin_repack", REPACK, {"bits": 3}, "bits", "got 3, want one of 4, 8"),
    ("gptq_marlin_repack", REPACK, {"perm": NEIGHBOURS + 1}, "perm", "got indices 1 to 128, want 0 to 127"),
    ("marlin_gemm", MARLIN, {"b_q_weight": words(16, 64)}, "b_q_weight", "shape (16, 64)"),
    ("marlin_gemm", MARLIN, {"b_zeros": words(2, 8)}, "b_zeros", "want None for uint4b8, whose codes have a bias"),
    ("marlin_gemm", MARLIN, {"quant_type": "uint4"}, "b_zeros", "got None, want zero points for uint4"),
    ("marlin_gemm", MARLIN, {"quant_type": "int4"}, "quant_type", "got 'int4', want one of uint4, "),
    ("marlin_permute_scales", {"s": x(2, 64), "size_k": 128, "group_size": 64}, {"group_size": 48}, "group_size", "48"),
    ("machete_prepack_b", {"b_q_weight": words(16, 128), "bits": 4}, {"b_q_weight": words(16, 64)}, "b_q_weight",
     "axis 1 a multiple of 128"),
    ("machete_mm", MACHETE, {"b_group_scales": x(3, 128)}, "b_group_scales", "3 groups of K = 128, want groups of 64"),
    ("machete_mm", MACHETE, {"b_group_zeros": x(2, 128)}, "b_group_zeros", "want None for uint4b8"),
    ("machete_mm", MACHETE, {"quant_type": "uint4"}, "b_group_zeros", "got None, want zeros for uint4"),
    ("allspark_w8a16_gemm", ALLSPARK, {"n": 65}, "n", "got 65, want 33 to 64, for 64 rows"),
    ("quant_fp8_static", {"x": x(2, 16), "scale": ONE}, {"scale": 0 * ONE}, "scale", "0.0, want a positive finite"),
    ("quant_fp8_static", {"x": x(2, 16), "scale": ONE}, {"scale": np.nan * ONE}, "scale", "nan, want a positive"),
    ("quant_fp8_static", {"x": x(2, 16), "scale": ONE}, {"scale": F32(1)}, "scale", "shape (), want (1,)"),
    ("cutlass_scaled_mm", SCALED, {"a": code(3, 64).view(E4M3)}, "a",
     "dtype float8_e4m3fn, want dtype uint8 or int8: its codes, as .view('uint8') gives them"),
    ("cutlass_scaled_mm", SCALED, {"scale_a": x(2, 1, dtype=F32)}, "scale_a", "shape (2, 1), want (1,) or (3, 1)"),
    ("cutlass_scaled_mm", SCALED, {"scale_b": np.nan * ONE}, "scale_b", "nan, want"),
    ("scaled_mm_block", BLOCKS, {"scale_b": x(1, 2, dtype=F32)}, "scale_b", "shape (1, 2), want (2, 2)"),
    ("requantize_with_max_scale", WIDTHS, {"logical_widths": [64, 64]}, "logical_widths", "want 2 widths, 96 rows"),
    ("fp8_gemm_nt", DEEP, {"scale_a": x(3, 1, dtype=F32)}, "scale_a", "shape (3, 1), want (3, 2)"),
    ("fp8_gemm_nt", DEEP, {"scale_b": 0 * x(1, 2, dtype=F32)}, "scale_b", "0.0, want positive finite numbers"),
    ("m_grouped_fp8_gemm_nt_contiguous", GROUPED, {"m_indices": np.full(128, 2, np.int32)}, "m_indices", "[2, 2]"),
    ("m_grouped_fp8_gemm_nt_contiguous", GROUPED, {"m_indices": NEIGHBOURS // 64}, "m_indices", "several experts"),
    ("scaled_fp4_quant", {"x": x(2, 32), "input_global_scale": ONE}, {"x": x(2, 24)}, "x", "K = 24, want a multiple"),
    ("scaled_fp4_quant", {"x": x(2, 32), "input_global_scale": ONE}, {"input_global_scale": np.nan * ONE},
     "input_global_scale", "nan, want a finite number"),
    ("cutlass_scaled_fp4_mm", FP4, {"block_scale_a": code(3, 8)}, "block_scale_a", "shape (3, 8), that of scales in "
     "rows, want (128, 8) with is_sf_swizzled_layout=True: scales in tiles of 128 x 4, as swizzle_blockscale makes"),
    ("matmul_nvfp4", NVFP4, {"is_sf_swizzled_layout": False}, "block_scale_b", "shape (128, 8), that of scales in "
     "tiles of 128 x 4, want (100, 8) with is_sf_swizzled_layout=False: scales in rows"),
    ("matmul_nvfp4", NVFP4, {"block_scale_b": code(100, 7)}, "block_scale_b", "got shape (100, 7), want (128, 8)"),
    ("dequantize_nvfp4", {"packed": code(100, 64), "scale": code(128, 8), "global_scale": ONE}, {"scale": code(100, 8)},
     "scale", "that of scales in rows, want (128, 8)"),
    ("matmul_mxfp4", MXFP4, {"b_sf": code(100, 4)}, "b_sf", "that of scales in rows, want (128, 4)"),
    ("mxfp4_quant", {"x": x(2, 32)}, {"x": x(2, 48)}, "x", "K = 48, want a multiple of 32"),
    ("apply_fp4_marlin_linear", FP4_MARLIN, {"weight_scale": code(3, 64)}, "weight_scale", "want 8, of 16: NVFP4"),
    ("apply_fp4_marlin_linear", FP4_MARLIN, {"weight_global_scale": None}, "weight_scale",
     "got 8 groups, want 4, of 32: MXFP4, as there is no global scale"),
    ("cutlass_w4a8_mm", W4A8, {"a": code(2, 248), "b_q": words(128, 31).T}, "a", "K = 248, want a multiple of 128"),
    ("cutlass_w4a8_mm", W4A8, {"b_group_scales": 0x7F | code(2, 128, 8)}, "b_group_scales", "a code of NaN"),
    ("static_scaled_int8_quant", {"x": x(2, 16), "scale": ONE}, {"scale": -ONE}, "scale", "-1.0, want a positive"),
    ("per_token_group_quant_int8", {"x": x(2, 128), "group_size": 64}, {"x": x(2, 100)}, "x", "K = 100, want"),
    ("reshape_and_cache_fp8", CACHE, {"slot_mapping": sizes(8, dtype=np.int64)}, "slot_mapping", "8, want slots < 8"),
    ("reshape_and_cache_fp8", CACHE, {"k_scale": 0 * ONE}, "k_scale", "0.0, want positive finite numbers"),
    ("reshape_and_cache_fp8", CACHE, {"kind": "e4m3"}, "kind", "got 'e4m3', want one of fp8, "),
    ("moe_wna16_gemm", MOE, {"ids": sizes([3], [0])}, "ids", "got experts from 0 to 3, want -1 to 2"),
    ("moe_wna16_gemm", MOE, {"bits": 8}, "qweight", "with K = 64, bits = 8"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "good", "change", "argument", "said"), CALLS, ids=[f"{op}-{number}" for number, (op, *_) in enumerate(CALLS)]
)
def test_a_bad_call_is_refused_by_name(op, good, change, argument, said):
    truth = getattr(oracle, op)
    texts = set()
    for call in (truth, truth.mirror, getattr(ops, op)):
        call(**good)
        with pytest.raises(ContractError) as caught:
            call(**(good | change))
        assert (caught.value.op, caught.value.argument) == (op, argument)
        texts.add(str(caught.value))
    assert len(texts) == 1 and said in texts.pop()
