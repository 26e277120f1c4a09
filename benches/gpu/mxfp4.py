"""MXFP4 and rotations: the quantiser, Hadamard matrices and transforms, rotated rows in MXFP4 and NVFP4.

QuTLASS has kernels from Blackwell on. Rotations are by Sylvester's matrix, whose columns share what their sums have in
common in the mirror's order: 171 multiply-adds for 16 elements, and a few sums more for R above 16; of many rows tensor
cores' sums say nearly every code. The torch peer multiplies in bfloat16 on tensor cores and quantises step by step.
"""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_normal, vllm_ops
from .bench import HIDDEN, TOKENS, Bench
from .quant_fp8 import U8

WIDTH = 4096
ROTATION = 22
"""Operations an element of a rotation."""


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield quantise(T)
        for R, method in ((32, "quest"), (32, "abs_max"), (128, "quest"), (128, "abs_max")):
            yield rotate_mx(T, R, method)
        for R in (16, 64, 128):
            yield rotate_nv(T, R)
    for T, K in ((8192, 1024), (8192, WIDTH), (1024, 32768)):
        yield transform(T, K)
    yield matrix(8192)


def _blackwell():
    """vLLM's module of custom ops, where its QuTLASS kernels run."""
    import torch

    if torch.cuda.get_device_capability()[0] < 10:
        raise NotImplementedError("QuTLASS needs Blackwell")
    import vllm._custom_ops as ops

    return ops


def _torch_matrix(R: int):
    import torch

    h = torch.ones(1, 1, device="cuda")
    while len(h) < R:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (h * R**-0.5).bfloat16()


def _torch_codes(*shape: int):
    """What makes codes, two to a byte, of float32 values seen as `shape`."""
    import torch

    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device="cuda")

    def pack(value):
        value = value.view(shape)
        codes = torch.bucketize(value.abs(), steps, out_int32=True) | (value < 0).int() << 3
        return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)

    return pack


def quantise(T: int, K: int = HIDDEN) -> Bench:
    def make():
        return (cupy_normal(T, K),), {}, (cupy_empty(T, K // 2, dtype=U8), cupy_empty(T, K // 32, dtype=U8))

    def torch():
        import torch

        x, pack = torch_normal(T, K), _torch_codes(T, K)

        def run():
            value = x.float().view(T, -1, 32)
            exponent = torch.floor(torch.log2(value.abs().amax(-1, keepdim=True) * (8 / 7))) - 2
            return pack(value * torch.exp2(-exponent)), (exponent + 127).to(torch.uint8)

        return run

    size = 2 * T * K + T * K // 2 + T * K // 32
    return Bench("mxfp4", f"mxfp4 {T}x{K}", ours("mxfp4_quant", make), {"torch": torch}, size, 12 * T * K)


def rotate_mx(T: int, R: int, method: str, K: int = WIDTH) -> Bench:
    def make():
        from vtlab import ops

        h = ops.hadamard(n=R, out=cupy_empty(R, R))
        out = cupy_empty(T, K // 2, dtype=U8), cupy_empty(T, K // 32, dtype=U8)
        return (cupy_normal(T, K), h), {"method": method}, out

    def torch():
        import torch

        x, h, pack = torch_normal(T, K), _torch_matrix(R), _torch_codes(T, K)

        def run():
            value = (x.view(-1, R) @ h).float().view(T, -1, 32)
            if method == "quest":
                size = value.std(-1, correction=0, keepdim=True) * (2.92247856 / 6) + 1e-8
            else:
                size = value.abs().amax(-1, keepdim=True) + 1e-8
            exponent = torch.floor(torch.log2(size))
            factor = 3 if method == "abs_max" else 1
            return pack(value * factor * torch.exp2(-exponent)), (exponent + 127).to(torch.uint8)

        return run

    def qutlass():
        call, x, h = _blackwell().fusedQuantizeMx, torch_normal(T, K), _torch_matrix(R)
        return lambda: call(x, h, method=method)

    size = 2 * T * K + T * K // 2 + T * K // 32
    return Bench("mxfp4", f"rotated by {R} mxfp4 {method} {T}x{K}", ours("fused_quantize_mx", make),
                 {"torch": torch, "qutlass": qutlass}, size, ROTATION * T * K)  # fmt: skip


def rotate_nv(T: int, R: int, K: int = WIDTH) -> Bench:
    def make():
        import cupy

        from vtlab import ops

        h = ops.hadamard(n=R, out=cupy_empty(R, R))
        out = cupy_empty(T, K // 2, dtype=U8), cupy_empty(T, K // 16, dtype=U8)
        return (cupy_normal(T, K), h, cupy.full(1, 500, F32)), {}, out

    def torch():
        import torch

        x, h, pack = torch_normal(T, K), _torch_matrix(R), _torch_codes(T, K)

        def run():
            value = (x.view(-1, R) @ h).float().view(T, -1, 16)
            scale = (500 * value.abs().amax(-1, keepdim=True) / 6).clamp(max=448).to(torch.float8_e4m3fn)
            return pack(value * (500 / scale.float())), scale

        return run

    def qutlass():
        import torch

        call, x, h = _blackwell().fusedQuantizeNv, torch_normal(T, K), _torch_matrix(R)
        scale = torch.full((1,), 500.0, device="cuda")
        return lambda: call(x, h, scale)

    size = 2 * T * K + T * K // 2 + T * K // 16
    return Bench("mxfp4", f"rotated by {R} nvfp4 {T}x{K}", ours("fused_quantize_nv", make),
                 {"torch": torch, "qutlass": qutlass}, size, ROTATION * T * K)  # fmt: skip


def transform(T: int, K: int) -> Bench:
    def make():
        return (cupy_normal(T, K),), {}, cupy_empty(T, K)

    def vllm():
        call, x = vllm_ops().hadacore_transform, torch_normal(T, K)
        return lambda: call(x, False)

    levels = K.bit_length() - 1
    return Bench("mxfp4", f"hadacore {T}x{K}", ours("hadacore_transform", make), {"vllm": vllm}, 4 * T * K,
                 levels * T * K)  # fmt: skip


def matrix(n: int) -> Bench:
    def torch():
        return lambda: _torch_matrix(n)

    return Bench("mxfp4", f"hadamard {n}x{n}", ours("hadamard", lambda: ((), {"n": n}, cupy_empty(n, n))),
                 {"torch": torch}, 2 * n * n, 0)  # fmt: skip
