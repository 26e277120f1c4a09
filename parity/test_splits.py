"""Splits against index arithmetic, one element at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError

from .compare import assert_bytes
from .goldens import op_cases
from .harness import case, checks, mutations
from .scalar import draw

F32 = np.float32
QUICK = settings(max_examples=15, deadline=None, derandomize=True)
LAYOUTS = [
    case(T=T, kind=kind, padded=padded) for T in (0, 1, 5) for kind in ("float32", "bfloat16") for padded in (0, 3)
]


def packed(case, width, seed):
    """[T, width] in rows that are `padded` elements longer, NaN in the padding."""
    wide = draw((case.T, width + case.padded), case.kind, seed)
    wide[:, width:] = np.nan
    return wide[:, :width]


def assert_own(part, source, shape):
    """A result is contiguous, of this shape, and in memory of its own."""
    assert part.shape == shape and part.flags.c_contiguous and part.flags.owndata
    assert part.dtype == source.dtype and not np.shares_memory(part, source)


@checks("qkv_split", cases=LAYOUTS)
def test_qkv_split_element_by_element(case):
    for dq, dk, dv in ((8, 4, 4), (6, 2, 3), (5, 0, 1)):
        qkv = packed(case, dq + dk + dv, 1)
        for run in (oracle.qkv_split, oracle.qkv_split.mirror):
            parts = run(qkv, q_size=dq, k_size=dk, v_size=dv)
            for part, start, width in zip(parts, (0, dq, dq + dk), (dq, dk, dv)):
                assert_own(part, qkv, (case.T, width))
                for t in range(case.T):
                    for i in range(width):
                        assert_bytes(part[t, i], qkv[t, start + i])


@checks("qkv_split")
@QUICK
@given(st.lists(st.integers(0, 9), min_size=3, max_size=3), st.integers(0, 4))
def test_concatenating_the_parts_gives_the_whole(widths, T):
    qkv = draw((T, 2, sum(widths)), "bfloat16", T)
    parts = oracle.qkv_split(qkv, q_size=widths[0], k_size=widths[1], v_size=widths[2])
    assert_bytes(np.concatenate(parts, axis=-1), qkv)


@checks("gdn_conv_split", cases=LAYOUTS)
def test_gdn_conv_split_is_a_qkv_split_of_equal_keys(case):
    for kd, vd in ((4, 6), (3, 0), (0, 2)):
        conv = packed(case, 2 * kd + vd, 2)
        for run in (oracle.gdn_conv_split, oracle.gdn_conv_split.mirror):
            for part, start, width in zip(run(conv, key_dim=kd), (0, kd, 2 * kd), (kd, kd, vd)):
                assert_own(part, conv, (case.T, width))
                for i in range(width):
                    assert_bytes(part[:, i], conv[:, start + i])


@checks("attn_gate_split", cases=LAYOUTS)
def test_attn_gate_split_element_by_element(case):
    for heads, D in ((3, 4), (1, 2), (2, 1)):
        qgate = packed(case, heads * 2 * D, 3)
        for run in (oracle.attn_gate_split, oracle.attn_gate_split.mirror):
            q, gate = run(qgate, head_dim=D)
            assert_own(q, qgate, (case.T, heads, D))
            assert_own(gate, qgate, (case.T, heads, D))
            for h in range(heads):
                for d in range(D):
                    assert_bytes(q[:, h, d], qgate[:, h * 2 * D + d])
                    assert_bytes(gate[:, h, d], qgate[:, h * 2 * D + D + d])


@checks("attn_gate_split")
def test_attn_gate_split_against_vllm():
    for golden in op_cases("gates", "attn_gate_split"):
        for part, name in zip(oracle.attn_gate_split(**golden.call()), ("q", "gate")):
            assert_bytes(part, golden.outputs[name], str(golden))


X = np.zeros((2, 12), F32)
REFUSED = {
    "qkv_split": [
        ("qkv", X, {"q_size": 4, "k_size": 4, "v_size": 3}),
        ("qkv", X, {"q_size": 4, "k_size": 4, "v_size": 5}),
        ("q_size", X, {"q_size": -4, "k_size": 8, "v_size": 8}),
        ("k_size", X, {"q_size": 4, "k_size": 4.0, "v_size": 4}),
        ("v_size", X, {"q_size": 4, "k_size": 4}),
        ("qkv", X[:, ::-1], {"q_size": 4, "k_size": 4, "v_size": 4}),
        ("qkv", X.astype(np.int8), {"q_size": 4, "k_size": 4, "v_size": 4}),
    ],
    "gdn_conv_split": [("key_dim", X, {"key_dim": 7}), ("key_dim", X, {"key_dim": -1}), ("key_dim", X, {})],
    "attn_gate_split": [
        ("qgate", X, {"head_dim": 4}),
        ("qgate", X, {"head_dim": 12}),
        ("head_dim", X, {"head_dim": 0}),
        ("qgate", X[0], {"head_dim": 3}),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_splits_refuse(name):
    for argument, packed_tensor, kwargs in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            getattr(oracle, name)(packed_tensor, **kwargs)
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


mutations("qkv_split", {
    "q comes last": ("qkv[..., :q_size].copy()", "qkv[..., k_size + v_size :].copy()"),
    "k one lane late": ("middle = q_size + k_size", "middle = q_size + k_size + 1"),
    "views instead of copies": ("qkv[..., middle:].copy()", "qkv[..., middle:]"),
})  # fmt: skip
mutations("gdn_conv_split", {
    "k is q": ("conv[..., key_dim : 2 * key_dim]", "conv[..., :key_dim]"),
    "v after one key": ("conv[..., 2 * key_dim :]", "conv[..., key_dim : conv.shape[-1] - key_dim]"),
    "a view of q": ("conv[..., :key_dim].copy()", "conv[..., :key_dim]"),
})  # fmt: skip
mutations("attn_gate_split", {
    "swap q and gate": ("heads[:, :, 0].copy(), heads[:, :, 1].copy()", "heads[:, :, 1].copy(), heads[:, :, 0].copy()"),
    "all q, then all gates": ("qgate.shape[-1] // (2 * head_dim), 2, head_dim)",
                              "2, qgate.shape[-1] // (2 * head_dim), head_dim).swapaxes(1, 2)"),
    "interleaved lanes": ("(2 * head_dim), 2, head_dim)", "(2 * head_dim), head_dim, 2).swapaxes(2, 3)"),
    "a view of the gate": ("heads[:, :, 1].copy()", "heads[:, :, 1]"),
})  # fmt: skip
