"""The 45 rows of the kernel matrix and the families (module names) that hold each row's ops."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One kernel family of the matrix: its id, the modules its ops live in, and what it is in a few words.

    `promised` are the ops that the row must hold to be whole; it grows as rows are specified. `machinery` begins
    the names of the parity tests of a row that is proven by these alone: a mechanism, which holds no ops, or the CPU's
    kernels of ops whose contracts belong to another row. Such ops are `shared`; without machinery the row is their
    kernels on a GPU.
    """

    id: str
    families: tuple[str, ...]
    title: str
    promised: tuple[str, ...] = ()
    machinery: str | None = None
    shared: tuple[str, ...] = ()


def _rows(*entries: tuple[str, str, str]) -> dict[str, Row]:
    return {
        f"KERNEL-{id}": Row(
            f"KERNEL-{id}",
            tuple(families.split()),
            title,
            _PROMISED.get(id, ()),
            _MACHINERY.get(id),
            _SHARED.get(id, ()),
        )
        for id, families, title in entries
    }


_PROMISED = {
    id: tuple(ops.split())
    for id, ops in {
        "ATTN-PAGED": "attention paged_attention merge_attn_states",
        "EW-NORM-ACT": """rms_norm layer_norm rms_norm_gated l2norm silu_and_mul moe_silu_mul silu_and_mul_clamp
            gelu_and_mul relu add mul_scalar soft_cap embedding cast_bf16 cast_f32 mul_col_vec_f32 attn_gate_split
            sigmoid_gate_bf16 qkv_split gdn_conv_split gdn_g_beta gdn_post_conv shared_expert_gate""",
        "EW-NORM-QUANT": """rms_norm_quant_fp8 rms_norm_gated_quant_fp8 rms_norm_dynamic_per_token_quant
            rms_norm_per_block_quant silu_and_mul_quant silu_and_mul_per_block_quant silu_mul_fp4_quant
            silu_and_mul_fp4_quant sigmoid_gate_fp4_quant rms_norm_fp4_quant""",
        "GDN-AOT-BF16": """gdn_prefill gdn_chunk_cumsum gdn_kkt gdn_solve_tril gdn_recompute_w_u gdn_delta_h gdn_chunk_o
            gdn_chunk_prefill""",
        "GDN-PACKED-DECODE": "gdn_packed_decode gdn_decode",
        "GDN-SCRATCH": "gdn_chunk_layout",
        "GEMM-BF16": "matmul matmul_bt batched_matmul",
        "GEMM-CPU-ELEM": "matmul matmul_bt",
        "GEMM-DEEPGEMM": """per_token_cast_to_fp8 per_block_cast_to_fp8 requant_weight_ue8m0 transform_sf_layout
            fp8_gemm_nt m_grouped_fp8_gemm_nt_contiguous m_grouped_fp8_gemm_nt_masked k_grouped_fp8_gemm_tn
            per_token_cast_to_fp4 fp8_einsum ep_scatter ep_scatter_ue8m0 ep_gather
            silu_mul_per_token_group_quant_fp8_colmajor silu_mul_masked_quant""",
        "GEMM-FP8": """quant_fp8_static dynamic_scaled_fp8_quant dynamic_per_token_scaled_fp8_quant
            per_token_group_quant_fp8 scaled_fp8_quant_static_group static_scaled_int8_quant dynamic_scaled_int8_quant
            per_token_group_quant_int8 requantize_with_max_scale matmul_fp8_cutlass matmul_fp8_cublaslt
            cutlass_scaled_mm cutlass_scaled_mm_azp scaled_mm_block""",
        "GEMM-INT-LOWBIT": """quantize_weights gptq_pack gptq_unpack awq_pack awq_unpack sort_weights permute_cols
            gptq_shuffle gptq_unshuffle gptq_dequantize gptq_gemm awq_dequantize awq_gemm triton_w4a16_gemm
            machete_prepack_b machete_unpack_b machete_mm allspark_repack_weight allspark_unpack_weight
            allspark_w8a16_gemm moe_wna16_gemm""",
        "GEMM-MARLIN-W4A16": """gptq_marlin_repack awq_marlin_repack marlin_unpack marlin_permute_scales
            marlin_permute_bias marlin_zero_points awq_to_marlin_zero_points marlin_unpack_zero_points
            marlin_act_int8_process_scales marlin_int4_fp8_preprocess marlin_gemm nvfp4_marlin_process_scales
            nvfp4_marlin_process_global_scale mxfp4_marlin_process_scales apply_fp4_marlin_linear
            moe_wna16_marlin_gemm""",
        "GEMM-W4A8": """w4a8_quantize_scales convert_packed_uint4b8_to_signed_int4 cutlass_encode_and_reorder_int4b
            cutlass_decode_int4b cutlass_pack_scale_fp8 w4a8_dequantize cutlass_w4a8_mm cutlass_w4a8_moe_mm""",
        "GEMM-NVFP4-W4A4": """scaled_fp4_quant dequantize_nvfp4 swizzle_blockscale cutlass_scaled_fp4_mm
            matmul_nvfp4""",
        "KDA-DELTA": """kda_low_rank_decay kda_decay_gate kda_decay_gate_chunk_cumsum kda_decode kda_prefill_recurrent
            kda_kkt kda_recompute_w_u kda_delta_h kda_chunk_o kda_chunk_prefill""",
        "GEMM-QUTLASS-MX": """mxfp4_quant hadamard hadacore_transform fused_quantize_mx fused_quantize_nv
            matmul_mxf4_bf16_tn matmul_mxfp4""",
        "KV-CACHE": """reshape_and_cache reshape_and_cache_xpacked copy_blocks swap_blocks swap_blocks_batch
            cp_gather_cache concat_and_cache_mla gather_mla_cache""",
        "KV-QUANT": """reshape_and_cache_fp8 dequantize_kv_fp8 reshape_and_cache_per_token_head dequantize_kv_heads rht
            reshape_and_cache_int4 dequantize_kv_int4 concat_and_cache_ds_mla dequantize_ds_mla
            indexer_k_quant_and_cache cp_gather_indexer_k_quant_cache reshape_and_cache_nvfp4""",
        "MOE-ROUTING": "moe_router_topk moe_sum",
        "MOE-UNQUANTIZED": "moe_grouped_gemm",
        "QUANT-CIQ-GEMM-CUDA": """quantize_row_q8_0 quantize_row_q8_1 quantize_row_q8_k matmul_bt_quant
            embedding_quant""",
        "QUANT-CIQ-IQUANT": """quantize_row_q8_0 quantize_row_q8_1 quantize_row_q8_k vec_dot matmul_bt_quant
            embedding_quant repack_q8_0x4""",
        "ROPE-QKNORM": """rope_neox rope_cos_sin_cache rope_from_cache rope_build_cache attn_qk_norm_rope_gate
            fused_qk_norm_rope rope_and_cache""",
        "SAMPLING": """apply_temperature greedy_argmax apply_top_k_top_p compute_probs compute_logprobs random_sample
            apply_penalties apply_min_p apply_logit_bias apply_token_mask apply_allowed_token_ids gather_logprobs
            apply_bad_words apply_min_tokens gumbel_sample""",
        "SSM-MAMBA": """causal_conv1d_fwd causal_conv1d_update causal_conv1d_update_spec short_conv
            gdn_state_gather gdn_state_scatter
            selective_state_update selective_scan ssd_chunk_cumsum ssd_chunk_state ssd_state_passing ssd_bmm_chunk
            ssd_chunk_scan ssd_chunk_prefill ssd_recurrent mamba2_rmsnorm_gated linear_attention_decode
            linear_attention_prefill""",
    }.items()
}

_MACHINERY = {
    "ACCEL-PROVIDER-SELECT": "test_providers",
    "CUDA-DISPATCH-AOT": "test_dispatch",
    "FUSION-FRAMEWORK": "test_fusion",
    "GEMM-CPU-ELEM": "test_cpu_matmul",
}

_SHARED = {"GEMM-CPU-ELEM": ("matmul", "matmul_bt"), "QUANT-CIQ-GEMM-CUDA": _PROMISED["QUANT-CIQ-GEMM-CUDA"]}


ROWS: dict[str, Row] = _rows(
    ("ACCEL-PROVIDER-SELECT", "providers", "which implementation of an op runs on a device"),
    ("ATTN-DENSE-FLASH", "attention", "dense flash attention without a cache"),
    ("ATTN-DFLASH-BLOCK", "dflash", "block attention of the DFlash draft model"),
    ("ATTN-DFLASH-PAGED-BLOCK", "dflash", "DFlash block attention over a paged context"),
    ("ATTN-DSA-COMPRESSOR", "dsa", "DeepSeek-V4 key/value compressor"),
    ("ATTN-DSA-SPARSE-INDEX", "dsa", "lightning indexer and sparse selection"),
    ("ATTN-FA2", "attention", "FlashAttention-2 varlen and paged"),
    ("ATTN-FA3-FA4", "attention", "FlashAttention-3 and 4"),
    ("ATTN-FLASHINFER-TRTLLM", "attention", "FlashInfer, XQA and TRT-LLM attention"),
    ("ATTN-MLA-SPARSE", "mla", "multi-head latent attention, dense and sparse"),
    ("ATTN-PAGED", "attention attention_merge", "dense reference and paged attention"),
    ("ATTN-TRITON-FLEX-HPC", "attention", "Triton unified, flex and HPC attention"),
    ("COLLECTIVES", "collectives", "tensor-parallel collectives"),
    ("CUDA-DISPATCH-AOT", "arch", "per-architecture builds and their dispatch"),
    ("DSV4-W7-DEVICE", "dsa mhc moe_routing", "device side of DeepSeek-V4's kernels"),
    ("EW-NORM-ACT", "norm activation elementwise splits gates", "norms, activations, embedding, casts, glue"),
    ("EW-NORM-QUANT", "norm_quant fp4_fused", "norms fused with quantisation"),
    ("FUSION-FRAMEWORK", "fusion", "fused recipes, declared once"),
    ("GDN-AOT-BF16", "gdn gdn_chunks gdn_chunk_states", "gated delta rule, chunked bf16"),
    ("GDN-PACKED-DECODE", "gdn", "gated delta rule, packed decode"),
    ("GDN-SCRATCH", "gdn_chunk_states", "gated delta rule scratch planning"),
    ("GEMM-BF16", "matmul", "dense GEMM: bf16, f16, f32, batched, merged"),
    ("GEMM-CPU-ELEM", "matmul", "element-exact CPU GEMM"),
    ("GEMM-DEEPGEMM", "fp8_casts fp8_blocks fp8_groups deep_gemm_moe", "block-scaled fp8 GEMM"),
    ("GEMM-FP8", "quant_fp8 quant_int8 fp8_weights fp8_matmul fp8_blocks", "fp8 and int8 quantisation, scaled GEMM"),
    ("GEMM-INT-LOWBIT", "wna16 act_order gptq awq machete allspark moe_wna16", "GPTQ, AWQ, int8 and int4 GEMM"),
    ("GEMM-MARLIN-W4A16", "marlin marlin_fp4 marlin_matmul moe_marlin", "Marlin 4-bit weight GEMM"),
    ("GEMM-NVFP4-W4A4", "fp4 fp4_matmul", "NVFP4 quantisation and GEMM"),
    ("GEMM-QUTLASS-MX", "mxfp4", "MXFP4 and MXFP8 with Hadamard"),
    ("GEMM-W4A8", "w4a8 w4a8_matmul", "4-bit weight, 8-bit activation GEMM"),
    ("KDA-DELTA", "kda kda_chunks kda_chunk_states", "Kimi delta attention"),
    ("KV-CACHE", "kv_cache kv_blocks kv_latent", "paged KV insert, gather, copy"),
    ("KV-QUANT", "kv_quant kv_quant_heads kv_quant_latent kv_quant_fp4", "quantised KV caches"),
    ("MHC-SINKHORN", "mhc", "manifold-constrained hyper-connections"),
    ("MOE-QUANTIZED", "moe", "quantised fused experts"),
    ("MOE-ROUTING", "moe_routing", "top-k routing and permutation"),
    ("MOE-SPECIAL", "moe", "special expert layouts"),
    ("MOE-SQRTSOFTPLUS-HASH", "moe_routing", "sqrt-softplus and hash routing"),
    ("MOE-UNQUANTIZED", "moe", "fused experts in bf16"),
    ("QUANT-CIQ-GEMM-CUDA", "ggml ggml_matmul", "GGML-block GEMM on CUDA"),
    ("QUANT-CIQ-IQUANT", "ggml ggml_matmul", "GGML blocks: quantisers, products, lookups"),
    ("ROPE-QKNORM", "rope rope_fused", "rotary embeddings, caches, QK norm"),
    ("SAMPLING", "sampling draws logits token_masks", "logits processing, truncation, sampling"),
    ("SPEC-DECODE", "spec_decode", "speculative decoding"),
    (
        "SSM-MAMBA",
        "causal_conv causal_conv_spec state_cache ssm ssd ssd_scan ssd_loop mamba_norm linear_attention",
        "Mamba and Mamba-2",
    ),
)
