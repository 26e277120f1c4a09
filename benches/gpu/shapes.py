"""The shapes: one token, a small batch, a large one, a long prompt; widths of Qwen3 32B and Qwen3.5."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from .replay import Bench

TOKENS = (1, 16, 256, 8192)
HIDDEN, INTERMEDIATE, VOCAB = 5120, 17408, 151936
BF16 = np.dtype(ml_dtypes.bfloat16)


def _cupy(*shape: int, dtype=BF16, seed: int = 0):
    import cupy

    from vtlab import ops

    values = cupy.random.default_rng(seed).standard_normal(shape, dtype=cupy.float32)
    return ops.cast_bf16(values) if dtype == BF16 else values


def _torch(*shape: int, dtype: str = "bfloat16"):
    import torch

    return torch.randn(shape, device="cuda", dtype=torch.float32).to(getattr(torch, dtype))


def _ours(op: str, make: Callable[[], tuple[tuple, dict, object]]) -> Callable:
    """A bench's call of ``ops.<op>`` with everything preallocated; `make` runs on the device's machine only."""

    def prepare():
        from vtlab import ops

        args, options, out = make()
        function = getattr(ops, op)
        return lambda: function(*args, **options, out=out)

    return prepare


def benches() -> Iterator[Bench]:
    """Every family's benches."""
    for T in TOKENS:
        yield from norm(T)
        yield from activation(T)
        yield from elementwise(T)
        yield from splits(T)
        yield from gates(T)


def norm(T: int) -> Iterator[Bench]:
    import torch
    from torch.nn import functional as F

    H, size = HIDDEN, T * HIDDEN * 2
    out = _cupy
    yield Bench("norm", f"rms_norm {T}x{H}",
        _ours("rms_norm", lambda: ((_cupy(T, H), _cupy(H)), {}, out(T, H))),
        lambda: (lambda x, w: lambda: F.rms_norm(x, (H,), w, 1e-6))(_torch(T, H), _torch(H)), 2 * size)  # fmt: skip
    yield Bench("norm", f"rms_norm + residual {T}x{H}",
        _ours("rms_norm", lambda: ((_cupy(T, H), _cupy(H)), {"residual": _cupy(T, H)}, (out(T, H), out(T, H)))),
        lambda: (lambda x, w, r: lambda: F.rms_norm(torch.add(x, r), (H,), w, 1e-6))(
            _torch(T, H), _torch(H), _torch(T, H)), 4 * size)  # fmt: skip
    yield Bench("norm", f"layer_norm {T}x{H}",
        _ours("layer_norm", lambda: ((_cupy(T, H), _cupy(H), _cupy(H)), {}, out(T, H))),
        lambda: (lambda x, w, b: lambda: F.layer_norm(x, (H,), w, b))(_torch(T, H), _torch(H), _torch(H)),
        2 * size)  # fmt: skip
    yield Bench("norm", f"rms_norm_gated {T}x48x128",
        _ours("rms_norm_gated", lambda: ((_cupy(T, 48, 128), _cupy(T, 48, 128), _cupy(128)), {}, out(T, 48, 128))),
        lambda: (lambda x, z, w: lambda: F.rms_norm(x, (128,), w, 1e-6) * F.silu(z))(
            _torch(T, 48, 128), _torch(T, 48, 128), _torch(128)), 3 * T * 48 * 128 * 2)  # fmt: skip
    yield Bench("norm", f"l2norm {T}x32x128",
        _ours("l2norm", lambda: ((_cupy(T, 32, 128),), {}, out(T, 32, 128))),
        lambda: (lambda x: lambda: F.normalize(x, dim=-1))(_torch(T, 32, 128)), 2 * T * 32 * 128 * 2)  # fmt: skip


def activation(T: int) -> Iterator[Bench]:
    from torch.nn import functional as F

    D, f32 = INTERMEDIATE, np.float32
    size = T * D * 2
    for op, act in (("silu_and_mul", F.silu), ("gelu_and_mul", lambda g: F.gelu(g, approximate="tanh"))):
        for rounding in ("vt", "vllm"):
            yield Bench("activation", f"{op} {rounding} {T}x{D}",
                _ours(op, lambda rounding=rounding: ((_cupy(T, 2 * D),), {"rounding": rounding}, _cupy(T, D))),
                lambda act=act: (lambda x: lambda: act(x[:, :D]) * x[:, D:])(_torch(T, 2 * D)), 3 * size)  # fmt: skip
    if T <= 256:
        yield Bench("activation", f"soft_cap f32 {T}x{VOCAB}",
            _ours("soft_cap", lambda: ((_cupy(T, VOCAB, dtype=f32), 30.0), {}, _cupy(T, VOCAB, dtype=f32))),
            lambda: (lambda x: lambda: 30 * (x / 30).tanh())(_torch(T, VOCAB, dtype="float32")),
            8 * T * VOCAB)  # fmt: skip


def elementwise(T: int) -> Iterator[Bench]:
    import torch

    H, size = HIDDEN, T * HIDDEN * 2
    yield Bench("elementwise", f"add {T}x{H}",
        _ours("add", lambda: ((_cupy(T, H), _cupy(T, H)), {}, _cupy(T, H))),
        lambda: (lambda a, b: lambda: torch.add(a, b))(_torch(T, H), _torch(T, H)), 3 * size)  # fmt: skip
    yield Bench("elementwise", f"cast_bf16 {T}x{H}",
        _ours("cast_bf16", lambda: ((_cupy(T, H, dtype=np.float32),), {}, _cupy(T, H))),
        lambda: (lambda a: lambda: a.to(torch.bfloat16))(_torch(T, H, dtype="float32")), 3 * size)  # fmt: skip

    def ids():
        import cupy

        return cupy.arange(T, dtype=cupy.int64) * 97 % VOCAB

    yield Bench("elementwise", f"embedding {T}x{H}",
        _ours("embedding", lambda: ((_cupy(VOCAB, H), ids()), {}, _cupy(T, H))),
        lambda: (lambda w, i: lambda: torch.nn.functional.embedding(i, w))(
            _torch(VOCAB, H), torch.arange(T, device="cuda") * 97 % VOCAB), 2 * size)  # fmt: skip


def splits(T: int) -> Iterator[Bench]:
    sizes = (64 * 128, 8 * 128, 8 * 128)
    yield Bench("splits", f"qkv_split {T}x{sum(sizes)}",
        _ours("qkv_split", lambda: ((_cupy(T, sum(sizes)),), dict(zip(("q_size", "k_size", "v_size"), sizes)),
                                    tuple(_cupy(T, n) for n in sizes))),
        None if T == 1 else lambda: (lambda x: lambda: [p.contiguous() for p in x.split(sizes, -1)])(
            _torch(T, sum(sizes))),
        2 * T * sum(sizes) * 2)  # fmt: skip


def gates(T: int) -> Iterator[Bench]:
    import torch

    N = 8192
    yield Bench("gates", f"sigmoid_gate_bf16 {T}x{N}",
        _ours("sigmoid_gate_bf16", lambda: ((_cupy(T, N), _cupy(T, N, dtype=np.float32)), {}, _cupy(T, N))),
        lambda: (lambda a, g: lambda: (a * torch.sigmoid(g)).to(torch.bfloat16))(
            _torch(T, N), _torch(T, N, dtype="float32")), 8 * T * N)  # fmt: skip
    Hk, Hv, D = 16, 48, 128
    C = (2 * Hk + Hv) * D
    f32 = np.float32
    yield Bench("gates", f"gdn_post_conv {T}x{C}",
        _ours("gdn_post_conv", lambda: (
            (_cupy(T, C), _cupy(T, Hv), _cupy(T, Hv), _cupy(Hv, dtype=f32), _cupy(Hv, dtype=f32)),
            {"num_k_heads": Hk, "head_k_dim": D},
            (_cupy(T, Hk, D), _cupy(T, Hk, D), _cupy(T, Hv, D), _cupy(T, Hv, dtype=f32), _cupy(T, Hv, dtype=f32)))),
        None, 4 * T * C + 12 * T * Hv)  # fmt: skip
