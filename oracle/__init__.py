"""The NumPy definitions: one module per family, one function per op.

``from vtlab import oracle``; ``oracle.rms_norm(x, w)``.

Calling an op evaluates its truth (float64, one rounding at each rounding point the contract names);
``oracle.rms_norm.mirror(...)`` evaluates the float32 mirror that device kernels equal to the byte.
"""

from __future__ import annotations

from .act_order import gptq_shuffle, gptq_unshuffle, permute_cols, sort_weights
from .activation import gelu_and_mul, moe_silu_mul, relu, silu_and_mul, silu_and_mul_clamp, soft_cap
from .allspark import allspark_repack_weight, allspark_unpack_weight, allspark_w8a16_gemm
from .attention import attention, paged_attention
from .attention_merge import merge_attn_states
from .awq import awq_dequantize, awq_gemm, triton_w4a16_gemm
from .causal_conv import causal_conv1d_fwd, causal_conv1d_update, short_conv
from .causal_conv_spec import causal_conv1d_update_spec
from .deep_gemm_moe import (
    ep_gather,
    ep_scatter,
    ep_scatter_ue8m0,
    silu_mul_masked_quant,
    silu_mul_per_token_group_quant_fp8_colmajor,
)
from .draws import gumbel_sample, random_sample
from .elementwise import add, cast_bf16, cast_f32, embedding, mul_col_vec_f32, mul_scalar
from .fp4 import dequantize_nvfp4, scaled_fp4_quant, swizzle_blockscale
from .fp4_fused import rms_norm_fp4_quant, sigmoid_gate_fp4_quant, silu_and_mul_fp4_quant, silu_mul_fp4_quant
from .fp4_matmul import cutlass_scaled_fp4_mm, matmul_nvfp4
from .fp8_blocks import (
    fp8_gemm_nt,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
    scaled_mm_block,
)
from .fp8_casts import (
    per_block_cast_to_fp8,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
    requant_weight_ue8m0,
    transform_sf_layout,
)
from .fp8_groups import fp8_einsum, k_grouped_fp8_gemm_tn
from .fp8_matmul import cutlass_scaled_mm, cutlass_scaled_mm_azp, matmul_fp8_cublaslt, matmul_fp8_cutlass
from .fp8_weights import requantize_with_max_scale, scaled_fp8_quant_static_group
from .gates import gdn_g_beta, gdn_post_conv, shared_expert_gate, sigmoid_gate_bf16
from .gdn import gdn_decode, gdn_packed_decode, gdn_prefill
from .gdn_chunk_states import gdn_chunk_layout, gdn_chunk_o, gdn_chunk_prefill, gdn_delta_h
from .gdn_chunks import gdn_chunk_cumsum, gdn_kkt, gdn_recompute_w_u, gdn_solve_tril
from .ggml import embedding_quant, quantize_row_q8_0, quantize_row_q8_1, quantize_row_q8_k, repack_q8_0x4
from .ggml_matmul import matmul_bt_quant, vec_dot
from .gptq import gptq_dequantize, gptq_gemm
from .kda import kda_decay_gate, kda_decode, kda_low_rank_decay, kda_prefill_recurrent
from .kda_chunk_states import kda_chunk_o, kda_chunk_prefill, kda_delta_h
from .kda_chunks import kda_decay_gate_chunk_cumsum, kda_kkt, kda_recompute_w_u
from .kv_blocks import copy_blocks, cp_gather_cache, swap_blocks, swap_blocks_batch
from .kv_cache import reshape_and_cache, reshape_and_cache_xpacked
from .kv_latent import concat_and_cache_mla, gather_mla_cache
from .kv_quant import dequantize_kv_fp8, reshape_and_cache_fp8
from .kv_quant_fp4 import reshape_and_cache_nvfp4
from .kv_quant_heads import (
    dequantize_kv_heads,
    dequantize_kv_int4,
    reshape_and_cache_int4,
    reshape_and_cache_per_token_head,
    rht,
)
from .kv_quant_latent import (
    concat_and_cache_ds_mla,
    cp_gather_indexer_k_quant_cache,
    dequantize_ds_mla,
    indexer_k_quant_and_cache,
)
from .linear_attention import linear_attention_decode, linear_attention_prefill
from .logits import apply_min_p, apply_penalties, apply_temperature, apply_top_k_top_p
from .machete import machete_mm, machete_prepack_b, machete_unpack_b
from .mamba_norm import mamba2_rmsnorm_gated
from .marlin import (
    awq_marlin_repack,
    awq_to_marlin_zero_points,
    gptq_marlin_repack,
    marlin_permute_bias,
    marlin_permute_scales,
    marlin_unpack,
    marlin_unpack_zero_points,
    marlin_zero_points,
)
from .marlin_fp4 import (
    apply_fp4_marlin_linear,
    mxfp4_marlin_process_scales,
    nvfp4_marlin_process_global_scale,
    nvfp4_marlin_process_scales,
)
from .marlin_matmul import marlin_act_int8_process_scales, marlin_gemm, marlin_int4_fp8_preprocess
from .matmul import batched_matmul, matmul, matmul_bt
from .moe import moe_grouped_gemm
from .moe_marlin import moe_wna16_marlin_gemm
from .moe_routing import moe_router_topk, moe_sum
from .moe_wna16 import moe_wna16_gemm
from .mxfp4 import (
    fused_quantize_mx,
    fused_quantize_nv,
    hadacore_transform,
    hadamard,
    matmul_mxf4_bf16_tn,
    matmul_mxfp4,
    mxfp4_quant,
)
from .norm import l2norm, layer_norm, rms_norm, rms_norm_gated
from .norm_quant import (
    rms_norm_dynamic_per_token_quant,
    rms_norm_gated_quant_fp8,
    rms_norm_per_block_quant,
    rms_norm_quant_fp8,
    silu_and_mul_per_block_quant,
    silu_and_mul_quant,
)
from .quant_fp8 import (
    dynamic_per_token_scaled_fp8_quant,
    dynamic_scaled_fp8_quant,
    per_token_group_quant_fp8,
    quant_fp8_static,
)
from .quant_int8 import dynamic_scaled_int8_quant, per_token_group_quant_int8, static_scaled_int8_quant
from .rope import rope_build_cache, rope_cos_sin_cache, rope_from_cache, rope_neox
from .rope_fused import attn_qk_norm_rope_gate, fused_qk_norm_rope, rope_and_cache
from .sampling import compute_logprobs, compute_probs, gather_logprobs, greedy_argmax
from .splits import attn_gate_split, gdn_conv_split, qkv_split
from .ssd import ssd_bmm_chunk, ssd_chunk_cumsum, ssd_chunk_state, ssd_state_passing
from .ssd_loop import ssd_recurrent
from .ssd_scan import ssd_chunk_prefill, ssd_chunk_scan
from .ssm import selective_scan, selective_state_update
from .state_cache import gdn_state_gather, gdn_state_scatter
from .token_masks import (
    apply_allowed_token_ids,
    apply_bad_words,
    apply_logit_bias,
    apply_min_tokens,
    apply_token_mask,
)
from .w4a8 import (
    convert_packed_uint4b8_to_signed_int4,
    cutlass_decode_int4b,
    cutlass_encode_and_reorder_int4b,
    cutlass_pack_scale_fp8,
    w4a8_dequantize,
    w4a8_quantize_scales,
)
from .w4a8_matmul import cutlass_w4a8_mm, cutlass_w4a8_moe_mm
from .wna16 import awq_pack, awq_unpack, gptq_pack, gptq_unpack, quantize_weights

__all__ = [
    "add",
    "allspark_repack_weight",
    "allspark_unpack_weight",
    "allspark_w8a16_gemm",
    "apply_allowed_token_ids",
    "apply_bad_words",
    "apply_fp4_marlin_linear",
    "apply_logit_bias",
    "apply_min_p",
    "apply_min_tokens",
    "apply_penalties",
    "apply_temperature",
    "apply_token_mask",
    "apply_top_k_top_p",
    "attention",
    "attn_gate_split",
    "attn_qk_norm_rope_gate",
    "awq_dequantize",
    "awq_gemm",
    "awq_marlin_repack",
    "awq_pack",
    "awq_to_marlin_zero_points",
    "awq_unpack",
    "batched_matmul",
    "cast_bf16",
    "cast_f32",
    "causal_conv1d_fwd",
    "causal_conv1d_update",
    "causal_conv1d_update_spec",
    "compute_logprobs",
    "compute_probs",
    "concat_and_cache_ds_mla",
    "concat_and_cache_mla",
    "convert_packed_uint4b8_to_signed_int4",
    "copy_blocks",
    "cp_gather_cache",
    "cp_gather_indexer_k_quant_cache",
    "cutlass_decode_int4b",
    "cutlass_encode_and_reorder_int4b",
    "cutlass_pack_scale_fp8",
    "cutlass_scaled_fp4_mm",
    "cutlass_scaled_mm",
    "cutlass_scaled_mm_azp",
    "cutlass_w4a8_mm",
    "cutlass_w4a8_moe_mm",
    "dequantize_ds_mla",
    "dequantize_kv_fp8",
    "dequantize_kv_heads",
    "dequantize_kv_int4",
    "dequantize_nvfp4",
    "dynamic_per_token_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "dynamic_scaled_int8_quant",
    "embedding",
    "embedding_quant",
    "ep_gather",
    "ep_scatter",
    "ep_scatter_ue8m0",
    "fp8_einsum",
    "fp8_gemm_nt",
    "fused_qk_norm_rope",
    "fused_quantize_mx",
    "fused_quantize_nv",
    "gather_logprobs",
    "gather_mla_cache",
    "gdn_chunk_cumsum",
    "gdn_chunk_layout",
    "gdn_chunk_o",
    "gdn_chunk_prefill",
    "gdn_conv_split",
    "gdn_decode",
    "gdn_delta_h",
    "gdn_g_beta",
    "gdn_kkt",
    "gdn_packed_decode",
    "gdn_post_conv",
    "gdn_prefill",
    "gdn_recompute_w_u",
    "gdn_solve_tril",
    "gdn_state_gather",
    "gdn_state_scatter",
    "gelu_and_mul",
    "gptq_dequantize",
    "gptq_gemm",
    "gptq_marlin_repack",
    "gptq_pack",
    "gptq_shuffle",
    "gptq_unpack",
    "gptq_unshuffle",
    "greedy_argmax",
    "gumbel_sample",
    "hadacore_transform",
    "hadamard",
    "indexer_k_quant_and_cache",
    "k_grouped_fp8_gemm_tn",
    "kda_chunk_o",
    "kda_chunk_prefill",
    "kda_decay_gate",
    "kda_decay_gate_chunk_cumsum",
    "kda_decode",
    "kda_delta_h",
    "kda_kkt",
    "kda_low_rank_decay",
    "kda_prefill_recurrent",
    "kda_recompute_w_u",
    "l2norm",
    "layer_norm",
    "linear_attention_decode",
    "linear_attention_prefill",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "machete_mm",
    "machete_prepack_b",
    "machete_unpack_b",
    "mamba2_rmsnorm_gated",
    "marlin_act_int8_process_scales",
    "marlin_gemm",
    "marlin_int4_fp8_preprocess",
    "marlin_permute_bias",
    "marlin_permute_scales",
    "marlin_unpack",
    "marlin_unpack_zero_points",
    "marlin_zero_points",
    "matmul",
    "matmul_bt",
    "matmul_bt_quant",
    "matmul_fp8_cublaslt",
    "matmul_fp8_cutlass",
    "matmul_mxf4_bf16_tn",
    "matmul_mxfp4",
    "matmul_nvfp4",
    "merge_attn_states",
    "moe_grouped_gemm",
    "moe_router_topk",
    "moe_silu_mul",
    "moe_sum",
    "moe_wna16_gemm",
    "moe_wna16_marlin_gemm",
    "mul_col_vec_f32",
    "mul_scalar",
    "mxfp4_marlin_process_scales",
    "mxfp4_quant",
    "nvfp4_marlin_process_global_scale",
    "nvfp4_marlin_process_scales",
    "paged_attention",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
    "per_token_group_quant_fp8",
    "per_token_group_quant_int8",
    "permute_cols",
    "qkv_split",
    "quant_fp8_static",
    "quantize_row_q8_0",
    "quantize_row_q8_1",
    "quantize_row_q8_k",
    "quantize_weights",
    "random_sample",
    "relu",
    "repack_q8_0x4",
    "requant_weight_ue8m0",
    "requantize_with_max_scale",
    "reshape_and_cache",
    "reshape_and_cache_fp8",
    "reshape_and_cache_int4",
    "reshape_and_cache_nvfp4",
    "reshape_and_cache_per_token_head",
    "reshape_and_cache_xpacked",
    "rht",
    "rms_norm",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_fp4_quant",
    "rms_norm_gated",
    "rms_norm_gated_quant_fp8",
    "rms_norm_per_block_quant",
    "rms_norm_quant_fp8",
    "rope_and_cache",
    "rope_build_cache",
    "rope_cos_sin_cache",
    "rope_from_cache",
    "rope_neox",
    "scaled_fp4_quant",
    "scaled_fp8_quant_static_group",
    "scaled_mm_block",
    "selective_scan",
    "selective_state_update",
    "shared_expert_gate",
    "short_conv",
    "sigmoid_gate_bf16",
    "sigmoid_gate_fp4_quant",
    "silu_and_mul",
    "silu_and_mul_clamp",
    "silu_and_mul_fp4_quant",
    "silu_and_mul_per_block_quant",
    "silu_and_mul_quant",
    "silu_mul_fp4_quant",
    "silu_mul_masked_quant",
    "silu_mul_per_token_group_quant_fp8_colmajor",
    "soft_cap",
    "sort_weights",
    "ssd_bmm_chunk",
    "ssd_chunk_cumsum",
    "ssd_chunk_prefill",
    "ssd_chunk_scan",
    "ssd_chunk_state",
    "ssd_recurrent",
    "ssd_state_passing",
    "static_scaled_int8_quant",
    "swap_blocks",
    "swap_blocks_batch",
    "swizzle_blockscale",
    "transform_sf_layout",
    "triton_w4a16_gemm",
    "vec_dot",
    "w4a8_dequantize",
    "w4a8_quantize_scales",
]  # fmt: skip
