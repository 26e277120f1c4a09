"""The NumPy definitions: one module per family, one function per op.

``from vtlab import oracle``; ``oracle.rms_norm(x, w)``.

Calling an op evaluates its truth (float64, one rounding at each rounding point the contract names);
``oracle.rms_norm.mirror(...)`` evaluates the float32 mirror that device kernels equal to the byte.
"""

from __future__ import annotations

from .activation import gelu_and_mul, moe_silu_mul, relu, silu_and_mul, silu_and_mul_clamp, soft_cap
from .attention import attention, paged_attention
from .attention_merge import merge_attn_states
from .causal_conv import causal_conv1d_fwd, causal_conv1d_update, short_conv
from .draws import gumbel_sample, random_sample
from .elementwise import add, cast_bf16, cast_f32, embedding, mul_col_vec_f32, mul_scalar
from .fp4 import dequantize_nvfp4, scaled_fp4_quant, swizzle_blockscale
from .fp4_fused import rms_norm_fp4_quant, sigmoid_gate_fp4_quant, silu_and_mul_fp4_quant, silu_mul_fp4_quant
from .fp4_matmul import cutlass_scaled_fp4_mm, matmul_nvfp4
from .gates import gdn_g_beta, gdn_post_conv, shared_expert_gate, sigmoid_gate_bf16
from .gdn import gdn_decode, gdn_packed_decode, gdn_prefill
from .gdn_chunk_states import gdn_chunk_layout, gdn_chunk_o, gdn_chunk_prefill, gdn_delta_h
from .gdn_chunks import gdn_chunk_cumsum, gdn_kkt, gdn_recompute_w_u, gdn_solve_tril
from .ggml import embedding_quant, quantize_row_q8_0, quantize_row_q8_1, quantize_row_q8_k, repack_q8_0x4
from .ggml_matmul import matmul_bt_quant, vec_dot
from .kda import kda_decay_gate, kda_decode, kda_low_rank_decay, kda_prefill_recurrent
from .kda_chunks import (
    kda_chunk_o,
    kda_chunk_prefill,
    kda_decay_gate_chunk_cumsum,
    kda_delta_h,
    kda_kkt,
    kda_recompute_w_u,
)
from .kv_blocks import copy_blocks, cp_gather_cache, swap_blocks, swap_blocks_batch
from .kv_cache import reshape_and_cache, reshape_and_cache_xpacked
from .kv_latent import concat_and_cache_mla, gather_mla_cache
from .linear_attention import linear_attention_decode, linear_attention_prefill
from .logits import apply_min_p, apply_penalties, apply_temperature, apply_top_k_top_p
from .matmul import batched_matmul, matmul, matmul_bt
from .mxfp4 import (
    fused_quantize_mx,
    fused_quantize_nv,
    hadacore_transform,
    hadamard,
    matmul_mxf4_bf16_tn,
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
from .rope import rope_build_cache, rope_cos_sin_cache, rope_from_cache, rope_neox
from .rope_fused import attn_qk_norm_rope_gate, fused_qk_norm_rope, rope_and_cache
from .sampling import compute_logprobs, compute_probs, gather_logprobs, greedy_argmax
from .splits import attn_gate_split, gdn_conv_split, qkv_split
from .ssd import ssd_bmm_chunk, ssd_chunk_cumsum, ssd_chunk_state, ssd_state_passing
from .ssd_scan import mamba2_rmsnorm_gated, ssd_chunk_prefill, ssd_chunk_scan, ssd_recurrent
from .ssm import selective_scan, selective_state_update
from .state_cache import gdn_state_gather, gdn_state_scatter
from .token_masks import (
    apply_allowed_token_ids,
    apply_bad_words,
    apply_logit_bias,
    apply_min_tokens,
    apply_token_mask,
)

__all__ = [
    "add",
    "apply_allowed_token_ids",
    "apply_bad_words",
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
    "batched_matmul",
    "cast_bf16",
    "cast_f32",
    "causal_conv1d_fwd",
    "causal_conv1d_update",
    "compute_logprobs",
    "compute_probs",
    "concat_and_cache_mla",
    "copy_blocks",
    "cp_gather_cache",
    "cutlass_scaled_fp4_mm",
    "dequantize_nvfp4",
    "dynamic_per_token_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "embedding",
    "embedding_quant",
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
    "greedy_argmax",
    "gumbel_sample",
    "hadacore_transform",
    "hadamard",
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
    "mamba2_rmsnorm_gated",
    "matmul",
    "matmul_bt",
    "matmul_bt_quant",
    "matmul_mxf4_bf16_tn",
    "matmul_nvfp4",
    "merge_attn_states",
    "moe_silu_mul",
    "mul_col_vec_f32",
    "mul_scalar",
    "mxfp4_quant",
    "paged_attention",
    "per_token_group_quant_fp8",
    "qkv_split",
    "quant_fp8_static",
    "quantize_row_q8_0",
    "quantize_row_q8_1",
    "quantize_row_q8_k",
    "random_sample",
    "relu",
    "repack_q8_0x4",
    "reshape_and_cache",
    "reshape_and_cache_xpacked",
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
    "soft_cap",
    "ssd_bmm_chunk",
    "ssd_chunk_cumsum",
    "ssd_chunk_prefill",
    "ssd_chunk_scan",
    "ssd_chunk_state",
    "ssd_recurrent",
    "ssd_state_passing",
    "swap_blocks",
    "swap_blocks_batch",
    "swizzle_blockscale",
    "vec_dot",
]  # fmt: skip
