"""Around the matrix products' kernels: views of packed tensors, the same row in any batch, chains dealt out or not."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import DeviceError, matmul, runtime
from vtlab.device.scratch import Scratch
from vtlab.ops.errors import ContractError

from .compare import assert_bytes
from .emulation import EmulatedRuntime
from .scalar import draw


@pytest.mark.parametrize("shift, gap", [(0, 0), (8, 8), (1, 7), (4, 0)])
@pytest.mark.parametrize("M", [1, 3, 20, 40])
def test_views_of_packed_tensors(device, M, shift, gap):
    """Rows of `a` out of a merged projection, weights out of a wider matrix; what lies between them is NaN."""
    K, N = 176, 37
    a, b = draw((M, K), "bfloat16", 1), draw((N, K), "bfloat16", 2)
    packed = [np.full((len(x), shift + K + gap), np.nan, x.dtype) for x in (a, b)]
    for whole, part in zip(packed, (a, b)):
        whole[:, shift : shift + K] = part
    left, right = (device.send(whole)[:, shift : shift + K] for whole in packed)
    got = device.call("matmul_bt", {"a": left, "b": right})
    assert_bytes(device.fetch(got), oracle.matmul_bt.mirror(a, b))


@pytest.mark.parametrize("kind, T", [("bfloat16", 3), ("float32", 40)])
def test_batches_of_transposed_views(device, kind, T):
    """[T, G, K] storage as [G, T, K], weights [K, G, N] as [G, K, N]: as latent attention absorbs its projections."""
    G, K, N = 3, 144, 24
    a, b = draw((T, G, K), kind, 1), draw((K, G, N), kind, 2)
    left, right = (device.send(x).transpose(1, 0, 2) for x in (a, b))
    got = device.call("batched_matmul", {"a": left, "b": right})
    assert_bytes(device.fetch(got), oracle.batched_matmul.mirror(a.transpose(1, 0, 2), b.transpose(1, 0, 2)))


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_a_row_has_its_bytes_in_any_batch_and_either_layout(device, kind):
    """A decode step and a prompt: every kernel gives row 0 what the first one gave it."""
    K, N = 528, 72
    a, b = draw((150, K), kind, 1), draw((N, K), kind, 2)
    weights, turned = device.send(b), device.send(np.ascontiguousarray(b.T))
    alone = device.fetch(device.call("matmul_bt", {"a": device.send(a[:1]), "b": weights}))
    for M in (2, 4, 8, 9, 33, 70, 150):
        rows = device.send(a[:M])
        assert_bytes(device.fetch(device.call("matmul_bt", {"a": rows, "b": weights}))[:1], alone, f"{M} rows")
        assert_bytes(device.fetch(device.call("matmul", {"a": rows, "b": turned}))[:1], alone, f"{M} rows, turned")


@pytest.mark.parametrize("settings", [{"_BLOCKS": 0}, {"_DEEP": 1}, {"_SCRATCH": 0}, {"_MANY_COLUMNS": 1}], ids=str)
def test_how_the_work_is_dealt_out_changes_no_byte(device, settings, monkeypatch):
    for name, value in settings.items():
        monkeypatch.setattr(matmul, name, value)
    for M, N, K in ((5, 11, 1040), (20, 130, 1040), (40, 66, 528), (70, 65, 528)):
        a, b = draw((M, K), "bfloat16", M), draw((N, K), "bfloat16", N)
        got = device.call("matmul_bt", {"a": device.send(a), "b": device.send(b)})
        assert_bytes(device.fetch(got), oracle.matmul_bt.mirror(a, b), f"{settings} {M} {N} {K}")


def test_a_capture_asks_for_one_call_before_it(monkeypatch):
    monkeypatch.setattr(matmul, "scratch", Scratch())
    machine = EmulatedRuntime()
    a, b = (machine.empty(shape, np.float32) for shape in ((40, 528), (66, 528)))
    out = machine.empty((40, 66), np.float32)
    machine.in_capture = True
    with runtime.using(machine), pytest.raises(DeviceError, match="call the op once before the capture"):
        matmul.matmul_bt(a, b, out=out)
    assert not machine.launched


def test_out_may_not_overlap_the_operands(device):
    a = device.send(draw((8, 8), "float32", 1))
    with pytest.raises(ContractError, match="memory shared with another"):
        device.call("matmul_bt", {"a": a, "b": device.send(draw((8, 8), "float32", 2)), "out": a})
