"""Splits at the shapes of Qwen3 (32 and 8 heads of 128) and of Qwen3.5's linear and gated attention layers."""

from __future__ import annotations

import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

TOKENS = [1, 1024]


def own(*parts):
    return tuple(part.contiguous().clone() for part in parts)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_qkv_split(benchmark, side, T):
    def ours(qkv):
        return oracle.qkv_split(qkv, q_size=4096, k_size=1024, v_size=1024)

    compare(benchmark, side, f"qkv_split {T}x6144 bf16", ours, lambda qkv: own(*qkv.split((4096, 1024, 1024), -1)),
            normal(T, 6144))  # fmt: skip


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_gdn_conv_split(benchmark, side, T):
    def ours(conv):
        return oracle.gdn_conv_split(conv, key_dim=2048)

    compare(benchmark, side, f"gdn_conv_split {T}x10240 bf16", ours,
            lambda conv: own(*conv.split((2048, 2048, 6144), -1)), normal(T, 10240))  # fmt: skip


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_attn_gate_split(benchmark, side, T):
    def ours(qgate):
        return oracle.attn_gate_split(qgate, head_dim=256)

    def peer(qgate):
        return own(*qgate.view(len(qgate), 24, 2, 256).unbind(2))

    compare(benchmark, side, f"attn_gate_split {T}x24x512 bf16", ours, peer, normal(T, 24 * 512))
