"""Marlin's layouts: weights, scales, zero points and biases in the order in which matrix instructions take them.

Weights lie in tiles of 16 rows (32 under 8-bit activations) x 16 columns, 1024 of them in the order of a warp's lanes;
a slice of them is not a slice of the matrix. `vtlab.ops.lowbit` has the orders as formulas.
"""

from __future__ import annotations

from vtlab.ops import lowbit
from vtlab.ops.contract import EXACT, Flag, Parity, Scalar, Tensor, refuse
from vtlab.ops.dtypes import FLOATS
from vtlab.ops.table import op

from .lowbit import BITS, codes_in_range, known_bits, multiple_of, permutation, words
from .wna16 import awq_unpack, codes

ROW = "KERNEL-GEMM-MARLIN-W4A16"
_UTILS = "vllm/model_executor/layers/quantization/utils/marlin_utils.py"
_TESTS = "vllm/model_executor/layers/quantization/utils/marlin_utils_test.py"
_MOVED = {"rounding": ("none: bits are moved",), "parity": Parity("bytes"), "mirror": EXACT, "nan": "none"}
_PERM = Tensor("P", ("int32",), optional=True, values=lambda rng, axes: rng.permutation(axes["P"]))


def _tiles(name: str, axis: int, unit):
    """A check that rows of codes, unit(arguments) words of them, fill whole tiles."""

    def check(arguments, axes):
        size, want = arguments[name].shape[axis], unit(arguments)
        if size % want:
            raise refuse(name, f"shape {tuple(arguments[name].shape)}", f"axis {axis} a multiple of {want}")

    check.__doc__ = f"K of {name} is whole tiles of 16 rows, 32 under 8-bit activations"
    return check


def _tile(arguments) -> int:
    return 32 if arguments["is_a_8bit"] else 16


def _repacked(q, bits, is_a_8bit):
    return lowbit.pack(lowbit.marlin_tiles(q, bits, is_a_8bit), bits, 1)


@op(
    row=ROW,
    args={"b_q_weight": words("W", "N"), "perm": _PERM, "bits": BITS, "is_a_8bit": Flag()},
    returns={"out": Tensor("W*2/bits N*bits/2", ("int32",))},
    layout="32-row tiles in flat order too, in the shape of 16-row ones",
    upstream=f"vllm/_custom_ops.py: gptq_marlin_repack; {_TESTS}: marlin_weights",
    examples=(
        {"W": 4, "N": 128, "bits": 4, "P": 32, "perm": "int32"},
        {"W": 8, "N": 64, "bits": 8, "is_a_8bit": True},
        {"W": 4, "N": 64, "bits": 4, "is_a_8bit": True},
    ),
    requires=(
        known_bits(4, 8),
        multiple_of("b_q_weight", 1, 64),
        _tiles("b_q_weight", 0, lambda call: _tile(call) * call["bits"] // 32),
        permutation("perm", lambda call: call["b_q_weight"].shape[0] * 32 // call["bits"]),
    ),
    **_MOVED,
)
def gptq_marlin_repack(nx, b_q_weight, perm=None, *, bits, is_a_8bit=False):
    """Words of q[perm] in Marlin's order: out = pack(reorder(tiles(unpack(b_q_weight)[perm]))).

    Shapes: b_q_weight int32 [K * bits / 32, N], packed along K; perm int32 [K], of activation order; out int32
    [K / 16, N * bits / 2].
    Rounding points: none.
    Errors: ContractError for bits other than 4 and 8, K no whole tiles, N no multiple of 64, a perm that is no
    permutation.
    Source: vllm/_custom_ops.py, gptq_marlin_repack; marlin_utils_test.py, marlin_weights.
    """
    q = lowbit.unpack(b_q_weight, bits, 0)
    return _repacked(q if perm is None else q[perm], bits, is_a_8bit)


@op(
    row=ROW,
    args={"b_q_weight": words("K", "W"), "bits": BITS, "is_a_8bit": Flag()},
    returns={"out": Tensor("K/16 W*16", ("int32",))},
    upstream="vllm/_custom_ops.py: awq_marlin_repack",
    examples=({"K": 32, "W": 16, "bits": 4}, {"K": 32, "W": 16, "bits": 8, "is_a_8bit": True}),
    requires=(
        known_bits(4, 8),
        _tiles("b_q_weight", 0, _tile),
        _tiles("b_q_weight", 1, lambda call: 2 * call["bits"]),
    ),
    **_MOVED,
)
def awq_marlin_repack(nx, b_q_weight, *, bits=4, is_a_8bit=False):
    """Words of an AWQ weight in Marlin's order.

    Shapes: b_q_weight int32 [K, N * bits / 32], interleaved along N; out int32 [K / 16, N * bits / 2].
    Rounding points: none.
    Errors: ContractError for bits other than 4 and 8, a K of no whole tiles, an N that is no multiple of 64.
    Source: vllm/_custom_ops.py, awq_marlin_repack.
    """
    return _repacked(awq_unpack.body(nx, b_q_weight, bits=bits), bits, is_a_8bit)


@op(
    row=ROW,
    args={"b_q_weight": words("R", "C"), "bits": BITS, "is_a_8bit": Flag()},
    returns={"q": Tensor("R*16 C*2/bits", ("int32",))},
    upstream="vllm/_custom_ops.py: gptq_marlin_repack, undone",
    examples=({"R": 2, "C": 256, "bits": 4}, {"R": 2, "C": 256, "bits": 8, "is_a_8bit": True}),
    requires=(
        known_bits(4, 8),
        _tiles("b_q_weight", 0, lambda call: 2 if call["is_a_8bit"] else 1),
        _tiles("b_q_weight", 1, lambda call: 32 * call["bits"]),
    ),
    **_MOVED,
)
def marlin_unpack(nx, b_q_weight, *, bits, is_a_8bit=False):
    """q[k, n] of words in Marlin's order: the inverse of gptq_marlin_repack without a perm.

    Shapes: b_q_weight int32 [K / 16, N * bits / 2]; q int32 [K, N].
    Rounding points: none.
    Errors: ContractError for bits other than 4 and 8, words of no whole tiles or of an N that is no multiple of 64.
    Source: vllm/_custom_ops.py, gptq_marlin_repack.
    """
    return lowbit.marlin_rows(lowbit.unpack(b_q_weight, bits, 1), bits, is_a_8bit)


def _scale_order(size_k, group_size, is_a_8bit):
    return lowbit.MARLIN_GROUPED if -1 < group_size < size_k and not is_a_8bit else lowbit.MARLIN_SINGLE


def _columns_fit(arguments, axes):
    """N is a multiple of 64, of 32 for one group of a column or 8-bit activations"""
    unit = len(_scale_order(arguments["size_k"], arguments["group_size"], arguments["is_a_8bit"]))
    if axes["N"] % unit:
        raise refuse("s", f"N = {axes['N']}", f"a multiple of {unit}")


def _groups_fit(arguments, axes):
    """s has size_k / group_size rows, one for group_size -1"""
    size, k = arguments["group_size"], arguments["size_k"]
    if size == 0 or (size != -1 and k % size):
        raise refuse("group_size", size, f"-1, or a divisor of size_k = {k}")
    want = 1 if size == -1 else k // size
    if axes["G"] != want:
        raise refuse("s", f"{axes['G']} groups", f"{want}")


@op(
    row=ROW,
    args={
        "s": Tensor("G N"),
        "size_k": Scalar(int, minimum=1),
        "group_size": Scalar(int, minimum=-1),
        "is_a_8bit": Flag(),
    },
    returns={"out": Tensor("G N", like="s")},
    upstream=f"{_UTILS}: marlin_permute_scales",
    examples=(
        {"G": 2, "N": 128, "size_k": 64, "group_size": 32, "s": "bfloat16"},
        {"G": 1, "N": 96, "size_k": 64, "group_size": -1, "s": "float16"},
        {"G": 2, "N": 64, "size_k": 64, "group_size": 32, "is_a_8bit": True, "s": "float32"},
    ),
    requires=(_groups_fit, _columns_fit),
    **{**_MOVED, "nan": "moved, payload and all"},
)
def marlin_permute_scales(nx, s, *, size_k, group_size, is_a_8bit=False):
    """Of each 64 columns out[8 i + j] = s[i + 8 j]; of one group, of each 32 out[8 i + 2 j + d] = s[2 i + 8 j + d].

    Shapes: s [size_k / group_size, N], or [1, N] for -1; out [G, N]. Twice leads back.
    Rounding points: none.
    Errors: ContractError for another number of groups, N no multiple of 64 (of 32, where a column has one scale or
    activations have 8 bits).
    Source: vllm/model_executor/layers/quantization/utils/marlin_utils.py, marlin_permute_scales.
    """
    return lowbit.reordered(s, _scale_order(size_k, group_size, is_a_8bit))


@op(
    row=ROW,
    args={"s": Tensor("... N", FLOATS)},
    returns={"out": Tensor("... N", like="s")},
    upstream=f"{_UTILS}: marlin_permute_bias",
    examples=({"...": (), "N": 64, "s": "bfloat16"}, {"...": (2,), "N": 32, "s": "float16"}),
    requires=(multiple_of("s", -1, 32),),
    **{**_MOVED, "nan": "moved, payload and all"},
)
def marlin_permute_bias(nx, s):
    """Of each 32 columns out[8 i + 2 j + d] = s[2 i + 8 j + d].

    Shapes: s, out [..., N]. Twice leads back.
    Rounding points: none.
    Errors: ContractError for an N that is no multiple of 32.
    Source: vllm/model_executor/layers/quantization/utils/marlin_utils.py, marlin_permute_bias.
    """
    return lowbit.reordered(s, lowbit.MARLIN_SINGLE)


@op(
    row=ROW,
    args={"zp": codes("G N"), "bits": BITS, "is_a_8bit": Flag()},
    returns={"out": Tensor("G N*bits/32", ("int32",))},
    upstream=f"{_UTILS}: marlin_zero_points",
    examples=(
        {"G": 2, "N": 64, "bits": 4},
        {"G": 1, "N": 128, "bits": 8},
        {"G": 2, "N": 64, "bits": 4, "is_a_8bit": True},
    ),
    requires=(known_bits(4, 8), multiple_of("zp", 1, 64), codes_in_range("zp")),
    **_MOVED,
)
def marlin_zero_points(nx, zp, *, bits, is_a_8bit=False):
    """Zero points as scales of groups lie, interleaved as codes are but for 8-bit activations, packed along N.

    Shapes: zp int32 [G, N]; out int32 [G, N * bits / 32].
    Rounding points: none.
    Errors: ContractError for bits other than 4 and 8, an N that is no multiple of 64, a zero point out of range.
    Source: vllm/model_executor/layers/quantization/utils/marlin_utils.py, marlin_zero_points.
    """
    ordered = lowbit.reordered(zp, lowbit.MARLIN_GROUPED)
    return lowbit.pack(ordered if is_a_8bit else lowbit.reordered(ordered, lowbit.interleave(bits)), bits, 1)


@op(
    row=ROW,
    args={"q_zp_packed": words("G", "W"), "bits": BITS, "is_a_8bit": Flag()},
    returns={"out": Tensor("G W", ("int32",))},
    upstream=f"{_UTILS}: awq_to_marlin_zero_points",
    examples=({"G": 2, "W": 8, "bits": 4}, {"G": 1, "W": 16, "bits": 8, "is_a_8bit": True}),
    requires=(known_bits(4, 8), _tiles("q_zp_packed", 1, lambda call: 2 * call["bits"])),
    **_MOVED,
)
def awq_to_marlin_zero_points(nx, q_zp_packed, *, bits=4, is_a_8bit=False):
    """AWQ's interleaved zero points as marlin_zero_points gives them.

    Shapes: q_zp_packed, out int32 [G, N * bits / 32].
    Rounding points: none.
    Errors: ContractError for bits other than 4 and 8, an N that is no multiple of 64.
    Source: vllm/model_executor/layers/quantization/utils/marlin_utils.py, awq_to_marlin_zero_points.
    """
    return marlin_zero_points.body(nx, awq_unpack.body(nx, q_zp_packed, bits=bits), bits=bits, is_a_8bit=is_a_8bit)


@op(
    row=ROW,
    args={"packed": words("G", "W"), "bits": BITS, "is_a_8bit": Flag()},
    returns={"zp": Tensor("G W*32/bits", ("int32",))},
    upstream=f"{_UTILS}: marlin_zero_points, undone",
    examples=({"G": 2, "W": 8, "bits": 4}, {"G": 1, "W": 16, "bits": 8, "is_a_8bit": True}),
    requires=(known_bits(4, 8), _tiles("packed", 1, lambda call: 2 * call["bits"])),
    **_MOVED,
)
def marlin_unpack_zero_points(nx, packed, *, bits, is_a_8bit=False):
    """The inverse of marlin_zero_points.

    Shapes: packed int32 [G, N * bits / 32]; zp int32 [G, N].
    Rounding points: none.
    Errors: ContractError for bits other than 4 and 8, an N that is no multiple of 64.
    Source: vllm/model_executor/layers/quantization/utils/marlin_utils.py, marlin_zero_points.
    """
    zp = lowbit.unpack(packed, bits, 1)
    zp = zp if is_a_8bit else lowbit.reordered(zp, lowbit.inverse(lowbit.interleave(bits)))
    return lowbit.reordered(zp, lowbit.MARLIN_GROUPED)
