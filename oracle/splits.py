"""Splits of packed projections into their parts: all copies, contiguous, sharing no memory with the packed tensor."""

from __future__ import annotations

from vtlab.ops.contract import EXACT, Parity, Scalar, Tensor, refuse
from vtlab.ops.table import op

_ROW = "KERNEL-EW-NORM-ACT"
_FREE = "the packed tensor may have strided rows; the results are contiguous copies"


def _width(axis):
    return Scalar(int, minimum=0, axis=axis)


@op(
    row=_ROW,
    args={
        "qkv": Tensor("... dq+dk+dv", layout="rows"),
        "q_size": _width("dq"),
        "k_size": _width("dk"),
        "v_size": _width("dv"),
    },
    returns={
        "q": Tensor("... dq", like="qkv"),
        "k": Tensor("... dk", like="qkv"),
        "v": Tensor("... dv", like="qkv"),
    },
    rounding=("none: bytes are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="copied",
    layout=_FREE,
    upstream="torch.split of the merged qkv projection, e.g. vllm/model_executor/models/llama.py",
    examples=(
        {"...": (5,), "dq": 64, "dk": 32, "dv": 32, "qkv": "bfloat16"},
        {"...": (2, 3), "dq": 7, "dk": 1, "dv": 0},
    ),
)  # fmt: skip
def qkv_split(nx, qkv, *, q_size, k_size, v_size):
    """q, k, v = qkv[..., :q_size], qkv[..., q_size:q_size + k_size], qkv[..., q_size + k_size:].

    Shapes: qkv [..., q_size + k_size + v_size]; q, k, v contiguous, in qkv's dtype, in memory of their own.
    Rounding points: none.
    Errors: ContractError where the three widths do not add up to the last axis.
    Source: torch.split.
    """
    middle = q_size + k_size
    return qkv[..., :q_size].copy(), qkv[..., q_size:middle].copy(), qkv[..., middle:].copy()


def _keys_fit(arguments, axes):
    """two key widths fit into the last axis"""
    if 2 * axes["kd"] > axes["C"]:
        raise refuse("key_dim", axes["kd"], f"2 * key_dim <= {axes['C']}, the last axis of conv")


@op(
    row=_ROW,
    args={"conv": Tensor("... C", layout="rows"), "key_dim": Scalar(int, minimum=0, axis="kd", example=4)},
    returns={
        "q": Tensor("... kd", like="conv"),
        "k": Tensor("... kd", like="conv"),
        "v": Tensor("... vd", like="conv"),
    },
    rounding=("none: bytes are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="copied",
    layout=_FREE,
    upstream="torch.split in vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py",
    examples=({"...": (5,), "C": 128, "key_dim": 32, "conv": "bfloat16"}, {"...": (1,), "C": 8, "key_dim": 4}),
    requires=(_keys_fit,),
)
def gdn_conv_split(nx, conv, *, key_dim):
    """q, k, v = conv[..., :key_dim], conv[..., key_dim:2 * key_dim], conv[..., 2 * key_dim:].

    Shapes: conv [..., 2 * key_dim + vd]; q, k [..., key_dim]; v [..., vd]; contiguous, in memory of their own.
    Rounding points: none.
    Errors: ContractError for 2 * key_dim beyond the last axis.
    Source: vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py.
    """
    return conv[..., :key_dim].copy(), conv[..., key_dim : 2 * key_dim].copy(), conv[..., 2 * key_dim :].copy()


def _whole_heads(arguments, axes):
    """the last axis holds whole heads of 2 * head_dim"""
    if axes["C"] % (2 * axes["D"]):
        raise refuse("qgate", f"a last axis of {axes['C']}", f"a multiple of 2 * head_dim = {2 * axes['D']}")


@op(
    row=_ROW,
    args={"qgate": Tensor("T C", layout="rows"), "head_dim": Scalar(int, minimum=1, axis="D", example=8)},
    returns={"q": Tensor("T Hq D", like="qgate"), "gate": Tensor("T Hq D", like="qgate")},
    rounding=("none: bytes are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="copied",
    layout=_FREE,
    upstream="vllm/model_executor/models/qwen3_next.py: Qwen3NextAttention, attn_output_gate",
    examples=({"T": 5, "C": 4 * 32, "head_dim": 16, "qgate": "bfloat16"}, {"T": 0, "C": 16, "head_dim": 8}),
    requires=(_whole_heads,),
)
def attn_gate_split(nx, qgate, *, head_dim):
    """q[t, h], gate[t, h] = the two halves of head h's 2 * head_dim lanes: packed per head as [q | gate].

    Shapes: qgate [T, Hq * 2 * head_dim]; q, gate [T, Hq, head_dim], contiguous, in memory of their own.
    Rounding points: none.
    Errors: ContractError for a last axis that is no multiple of 2 * head_dim.
    Source: vllm/model_executor/models/qwen3_next.py, Qwen3NextAttention.
    """
    heads = qgate.reshape(len(qgate), qgate.shape[-1] // (2 * head_dim), 2, head_dim)
    return heads[:, :, 0].copy(), heads[:, :, 1].copy()
