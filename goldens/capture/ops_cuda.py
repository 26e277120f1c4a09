"""Op-level goldens from vLLM's CUDA build: norms, activations, RoPE, cache writes, GEMM; runs the other families too.

    python goldens/capture/ops_cuda.py --out goldens/ops [--families norm attention ...]

Runs on a GPU, in vLLM's own environment. Every case stands alone: one that fails is listed under "errors" in its
family's file. bfloat16 throughout, as the compiled ops are used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import ops_cuda_attention
import ops_cuda_sampling
import torch
from record import Record, generator, normal

BF16, F32 = torch.bfloat16, torch.float32


def gpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.cuda() for tensor in tensors]


def norm(record: Record) -> None:
    """rms_norm with and without a residual, the Gemma form, the gated form, l2norm."""
    c = torch.ops._C
    for rows, width in ((1, 64), (7, 128), (3, 1000), (5, 1024), (2, 5120), (300, 128)):
        for dtype in (BF16, F32):
            name = f"{str(dtype)[6:]}_{rows}x{width}"
            x, residual = normal("x" + name, rows, width, dtype=dtype), normal("r" + name, rows, width, dtype=dtype)
            x[0, ::3] *= 30
            weight = (1 + 0.2 * normal("w" + name, width)).to(dtype)
            with record.attempt(f"rms_norm {name}"):
                xd, wd = gpu(x, weight)
                out = torch.empty_like(xd)
                c.rms_norm(out, xd, wd, 1e-6)
                record.case("rms_norm", name, "torch.ops._C.rms_norm", {"eps": 1e-6, "rounding": "vllm"},
                            {"x": x, "weight": weight}, {"out": out})  # fmt: skip
            with record.attempt(f"fused_add_rms_norm {name}"):
                xd, rd, wd = gpu(x, residual, weight)
                c.fused_add_rms_norm(xd, rd, wd, 1e-6)
                record.case("rms_norm", f"residual_{name}", "torch.ops._C.fused_add_rms_norm",
                            {"eps": 1e-6, "rounding": "vllm"}, {"x": x, "residual": residual, "weight": weight},
                            {"out": xd, "residual": rd})  # fmt: skip
    for rows, width in ((7, 128), (5, 1024)):
        x, residual = normal(f"gx{width}", rows, width, dtype=BF16), normal(f"gr{width}", rows, width, dtype=BF16)
        weight = normal(f"gw{width}", width, scale=0.3, dtype=BF16)
        with record.attempt(f"gemma {width}"):
            from vllm import ir

            xd, rd, wd = gpu(x, residual, weight)
            call = {"eps": 1e-6, "gemma": True, "rounding": "vllm"}
            out = ir.ops.rms_norm(xd, wd.float() + 1.0, 1e-6)
            record.case("rms_norm", f"gemma_{width}", "vllm.ir.ops.rms_norm, as GemmaRMSNorm", call,
                        {"x": x, "weight": weight}, {"out": out})  # fmt: skip
            out, new = ir.ops.fused_add_rms_norm(xd.clone(), rd.clone(), wd.float() + 1.0, 1e-6)
            record.case("rms_norm", f"gemma_residual_{width}", "vllm.ir.ops.fused_add_rms_norm, as GemmaRMSNorm",
                        call, {"x": x, "residual": residual, "weight": weight},
                        {"out": out, "residual": new})  # fmt: skip
    for width, sigmoid in ((128, False), (128, True), (64, False)):
        x, gate = normal(f"nx{width}", 9, width, dtype=BF16), normal(f"ng{width}", 9, width, dtype=BF16, scale=2)
        weight = (1 + 0.2 * normal(f"nw{width}", width)).to(BF16)
        with record.attempt(f"rms_norm_gated {width} {sigmoid}"):
            from vllm.third_party.flash_linear_attention.ops.layernorm_guard import rmsnorm_fn

            xd, gd, wd = gpu(x, gate, weight)
            activation = "sigmoid" if sigmoid else "swish"
            out = rmsnorm_fn(
                xd, wd, None, z=gd, eps=1e-6, group_size=None, norm_before_gate=True, activation=activation
            )
            record.case("rms_norm_gated", f"{activation}_{width}", "layernorm_guard.rmsnorm_fn (Triton)",
                        {"eps": 1e-6, "sigmoid_gate": sigmoid}, {"x": x, "gate": gate, "weight": weight},
                        {"out": out})  # fmt: skip
    for width in (64, 128, 256):
        x = normal(f"l2{width}", 6, width, dtype=BF16)
        with record.attempt(f"l2norm {width}"):
            from vllm.third_party.flash_linear_attention.ops.l2norm import l2norm_fwd

            record.case("l2norm", f"bf16_{width}", "flash_linear_attention l2norm_fwd (Triton)", {"eps": 1e-6},
                        {"x": x}, {"out": l2norm_fwd(x.cuda(), eps=1e-6)})  # fmt: skip


def activation(record: Record) -> None:
    """The gated activations of the feed-forward block."""
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 200.0, -200.0, float("inf"), 3e38, -3e38, 20.0])
    for rows, width in ((4, 64), (3, 1000), (2, 5120)):
        x = normal(f"a{width}", rows, 2 * width, dtype=BF16, scale=3)
        x[0, : len(special)] = special.to(BF16)
        plain = (("silu_and_mul", "silu_and_mul", {}), ("gelu_and_mul", "gelu_tanh_and_mul", {}))
        clamped = tuple(
            ("silu_and_mul_clamp", "silu_and_mul_with_clamp", {"limit": limit, "alpha": alpha, "beta": beta})
            for limit, alpha, beta in ((7.0, 1.0, 0.0), (2.5, 1.702, 1.0))
        )
        for op, function, extra in plain + clamped:
            name = "_".join([f"bf16_{rows}x{width}", *(f"{value:g}" for value in extra.values())])
            with record.attempt(f"{op} {name}"):
                (xd,) = gpu(x)
                out = torch.empty(rows, width, dtype=BF16, device="cuda")
                getattr(torch.ops._C, function)(out, xd, *extra.values())
                record.case(op, name, f"torch.ops._C.{function}", {**extra, "rounding": "vllm"}, {"x": x}, {"out": out})


def cos_sin_cache(rows: int, rotary: int, base: float, dtype: torch.dtype) -> torch.Tensor:
    inverse = base ** -(torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    angle = torch.arange(rows, dtype=torch.float64)[:, None] * inverse
    return torch.cat((angle.cos(), angle.sin()), -1).to(F32).to(dtype)


def rope(record: Record) -> None:
    """rotary_embedding and fused_qk_norm_rope."""
    for neox, dim, rotary in ((True, 128, 128), (True, 256, 64), (False, 128, 64), (False, 64, 64), (True, 96, 96)):
        for kind in (BF16, F32):
            name = f"{str(kind)[6:]}_{'neox' if neox else 'gptj'}_{dim}_{rotary}"
            q, k = normal("q" + name, 5, 4, dim, dtype=kind), normal("k" + name, 5, 2, dim, dtype=kind)
            positions = torch.tensor([0, 1, 63, 17, 40])
            cache = cos_sin_cache(64, rotary, 10000.0, kind)
            with record.attempt(f"rotary_embedding {name}"):
                qd, kd, pd, cd = gpu(q, k, positions, cache)
                torch.ops._C.rotary_embedding(pd, qd.view(5, -1), kd.view(5, -1), dim, cd, neox)
                record.case("rope_from_cache", name, "torch.ops._C.rotary_embedding", {"is_neox": neox},
                            {"q": q, "k": k, "positions": positions, "cos_sin_cache": cache},
                            {"q": qd, "k": kd})  # fmt: skip
    for offset, inverse in ((64, False), (64, True)):
        name = f"offset{offset}_{'inverse' if inverse else 'forward'}"
        q, positions = normal("q" + name, 5, 4, 128, dtype=BF16), torch.tensor([0, 1, 63, 17, 40])
        cache = cos_sin_cache(64, 64, 10000.0, F32)
        with record.attempt(f"rotary_embedding {name}"):
            qd, pd, cd = gpu(q, positions, cache)
            torch.ops._C.rotary_embedding(pd, qd.view(5, -1), None, 128, cd, False, offset, inverse)
            record.case("rope_from_cache", name, "torch.ops._C.rotary_embedding",
                        {"is_neox": False, "rope_dim_offset": offset, "inverse": inverse},
                        {"q": q, "positions": positions, "cos_sin_cache": cache}, {"q": qd})  # fmt: skip
    for neox, dim, rotary, kind in ((True, 128, 128, BF16), (False, 128, 128, BF16), (True, 64, 64, BF16),
                                    (True, 256, 64, BF16), (True, 128, 128, F32)):  # fmt: skip
        name = f"{'neox' if neox else 'gptj'}_{dim}_{rotary}_{str(kind)[6:]}_cache"
        heads = {"num_heads_q": 4, "num_heads_k": 2, "num_heads_v": 2}
        qkv = normal("qkv" + name, 5, 8 * dim, dtype=BF16)
        weights = [(1 + 0.2 * normal(w + name, dim)).to(BF16) for w in "qk"]
        positions, cache = torch.tensor([0, 1, 63, 17, 40]), cos_sin_cache(64, rotary, 10000.0, kind)
        with record.attempt(f"fused_qk_norm_rope {name}"):
            out, qw, kw, pd, cd = gpu(qkv, *weights, positions, cache)
            torch.ops._C.fused_qk_norm_rope(out, 4, 2, 2, dim, 1e-6, qw, kw, cd, neox, pd)
            record.case("fused_qk_norm_rope", name, "torch.ops._C.fused_qk_norm_rope",
                        {**heads, "head_dim": dim, "eps": 1e-6, "is_neox": neox},
                        {"qkv": qkv, "q_weight": weights[0], "k_weight": weights[1], "positions": positions,
                         "cos_sin_cache": cache}, {"qkv": out})  # fmt: skip


def kv_cache(record: Record) -> None:
    """reshape_and_cache_flash in three layouts, the x-packed reshape_and_cache, cp_gather_cache; poisoned pages."""
    tokens, blocks = 7, 4
    one = torch.ones((), device="cuda")
    layouts = {
        "separate": lambda b, s, h, d: (torch.full((b, s, h, d), -7.0), torch.full((b, s, h, d), -9.0)),
        "halves_nb2bshd": lambda b, s, h, d: tuple(torch.full((b, 2, s, h, d), -7.0).unbind(1)),
        "nhd_2d": lambda b, s, h, d: torch.full((b, s, h, 2 * d), -7.0).split(d, -1),
        "hnd_2d": lambda b, s, h, d: torch.full((b, h, s, 2 * d), -7.0).permute(0, 2, 1, 3).split(d, -1),
    }
    for layout, make in layouts.items():
        for size, heads, dim in ((16, 2, 64), (32, 1, 128), (16, 3, 80)):
            name = f"{layout}_bs{size}_h{heads}_d{dim}"
            k, v = (
                normal("k" + name, tokens, heads, dim, dtype=BF16),
                normal("v" + name, tokens, heads, dim, dtype=BF16),
            )
            k[0, 0, :3] = torch.tensor([float("nan"), float("inf"), -0.0]).to(BF16)
            slots = torch.randperm(blocks * size, generator=generator("s" + name))[:tokens]
            slots[2] = -1
            slots = slots[:-1]  # the last token is graph padding
            before = [cache.to(BF16).clone() for cache in make(blocks, size, heads, dim)]
            with record.attempt(f"reshape_and_cache {name}"):
                kd, vd, sd = gpu(k, v, slots)
                base = make(blocks, size, heads, dim)
                pages = base[0]._base if base[0]._base is not None else None
                if pages is None:
                    kc, vc = (cache.to(BF16).cuda() for cache in base)
                else:
                    whole = pages.to(BF16).cuda()
                    kc, vc = (whole.as_strided(c.shape, c.stride(), c.storage_offset()) for c in base)
                torch.ops._C_cache_ops.reshape_and_cache_flash(kd, vd, kc, vc, sd, "auto", one, one)
                record.case("reshape_and_cache", name, "torch.ops._C_cache_ops.reshape_and_cache_flash", {},
                            {"key": k, "value": v, "key_cache": before[0], "value_cache": before[1],
                             "slot_mapping": slots}, {"key_cache": kc, "value_cache": vc})  # fmt: skip
    k, v = normal("kx", tokens, 2, 64, dtype=BF16), normal("vx", tokens, 2, 64, dtype=BF16)
    slots = torch.tensor([5, 63, -1, 17, 0, 32, 40])
    caches = [torch.full((4, 2, 8, 16, 8), -7.0, dtype=BF16), torch.full((4, 2, 64, 16), -9.0, dtype=BF16)]
    with record.attempt("reshape_and_cache_xpacked"):
        kd, vd, kc, vc, sd = gpu(k, v, *caches, slots)
        torch.ops._C_cache_ops.reshape_and_cache(kd, vd, kc, vc, sd, "auto", one, one)
        record.case("reshape_and_cache_xpacked", "bf16", "torch.ops._C_cache_ops.reshape_and_cache", {},
                    {"key": k, "value": v, "key_cache": caches[0], "value_cache": caches[1], "slot_mapping": slots},
                    {"key_cache": kc, "value_cache": vc})  # fmt: skip
    src, dst = normal("src", 6, 16, 64, dtype=BF16), torch.full((30, 64), -7.0, dtype=BF16)
    table, lengths = (
        torch.tensor([[4, 0, 9], [2, 5, 9]], dtype=torch.int32),
        torch.tensor([0, 11, 28], dtype=torch.int32),
    )
    for name, starts in (("whole", None), ("chunk", torch.tensor([16, 0], dtype=torch.int32))):
        with record.attempt(f"cp_gather_cache {name}"):
            sd, dd, td, ld = gpu(src, dst, table, lengths)
            torch.ops._C_cache_ops.cp_gather_cache(sd, dd, td, ld, 2, starts if starts is None else starts.cuda())
            record.case("cp_gather_cache", name, "torch.ops._C_cache_ops.cp_gather_cache", {},
                        {"src": src, "dst": dst, "block_table": table, "cu_seq_lens": lengths, "seq_starts": starts},
                        {"dst": dd})  # fmt: skip


def matmul(record: Record) -> None:
    """F.linear as vLLM's unquantised GEMM calls it."""
    for m, n, k in ((1, 64, 128), (5, 33, 257), (17, 128, 512), (64, 96, 1024), (3, 16, 4096)):
        a, b = normal(f"a{m}{n}{k}", m, k, dtype=BF16), normal(f"b{m}{n}{k}", n, k, dtype=BF16)
        with record.attempt(f"matmul_bt {m}x{n}x{k}"):
            out = torch.nn.functional.linear(*gpu(a, b))
            record.case(
                "matmul_bt", f"bf16_{m}x{n}x{k}", "torch.nn.functional.linear", {}, {"a": a, "b": b}, {"out": out}
            )


FAMILIES = {
    "norm": (norm, __file__), "activation": (activation, __file__), "rope": (rope, __file__),
    "kv_cache": (kv_cache, __file__), "matmul": (matmul, __file__),
    "attention": (ops_cuda_attention.attention, ops_cuda_attention.__file__),
    "sampling": (ops_cuda_sampling.sampling, ops_cuda_sampling.__file__),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU; the CPU build's goldens come from the ops_<family>.py scripts")
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C and _C_cache_ops

    missing = 0
    for family in arguments.families:
        capture, script = FAMILIES[family]
        record = Record(family, script)
        with record.attempt("the family as a whole"):
            capture(record)
        record.save(arguments.out, dtype="bfloat16")
        missing += len(record.errors)
    print("cases that failed:", missing)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
