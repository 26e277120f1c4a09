"""Activation order: rows sorted by their group, the activations' columns with them, exllama's shuffled words."""

from __future__ import annotations

import numpy as np

from vtlab.ops import lowbit
from vtlab.ops.contract import EXACT, Parity, Tensor, refuse
from vtlab.ops.dtypes import FLOATS
from vtlab.ops.table import op

from .lowbit import BITS, known_bits, permutation, whole_runs, words
from .wna16 import ROW, codes

_UTILS = "vllm/model_executor/layers/quantization/utils/quant_utils.py"
_PERM = Tensor("P", ("int32",), optional=True, values=lambda rng, axes: rng.permutation(axes["P"]))


def _groups_are_no_less_than_zero(arguments, axes):
    """g_idx is not negative"""
    g_idx = arguments["g_idx"]
    if isinstance(g_idx, np.ndarray) and g_idx.size and g_idx.min() < 0:
        raise refuse("g_idx", f"group {g_idx.min()}", ">= 0")


@op(
    row=ROW,
    args={
        "q": codes(),
        "g_idx": Tensor("K", ("int32",), values=lambda rng, axes: rng.permutation(axes["K"]) // 8),
    },
    returns={
        "q_sorted": Tensor("K N", ("int32",)),
        "g_idx_sorted": Tensor("K", ("int32",)),
        "perm": Tensor("K", ("int32",)),
    },
    rounding=("none: rows are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="none",
    ties="rows of one group keep their order; torch.argsort upstream promises no order of them",
    upstream=f"{_UTILS}: sort_weights",
    examples=({"K": 32, "N": 3}, {"K": 8, "N": 1}),
    requires=(_groups_are_no_less_than_zero,),
)
def sort_weights(nx, q, g_idx):
    """perm = the stable order of g_idx; q_sorted[i] = q[perm[i]], g_idx_sorted[i] = g_idx[perm[i]].

    Shapes: q int32 [K, N]; g_idx int32 [K], the group of every row; results of the same shapes, perm int32 [K].
    Rounding points: none.
    Errors: ContractError for a negative group.
    Source: vllm/model_executor/layers/quantization/utils/quant_utils.py, sort_weights.
    """
    perm = np.argsort(g_idx, kind="stable").astype(np.int32)
    return q[perm], g_idx[perm], perm


@op(
    row=ROW,
    rows="M",
    args={
        "x": Tensor("M K", (*FLOATS, "int32")),
        "perm": Tensor("K", ("int32",), values=lambda rng, axes: rng.permutation(axes["K"])),
    },
    returns={"out": Tensor("M K", like="x")},
    rounding=("none: columns are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="moved, payload and all",
    upstream="vllm/_custom_ops.py: permute_cols",
    examples=({"M": 3, "K": 16, "x": "bfloat16"}, {"M": 1, "K": 5, "x": "float32"}),
    requires=(permutation("perm", lambda arguments: arguments["x"].shape[1]),),
)
def permute_cols(nx, x, perm):
    """out[m, j] = x[m, perm[j]]: the activations of weights whose rows were sorted by perm.

    Shapes: x [M, K]; perm int32 [K]; out [M, K].
    Rounding points: none.
    Errors: ContractError for a perm that names a column twice or one that is not there.
    Source: vllm/_custom_ops.py, permute_cols.
    """
    return np.take(x, perm, axis=1)


def rows_of(arguments) -> int:
    """K of words packed along it."""
    return arguments["qweight"].shape[0] * 32 // arguments["bits"]


@op(
    row=ROW,
    args={"qweight": words("W", "N"), "q_perm": _PERM, "bits": BITS},
    returns={"out": Tensor("W N", ("int32",))},
    rounding=("none: bits are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="none",
    layout="codes 2i from bit 0 up, codes 2i + 1 from bit 16 up; of 3 bits, two codes in the bits 15 and 31 left over",
    upstream="vllm/_custom_ops.py: gptq_shuffle",
    examples=(
        {"W": 4, "N": 3, "bits": 4, "P": 32, "q_perm": "int32"},
        {"W": 3, "N": 2, "bits": 3},
        {"W": 2, "N": 2, "bits": 2},
        {"W": 2, "N": 2, "bits": 8, "P": 8, "q_perm": "int32"},
    ),
    requires=(
        known_bits(*lowbit.BITS),
        whole_runs("qweight", 0, packed=True),
        permutation("q_perm", rows_of),
    ),
)
def gptq_shuffle(nx, qweight, q_perm=None, *, bits):
    """out = the words of rows q_perm[0], q_perm[1] ... with each run's even codes in low halves, its odd in high ones.

    Shapes: qweight int32 [W, N], packed along K; q_perm int32 [K], that of sort_weights; out int32 [W, N].
    Rounding points: none.
    Errors: ContractError for other bits, of 3 bits a W that is no multiple of three, a q_perm that is no permutation.
    Source: vllm/_custom_ops.py, gptq_shuffle, which writes over its argument; exllamav2's layouts.
    """
    if q_perm is not None:
        qweight = lowbit.pack(lowbit.unpack(qweight, bits, 0)[q_perm], bits, 0)
    return lowbit.move_bits(qweight, lowbit.shuffle(bits), lowbit.run_length(bits) * bits // 32)


@op(
    row=ROW,
    args={"qweight": words("W", "N"), "q_perm": _PERM, "bits": BITS},
    returns={"out": Tensor("W N", ("int32",))},
    rounding=("none: bits are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="none",
    upstream="vllm/_custom_ops.py: gptq_shuffle, undone",
    examples=({"W": 4, "N": 3, "bits": 4, "P": 32, "q_perm": "int32"}, {"W": 3, "N": 2, "bits": 3}),
    requires=(
        known_bits(*lowbit.BITS),
        whole_runs("qweight", 0, packed=True),
        permutation("q_perm", rows_of),
    ),
)
def gptq_unshuffle(nx, qweight, q_perm=None, *, bits):
    """The words that gptq_shuffle made `qweight` of.

    Shapes: qweight int32 [W, N]; q_perm int32 [K]; out int32 [W, N].
    Rounding points: none.
    Errors: as gptq_shuffle's.
    Source: vllm/_custom_ops.py, gptq_shuffle.
    """
    moves = [(b, a) for a, b in lowbit.shuffle(bits)]
    words = lowbit.move_bits(qweight, moves, lowbit.run_length(bits) * bits // 32)
    if q_perm is None:
        return words
    return lowbit.pack(lowbit.unpack(words, bits, 0)[lowbit.inverse(q_perm)], bits, 0)
