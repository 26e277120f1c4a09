"""Small wrongs in the modules of quantised formats, each of which a tool's own logits notice."""

from __future__ import annotations

import inspect
import sys
import textwrap

import numpy as np
import pytest

from vtlab.models.loading import load_decoder
from vtlab.models.quant import fp4, w8a8, wna16
from vtlab.models.safetensors import read_safetensors

from .goldens import FOLDER
from .tokens import teacher_forced

# (checkpoint, class, method, exact text in it, another text)
WRONGS = {
    "zero points as they are stored": ("gptq_asym", wna16.Gptq, "matrix", "self.bits, self.v2)", "self.bits, True)"),
    "groups of neighbours": ("gptq_act_order", wna16.Gptq, "matrix", "if np.array_equal(g_idx, neighbours)", "if True"),
    "zero points less one": ("ct_w4a16", wna16.PackQuantized, "matrix", "g_idx, self.bits, True)",
                             "g_idx, self.bits, False)"),
    "words of AWQ in plain order": ("awq", wna16.InterleavedWords, "expanded", "ops.awq_dequantize(self.qweight,",
                                    "ops.awq_dequantize(self.qweight ^ 16,"),
    "a scale of another row": ("ct_fp8_dynamic", w8a8.Fp8, "expanded", "self.scale.T", "self.scale.T[::-1]"),
    "a scale of another block": ("nvfp4", fp4.NvFp4, "expanded", "self.scales,", "np.roll(self.scales, 1, 1),"),
    "a global scale that divides": ("nvfp4", fp4.Nvfp4, "matrix", "np.float32(1) / scale", "scale"),
    "a global scale turned over": ("modelopt_nvfp4", fp4.Nvfp4, "matrix", "if not self.modelopt", "if True"),
    "exponents one too high": ("mxfp4", fp4.MxFp4, "expanded", "- _BIAS", "- _BIAS + 1"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONGS)
def test_the_logits_notice(wrong, monkeypatch):
    name, kind, method, old, new = WRONGS[wrong]
    text = textwrap.dedent(inspect.getsource(getattr(kind, method)))
    assert text.count(old) == 1, f"{old!r} stands there {text.count(old)} times"
    module = sys.modules[kind.__module__]
    found: dict = {}
    exec("from __future__ import annotations\n" + text.replace(old, new), vars(module) | {"np": np}, found)
    monkeypatch.setattr(kind, method, found[method])
    golden = read_safetensors(FOLDER / "quantized" / "logits.safetensors")
    ids, want = golden[f"{name}.ids"].tolist(), golden[f"{name}.logits"]
    got = teacher_forced(load_decoder(FOLDER / "quantized" / name, "float32", 64), ids[:1], [*ids[1:], 0])
    assert np.linalg.norm(got - want) > 1e-3 * np.linalg.norm(want)
