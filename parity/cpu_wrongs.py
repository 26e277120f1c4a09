"""Small wrongs in the source of the CPU tier's kernels, and how to run with one of them in place."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from vtlab.device.cpu.launch import Kernels

_PACKAGE = "vtlab.device.cpu.kernels"
_KEPT = ("lanes", "memory", "storage", "vectors")  # they define Numba types, of which there is one each


@dataclass(frozen=True)
class Wrong:
    """In kernels/<module>.py `old`, which stands there once, becomes `new`; a case of one of `ops` must notice, of one
    with weights of `quant_type` where that is given."""

    module: str
    ops: tuple[str, ...]
    old: str
    new: str
    quant_type: str | None = None

    def __str__(self) -> str:
        return f"{self.module}: {self.old.strip()} -> {self.new.strip()}"


WRONGS = [
    Wrong("matmul", ("matmul_bt",), "total = V(builder, builder.load(cells[m, p])) + one * columns[p]",
          "from .lanes import fused; total = fused(one, columns[p], V(builder, builder.load(cells[m, p])))"),
    Wrong("matmul", ("matmul_bt",), "some = min(DEPTH, depth - k)", "some = min(DEPTH, depth - k - 1)"),
    Wrong("matmul", ("matmul_bt",), "min(column + lane, columns - 1)", "min(column + lane, columns - 2)"),
    Wrong("matmul", ("matmul",), "columns - column - p, out_kind)", "columns - column, out_kind)"),
    Wrong("panels", ("matmul_bt",), "enumerate((pair << 16, pair & -0x10000))",
          "enumerate((pair & -0x10000, pair << 16))"),
    Wrong("panels", ("matmul_bt",), "turn_16(table, 2 * (first + i)", "turn_16(table, 2 * first"),
    Wrong("reductions", ("rms_norm",), "for span in (8, 4, 2, 1):", "for span in (1, 2, 4, 8):"),
    Wrong("reductions", ("rms_norm",), "for k in range(8):", "for k in range(7, -1, -1):"),
    Wrong("reductions", ("rms_norm",), "return (a + c) + (b + d)", "return (a + b) + (c + d)"),
    Wrong("norm", ("layer_norm",), "value = where(lanes_below(left), value, np.float32(0))", "pass"),
    Wrong("norm", ("rms_norm",), "if not mode & UNROUNDED:", "if mode & UNROUNDED:"),
    Wrong("norm", ("rms_norm",), "w = w + np.float32(1)", "w = w * np.float32(1)"),
    Wrong("norm", ("gdn_post_conv",), "item % heads * width", "item % heads * x_stride"),
    Wrong("elementwise", ("silu_and_mul",), "return through(silu(x), act_point) * y",
          "return through(silu(x), point) * y"),
    Wrong("elementwise", ("soft_cap",), "through(tanh(through(x / a, point)), point) * a",
          "through(tanh(x / a), point) * a"),
    Wrong("elementwise", ("silu_and_mul",), "y_first + row * y_stride + i", "y_first + i"),
    Wrong("transcendental", ("silu_and_mul",), "half = k >> 1", "half = k >> 2"),
    Wrong("transcendental", ("gdn_g_beta",), "fused(-0.5, fused(f, f, -square), low)", "low"),
    Wrong("rope", ("rope_from_cache",), "return fma(x, c, -(y * s)), fma(x, s, y * c)",
          "return x * c - y * s, x * s + y * c"),
    Wrong("rope", ("rope_from_cache",), "axis = 1 if i < tall + deep else 2", "axis = 1 if i <= tall + deep else 2"),
    Wrong("rope", ("reshape_and_cache",), "if slot >= 0:", "if slot > 0:"),
    Wrong("attention", ("paged_attention",), "return fold((a + c) + (b + d))", "return fold((a + b) + (c + d))"),
    Wrong("attention_rows", ("paged_attention",), "position - left)", "position - left + 1)"),
    Wrong("attention", ("paged_attention",), "put(sums if t == 0 else load_f32(to, j) + sums, to, j)",
          "put(sums if t < 2 else load_f32(to, j) + sums, to, j)"),
    Wrong("attention_rows", ("paged_attention",), "if counted:", "if not counted:"),
    Wrong("attention_rows", ("paged_attention",),
          "a, b = lane(both, 0), lane(both, 1)", "a, b = np.float32(1), lane(both, 1)"),
    Wrong("fixed_point", ("compute_probs",),
          "w = where(lanes_below(left), exp(load(x, first + i, left, 0) - top), np.float32(0))",
          "w = exp(load(x, first + i, left, 0) - top)"),
    Wrong("fixed_point", ("compute_logprobs",), "w.to(F64) * 2.0**42", "w.to(F64) * 2.0**32"),
    Wrong("logits", ("greedy_argmax",), "np.int64(0) if start != start else best_lane", "best_lane"),
    Wrong("logits", ("apply_min_p",), "where(share < bound", "where(share <= bound"),
    Wrong("ranks", ("apply_top_k_top_p",), "/ np.float32(whole) <= limit:", "/ np.float32(whole) < limit:"),
    Wrong("ranks", ("gather_logprobs",), "rank += get_f32(x, first + i) >= value",
          "rank += get_f32(x, first + i) > value"),
    Wrong("draws", ("gumbel_sample",), "for _ in range(10):", "for _ in range(7):"),
    Wrong("quant", ("quant_fp8_static",), "0x7FFFF + (size.shifted_down(20) & 1)", "0x80000"),
    Wrong("quant", ("quant_fp8_static",), "(size < 0x3C800000)", "(size < 0x3C000000)"),
    Wrong("quant", ("per_token_group_quant_fp8",), "bits(I32) + 0x7FFFFF)", "bits(I32) + 0x3FFFFF)"),
    Wrong("quant", ("dynamic_per_token_scaled_fp8_quant",),
          "size if keep else where(size == size, size, np.float32(0))", "size"),
    Wrong("heads", ("attn_qk_norm_rope_gate",), "through(value, kind) if mode & ROUNDED else value", "value"),
    Wrong("heads", ("fused_qk_norm_rope",), "a * c - b * s, b * c + a * s", "a * c - b * s, a * s - b * c"),
    Wrong("ggml_rows", ("quantize_row_q8_0",), "size - as_float(low) >= np.float32(0.5)",
          "size - as_float(low) > np.float32(0.5)"),
    Wrong("ggml_rows", ("quantize_row_q8_k",), "((rest == np.float32(0.5)) & odd)", "(rest == np.float32(0.5))"),
    Wrong("ggml_values", ("embedding_quant",), "return q - 16 if number == 2 else q", "return q"),
    Wrong("ggml", ("matmul_bt_quant",), "return (whole * d) * da if form == CODES_FIRST else whole * (d * da)",
          "return whole * (d * da)", "Q4_0"),
    Wrong("ggml_one", ("matmul_bt_quant",), "for k in range(0, 8, 4):", "for k in range(4, -4, -4):", "Q4_K"),
    Wrong("ggml_eight", ("matmul_bt_quant",), "for lane in range(1, 9):", "for lane in range(8, 0, -1):", "Q4_K"),
    Wrong("ggml", ("matmul_bt_quant",), "128 * next_ + 16 * row", "128 + 16 * row", "Q4_K"),
]  # fmt: skip


@contextlib.contextmanager
def planted(wrong: Wrong, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run with it: all kernels are defined anew around the changed module, and what is compiled is kept in `cache`."""
    monkeypatch.setenv("VTLAB_CACHE", str(cache))
    name = f"{_PACKAGE}.{wrong.module}"
    path = Path(importlib.import_module(name).__file__)
    text = path.read_text()
    if text.count(wrong.old) != 1:
        raise ValueError(f"{wrong}: stands {text.count(wrong.old)} times in {path.name}")
    imported = {key: value for key, value in sys.modules.items() if key.startswith(_PACKAGE + ".")}
    fresh = [key for key in imported if key.rpartition(".")[2] not in _KEPT]
    for key in fresh:
        del sys.modules[key]
    with _forgotten():
        try:
            module = ModuleType(name)
            module.__file__, module.__package__ = str(path), _PACKAGE
            sys.modules[name] = module
            exec(compile(text.replace(wrong.old, wrong.new), str(path), "exec"), module.__dict__)
            yield
        finally:
            for key in [key for key in sys.modules if key.startswith(_PACKAGE + ".")]:
                del sys.modules[key]
            sys.modules.update(imported)


@contextlib.contextmanager
def _forgotten() -> Iterator[None]:
    """Launchers that look their kernels up again, inside and once more afterwards."""
    modules = [module for key, module in sys.modules.items() if key.startswith("vtlab.device.cpu.")]
    held = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, Kernels)}
    before = {key: dict(vars(value)) for key, value in held.items()}
    for value in held.values():
        module = value._module
        vars(value).clear()
        value._module = module
    try:
        yield
    finally:
        for key, value in held.items():
            vars(value).clear()
            vars(value).update(before[key])
