"""The CUDA tier. Importing it registers a provider of each op that has a kernel; CuPy is asked for at the first call.

Kernels are the .cu files of `cuda/`; `vtlab build` compiles them for every architecture, and a device takes a build
that is there or compiles its own.
"""

from __future__ import annotations

import contextlib
from functools import cache

from vtlab.ops import providers
from vtlab.ops.arrays import register

from . import (
    act_order,
    activation,
    allspark,
    attention,
    attention_merge,
    awq,
    causal_conv,
    causal_conv_spec,
    codes,
    cublas,
    deep_gemm_moe,
    draws,
    elementwise,
    fp4,
    fp4_matmul,
    fp8_blocks,
    fp8_casts,
    fp8_groups,
    fp8_matmul,
    fp8_weights,
    fusion,
    gates,
    gdn,
    gdn_chunk_states,
    gdn_chunks,
    ggml,
    ggml_matmul,
    gptq,
    kda,
    kda_chunk_states,
    kda_chunks,
    kv_blocks,
    kv_cache,
    kv_latent,
    kv_quant,
    kv_quant_fp4,
    kv_quant_heads,
    kv_quant_latent,
    linear_attention,
    logits,
    machete,
    mamba_norm,
    marlin,
    marlin_fp4,
    marlin_matmul,
    matmul,
    moe,
    moe_marlin,
    moe_routing,
    moe_wna16,
    mxfp4,
    norm,
    norm_quant,
    numba_cuda,
    quant_fp8,
    quant_int8,
    rope,
    rope_fused,
    sampling,
    selective_scan,
    splits,
    ssd,
    ssd_loop,
    ssd_scan,
    ssm,
    state_cache,
    token_masks,
    w4a8,
    w4a8_matmul,
    wna16,
)
from .arrays import DeviceArrays
from .errors import DeviceError

__all__ = [
    "DeviceError", "act_order", "activation", "allspark", "attach", "attention", "attention_merge", "awq",
    "causal_conv", "causal_conv_spec", "codes", "cublas", "deep_gemm_moe", "draws", "elementwise", "fp4", "fp4_matmul",
    "fp8_blocks", "fp8_casts", "fp8_groups", "fp8_matmul", "fp8_weights", "fusion", "gates", "gdn", "gdn_chunk_states",
    "gdn_chunks", "ggml", "ggml_matmul", "gptq", "kda", "kda_chunk_states", "kda_chunks", "kv_blocks", "kv_cache",
    "kv_latent", "kv_quant", "kv_quant_fp4", "kv_quant_heads", "kv_quant_latent", "linear_attention", "logits",
    "machete", "mamba_norm", "marlin", "marlin_fp4", "marlin_matmul", "matmul", "moe", "moe_marlin", "moe_routing",
    "moe_wna16", "mxfp4", "norm", "norm_quant", "numba_cuda", "quant_fp8", "quant_int8", "rope", "rope_fused",
    "sampling", "selective_scan", "splits", "ssd", "ssd_loop", "ssd_scan", "ssm", "state_cache", "token_masks",
    "w4a8", "w4a8_matmul", "wna16",
]  # fmt: skip

register("cuda", cache(DeviceArrays))


def attach() -> None:
    """Tell the registry what the current GPU can do, and how its arrays are copied where that was asked for.

    Without a GPU its record stays invalid, and a kernel says why.
    """
    from .cupy_runtime import capabilities

    with contextlib.suppress(DeviceError):
        providers.set_device_provider_caps(capabilities())
        providers.register_backend("cuda", DeviceArrays())
