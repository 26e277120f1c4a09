"""The post-convolution step's heads, dealt out to teams as large batches would have them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import gates

from .compare import assert_bytes
from .scalar import draw


@pytest.mark.parametrize("depth, small", [(1, True), (2, False), (3, True), (4, True), (4, False)])
@pytest.mark.parametrize("kind, out", [("bfloat16", "bfloat16"), ("float32", "float16")])
def test_how_heads_are_dealt_out_changes_no_byte(device, depth, small, kind, out, monkeypatch):
    monkeypatch.setattr(gates, "share", lambda work, most: (min(depth, most), small))
    shapes = (7, 3, 5, 64, 64), (3, 1, 2, 8, 24), (5, 16, 48, 128, 128), (40, 2, 0, 16, 8), (9, 2, 3, 256, 8)
    for T, Hk, Hv, Dk, Dv in shapes:
        conv = draw((T, 2 * Hk * Dk + Hv * Dv), kind, T)
        a, b, A_log, bias = (draw(shape, "float32", n) for n, shape in enumerate(((T, Hv), (T, Hv), (Hv,), (Hv,))))
        how = {"num_k_heads": Hk, "head_k_dim": Dk, "out_dtype": np.dtype(getattr(ml_dtypes, out, out))}
        inputs = {"conv": conv, "a": a, "b": b, "A_log": A_log, "dt_bias": bias}
        got = device.call("gdn_post_conv", {name: device.send(array) for name, array in inputs.items()} | how)
        for array, want in zip(got, oracle.gdn_post_conv.mirror(*inputs.values(), **how), strict=True):
            assert_bytes(device.fetch(array), want, f"{T} {Hk} {Hv}")
