"""What DeepGEMM's grouped products need around them: tokens in their experts' rows and back, the activation in between.

Rows of one expert stand together, in segments of whole `alignment` rows; a segment's last rows belong to nobody, and
their number in m_indices is -1.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops.contract import EXACT, Bound, Flag, Parity, Scalar, Tensor, refuse
from vtlab.ops.table import op

from .fp8_casts import ceil_power_of_two
from .fp8_matmul import draw_codes
from .kv_cache import apart, takes_writes
from .quant_fp8 import e4m3, in_groups, largest, lay_out, single

_ROW = "KERNEL-GEMM-DEEPGEMM"
_BATCHED = "vllm/model_executor/layers/fused_moe/experts/batched_deep_gemm_moe.py"
_UTILS = "vllm/model_executor/layers/fused_moe/deep_gemm_utils.py"
BLOCK = 128
_CODES = ("uint8",)
_LEAST = float(np.float32(1e-10))
_RECIPROCAL = float(np.float32(1 / 448))


def local_experts(topk_ids, expert_map) -> np.ndarray:
    """[T * k]: the expert of each choice, -1 for none."""
    ids = topk_ids.reshape(-1).astype(np.int64)
    return ids if expert_map is None else np.where(ids < 0, -1, expert_map[np.maximum(ids, 0)])


def segments(local, experts: int, alignment: int) -> np.ndarray:
    """[E + 1]: where each expert's rows start, and where the last one's end."""
    counts = np.bincount(local[local >= 0], minlength=experts)
    return np.concatenate([[0], np.cumsum(-(-counts // alignment) * alignment)])


def _experts_exist(arguments, axes):
    """experts from -1 (none) to the last one, in topk_ids and in expert_map; on a GPU the host does not read them, and
    others count as none"""
    ids, known, experts = arguments["topk_ids"], arguments["expert_map"], arguments["num_experts"]
    for name, value, most in (
        ("topk_ids", ids, experts if known is None else len(known)),
        ("expert_map", known, experts),
    ):
        if isinstance(value, np.ndarray) and value.size and not -1 <= int(value.min()) <= int(value.max()) < most:
            raise refuse(name, f"experts from {int(value.min())} to {int(value.max())}", f"-1 to {most - 1}")


def _rows_suffice(arguments, axes):
    """`a` has a row for each that the experts' segments have; on a GPU what has none is left out"""
    ids, known = arguments["topk_ids"], arguments["expert_map"]
    if isinstance(ids, np.ndarray):
        need = segments(local_experts(ids, known), arguments["num_experts"], arguments["alignment"])[-1]
        if need > axes["R"]:
            raise refuse("a", f"{axes['R']} rows", f"at least {need}")


def _written_apart(arguments, axes):
    """what is written is no other argument's memory"""
    for name in ("a", "a_scale"):
        takes_writes(name, arguments[name])
        for other in ("x", "x_scale", "a"):
            if other != name:
                apart(name, other, arguments)


def _draw_ids(rng, axes):
    """Any expert, and none for the first choice of the last token."""
    ids = rng.integers(0, axes.get("N", axes["num_experts"]), (axes["T"], axes["k"]))
    ids[-1:, :1] = -1
    return ids


def scattered(a, a_scale, x, scales, topk_ids, expert_map, num_experts, alignment):
    """Write x's rows and scales' where their experts' rows are; (m_indices, inv_perm)."""
    local = local_experts(topk_ids, expert_map)
    starts = segments(local, num_experts, alignment)
    inverse, m_indices = np.full(local.size, -1, np.int32), np.full(len(a), -1, np.int32)
    for expert in np.unique(local[local >= 0]):
        mine = np.flatnonzero(local == expert)
        inverse[mine] = starts[expert] + np.arange(mine.size)
        m_indices[inverse[mine]] = expert
    chosen = np.flatnonzero(local >= 0)
    token = chosen // max(topk_ids.shape[1], 1)
    a[inverse[chosen]], a_scale[inverse[chosen]] = x[token], scales[token]
    return m_indices, inverse.reshape(topk_ids.shape)


_SCATTERED = {
    "a": Tensor("R H", _CODES, values="zeros", holds="float8_e4m3fn"),
    "a_scale": Tensor("R G", ("float32",), layout="any", values="zeros"),
    "x": Tensor("T H", _CODES, layout="rows", values=draw_codes("T", "H"), holds="float8_e4m3fn"),
    "x_scale": Tensor("T G", ("float32",), layout="any", values="positive"),
    "topk_ids": Tensor("T k", ("int32", "int64"), values=_draw_ids),
    "expert_map": Tensor("N", ("int32",), optional=True,
                         values=lambda rng, axes: rng.permutation(axes["N"]) % (axes["num_experts"] + 1) - 1),
    "num_experts": Scalar(int, minimum=1, axis="num_experts", example=3),
    "alignment": Scalar(int, minimum=1),
}  # fmt: skip


@op(
    row=_ROW,
    args=_SCATTERED,
    returns={"m_indices": Tensor("R", ("int32",)), "inv_perm": Tensor("T k", ("int32",))},
    rounding=("none: bytes are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="moved like any code",
    ties="rows of an expert: tokens ascending, then choices; upstream's are in no order",
    layout="a_scale and x_scale: any strides, such as columns of neighbours",
    mutates=("a", "a_scale"),
    upstream=f"{_UTILS}: ep_scatter, of deepgemm_moe_permute",
    examples=(
        {"R": 24, "H": 16, "G": 2, "T": 5, "k": 2, "num_experts": 3, "alignment": 4},
        {"R": 32, "H": 8, "G": 1, "T": 6, "k": 3, "num_experts": 4, "alignment": 8, "topk_ids": "int64", "N": 7,
         "expert_map": "int32"},
        {"R": 8, "H": 8, "G": 1, "T": 0, "k": 2, "num_experts": 2, "alignment": 8},
    ),
    requires=(_experts_exist, _rows_suffice, _written_apart),
)  # fmt: skip
def ep_scatter(nx, a, a_scale, x, x_scale, topk_ids, expert_map=None, *, num_experts, alignment=BLOCK):
    """a[inv_perm[t, r]] = x[t], its scales too, and m_indices there the expert of topk_ids[t, r]; -1 elsewhere.

    Shapes: a uint8 [R, H] and a_scale float32 [R, G], which are written in place; x uint8 [T, H], x_scale float32
    [T, G]; topk_ids [T, k], -1 for none; expert_map int32 [N] gives the number here of each expert, -1 for those that
    live elsewhere, or None; m_indices int32 [R]; inv_perm int32 [T, k], -1 where there is no expert.
    Segments of experts 0 to num_experts - 1 follow each other, each filled up to a multiple of `alignment`; rows of a
    and a_scale that nobody has stay as they are. R may be larger than the segments need: T k + min(T k, num_experts)
    * (alignment - 1) always suffices.
    Rounding points: none.
    Errors: ContractError for an expert that there is not, too few rows, mismatched shapes, memory written and read.
    Source: vLLM's ep_scatter, which is given the counts of the experts' tokens; here they are those of topk_ids.
    """
    return scattered(a, a_scale, x, x_scale, topk_ids, expert_map, num_experts, alignment)


def _whole_words(arguments, axes):
    """a_scale has a word for every four groups"""
    if axes["P"] != -(-axes["G"] // 4):
        raise refuse("a_scale", f"{axes['P']} words for {axes['G']} groups", str(-(-axes["G"] // 4)))


def exponent_words(x_scale) -> np.ndarray:
    """int32 [T, P] of exponents uint8 [T, G]: byte j of word p is group 4 p + j's, 0 past the last."""
    tokens, groups = x_scale.shape
    exponents = np.zeros((tokens, -(-groups // 4) * 4), np.uint8)
    exponents[:, :groups] = x_scale
    return exponents.view("<i4")


@op(
    row=_ROW,
    args={
        **_SCATTERED,
        "a_scale": Tensor("R P", ("int32",), layout="any", values="zeros"),
        "x_scale": Tensor("T G", _CODES, layout="any",
                          values=lambda rng, axes: rng.integers(0, 256, (axes["T"], axes["G"]))),
    },
    returns={"m_indices": Tensor("R", ("int32",)), "inv_perm": Tensor("T k", ("int32",))},
    rounding=("none: bytes are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="moved like any code, exponents of 255 too",
    ties="rows of an expert: tokens ascending, then choices; upstream's are in no order",
    layout="a_scale: any strides, upstream's are (4, 4 R) with R rounded up to fours; byte j of word p is the exponent "
    "of group 4 p + j, 0 past the last",
    mutates=("a", "a_scale"),
    upstream=f"{_UTILS}: ep_scatter with pack_ue8m0, of deepgemm_moe_permute",
    examples=(
        {"R": 24, "H": 16, "G": 6, "P": 2, "T": 5, "k": 2, "num_experts": 3, "alignment": 4},
        {"R": 32, "H": 8, "G": 1, "P": 1, "T": 6, "k": 3, "num_experts": 4, "alignment": 8, "topk_ids": "int64",
         "N": 7, "expert_map": "int32"},
        {"R": 8, "H": 8, "G": 4, "P": 1, "T": 0, "k": 2, "num_experts": 2, "alignment": 8},
    ),
    requires=(_whole_words, _experts_exist, _rows_suffice, _written_apart),
)  # fmt: skip
def ep_scatter_ue8m0(nx, a, a_scale, x, x_scale, topk_ids, expert_map=None, *, num_experts, alignment=BLOCK):
    """a[inv_perm[t, r]] = x[t], its scales' exponents too, four to a word; m_indices and inv_perm as `ep_scatter`'s.

    Shapes: a uint8 [R, H] and a_scale int32 [R, ceil(G / 4)], which are written in place; x uint8 [T, H]; x_scale uint8
    [T, G], the exponents of scales 2^(e - 127) as MXFP8's quantiser gives them, G groups of any one size; topk_ids
    [T, k], expert_map int32 [N] or None, m_indices int32 [R], inv_perm int32 [T, k] as `ep_scatter`'s.
    Rounding points: none.
    Errors: as ep_scatter's; ContractError for other than a word for every four groups.
    Source: vLLM's ep_scatter, which packs exponents where the activations' scales are uint8. It leaves what a last word
    has beyond the groups to chance; here it is 0.
    """
    return scattered(a, a_scale, x, exponent_words(x_scale), topk_ids, expert_map, num_experts, alignment)


def _rows_exist(arguments, axes):
    """rows from -1 (none) to R - 1; on a GPU the host does not read them, and others count as none"""
    rows = arguments["inv_perm"]
    if isinstance(rows, np.ndarray) and rows.size and not -1 <= int(rows.min()) <= int(rows.max()) < axes["R"]:
        raise refuse("inv_perm", f"rows from {int(rows.min())} to {int(rows.max())}", f"-1 to {axes['R'] - 1}")


def _weighted(arguments, results):
    """sum_r |w_r| |a_r|."""
    rows, weights = arguments["inv_perm"], np.abs(arguments["topk_weights"].astype(np.float64))
    size = np.abs(arguments["a"].astype(np.float64))
    taken = np.where((rows < 0)[..., None], 0, size[np.maximum(rows, 0)] if len(size) else 0)
    return np.sum(weights[..., None] * taken, axis=1)


@op(
    row=_ROW,
    args={
        "a": Tensor("R H", layout="rows"),
        "topk_weights": Tensor("T k", ("float32",)),
        "inv_perm": Tensor("T k", ("int32",),
                           values=lambda rng, axes: rng.integers(-1, axes["R"], (axes["T"], axes["k"]))),
    },
    returns={"out": Tensor("T H", like="a")},
    rounding=("out = round(sum_r f32(w_r * a_r)), the sum in float32",),
    order="r ascending",
    parity=Parity("bytes"),
    mirror=Bound("2 * k", scale=_weighted, ulps=1, why="k products and their sum"),
    nan="propagates",
    upstream=f"{_UTILS}: ep_gather, of deepgemm_unpermute_and_reduce",
    examples=(
        {"R": 9, "H": 16, "T": 4, "k": 3, "a": "bfloat16"},
        {"R": 5, "H": 7, "T": 3, "k": 2, "a": "float32"},
        {"R": 4, "H": 8, "T": 2, "k": 0, "a": "float16"},
    ),
    requires=(_rows_exist,),
)  # fmt: skip
def ep_gather(nx, a, topk_weights, inv_perm):
    """out[t] = sum_r topk_weights[t, r] * a[inv_perm[t, r]], without the choices whose row is -1.

    Shapes: a [R, H]; topk_weights float32 [T, k]; inv_perm int32 [T, k], as `ep_scatter` gives it; out [T, H].
    Rounding points: each product and each sum to float32, r ascending, then the store. vLLM's GPU kernel may fuse the
    two; it asks topk_ids and expert_map where there is a row.
    Errors: ContractError for a row that there is not, mismatched shapes.
    Source: vllm/model_executor/layers/fused_moe/deep_gemm_utils.py, ep_gather.
    """
    weights = nx.load(topk_weights)
    total = np.zeros((len(inv_perm), a.shape[1]), nx.dtype)
    for r in range(inv_perm.shape[1]):
        has = np.flatnonzero(inv_perm[:, r] >= 0)
        total[has] = nx.add(total[has], nx.mul(nx.load(a[inv_perm[has, r]]), weights[has, r, None]))
    return nx.store(total, a.dtype)


def whole_groups(arguments, axes):
    """I is a multiple of 128"""
    if axes["I"] % BLOCK:
        raise refuse("x", f"halves of {axes['I']}", f"a multiple of {BLOCK}")


def _group_codes(nx, y, ue8m0):
    """(codes [..., I], scales [..., I / 128]) of values: a product makes the scale, a division the codes."""
    grouped = in_groups(nx, y, BLOCK)
    scale = single(nx, nx.mul(nx.maximum(largest(nx, grouped), _LEAST), _RECIPROCAL))
    if ue8m0:
        scale = ceil_power_of_two(nx, scale, "log2")
    codes = e4m3(nx, nx.div(grouped, scale)).reshape(y.shape)
    return codes, nx.store(scale[..., 0], np.float32)


def _sizes(arguments, results):
    """What a code and a scale may differ by, in units of 2^-24: roundings, and up to four flips of stores in y."""
    flips = 4 * float(ml_dtypes.finfo(arguments["x"].dtype).eps) * 2.0**24
    codes, scale = results
    return np.abs(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)), np.abs(scale.astype(np.float64)) * (
        1 + flips
    )


_SCALED = (
    "s = f32(max(max|y|, f32(1e-10)) * f32(1 / 448))",
    "ue8m0: s = 2^ceil(f32(log2(s)))",
    "out = e4m3(f32(y / s))",
)


@op(
    row=_ROW,
    rows="M",
    args={
        "x": Tensor("M 2*I"),
        "clamp_limit": Scalar(above=0, optional=True),
        "alpha": Scalar(),
        "beta": Scalar(),
        "ue8m0": Flag(),
    },
    returns={"out": Tensor("M I", _CODES, holds="float8_e4m3fn"), "scale": Tensor("M G", ("float32",))},
    rounding=("clamped: gate = T(min(gate, limit)), up = T(clamp(up, -limit, limit))",
              "a = T(gate * sigmoid(alpha * gate)), of alpha 1 T(silu(gate))", "y = T(a * T(up + beta))", *_SCALED),
    parity=Parity("bytes"),
    mirror=Bound("16", scale=_sizes, ulps=1,
                 why="the act within 4 roundings, its product and the sum with beta; their stores flip, which moves a "
                 "scale by as much and a code by one at most"),
    nan="code 0x7F; passed over in the maximum. silu(-inf) is NaN",
    layout="scale has strides (4, 4 M): columns of neighbours",
    upstream="vllm/model_executor/layers/quantization/utils/fp8_utils.py: silu_mul_per_token_group_quant_fp8_colmajor",
    examples=(
        {"M": 5, "I": 256, "G": 2, "x": "bfloat16"},
        {"M": 3, "I": 128, "G": 1, "x": "float32", "clamp_limit": 1.5, "alpha": 1.702, "beta": 1.0},
        {"M": 2, "I": 128, "G": 1, "x": "float16", "clamp_limit": 7.0, "ue8m0": True},
        {"M": 0, "I": 128, "G": 1},
    ),
    requires=(whole_groups,),
)  # fmt: skip
def silu_mul_per_token_group_quant_fp8_colmajor(nx, x, *, clamp_limit=None, alpha=1.0, beta=0.0, ue8m0=False):
    """y = gate * sigmoid(alpha * gate) * (up + beta); scale = max(max|y|, 1e-10) / 448 over 128; out = e4m3(y / scale).

    Shapes: x [M, 2*I] of dtype T, gate half first; out codes [M, I]; scale float32 [M, I / 128].
    Rounding points: to T after every step up to y; then the scale, a product with f32(1 / 448), and the quotient, a
    true division, to float32. ue8m0 is the "log2" of `per_token_cast_to_fp8`.
    Errors: ContractError for an I that is no multiple of 128, a limit that is not positive. Upstream wants whole 128 of
    rows as well.
    Source: vllm/model_executor/layers/quantization/utils/fp8_utils.py.
    """
    half, dtype = x.shape[-1] // 2, x.dtype

    def point(value):
        return nx.load(nx.store(value, dtype))

    gate, up = nx.load(x[:, :half]), nx.load(x[:, half:])
    if clamp_limit is not None:
        limit = float(np.float32(clamp_limit))
        gate, up = point(nx.minimum(gate, limit)), point(nx.minimum(nx.maximum(up, -limit), limit))
    factor, more = float(np.float32(alpha)), float(np.float32(beta))
    act = nx.silu(gate) if factor == 1 else nx.mul(gate, nx.sigmoid(nx.mul(gate, factor)))
    y = point(nx.mul(point(act), point(nx.add(up, more))))
    codes, scale = _group_codes(nx, y, ue8m0)
    return codes, lay_out(scale, True)


def _counts_fit(arguments, axes):
    """counts from 0 to T; on a GPU the host does not read them, and larger ones count as T"""
    counts = arguments["counts"]
    if isinstance(counts, np.ndarray) and counts.size and not 0 <= int(counts.min()) <= int(counts.max()) <= axes["T"]:
        raise refuse("counts", f"from {int(counts.min())} to {int(counts.max())}", f"0 to T = {axes['T']}")


def _results_apart(arguments, axes):
    """codes and scale are no other argument's memory"""
    for name, others in (("codes", ("x",)), ("scale", ("x", "codes"))):
        takes_writes(name, arguments[name])
        for other in others:
            apart(name, other, arguments)


@op(
    row=_ROW,
    args={
        "x": Tensor("E T 2*I", ("bfloat16", "float16", "float32")),
        "counts": Tensor("E", ("int32",), values=lambda rng, axes: rng.integers(0, axes["T"] + 1, axes["E"])),
        "codes": Tensor("E T I", _CODES, values="zeros", holds="float8_e4m3fn"),
        "scale": Tensor("E T G", ("float32",), layout="any", values="zeros"),
        "ue8m0": Flag(),
    },
    returns={},
    rounding=("y = f32(silu(gate) * up)", *_SCALED),
    parity=Parity("bytes"),
    mirror=Bound("6", ulps=1, why="silu within 1 ulp, two products; a code may flip, as none of the examples' does"),
    nan="code 0x7F; passed over in the maximum. silu(-inf) is NaN",
    layout="scale: any strides; upstream's are (4 T G, 4, 4 T)",
    mutates=("codes", "scale"),
    upstream=f"{_BATCHED}: persistent_masked_m_silu_mul_quant",
    examples=(
        {"E": 3, "T": 4, "I": 128, "G": 1, "x": "bfloat16"},
        {"E": 2, "T": 2, "I": 256, "G": 2, "x": "float32", "ue8m0": True},
        {"E": 2, "T": 0, "I": 128, "G": 1},
    ),
    requires=(whole_groups, _counts_fit, _results_apart),
)  # fmt: skip
def silu_mul_masked_quant(nx, x, counts, codes, scale, *, ue8m0=False):
    """y = silu(x[e, t, :I]) * x[e, t, I:] for t < counts[e]; scale = max(max|y|, 1e-10) / 448, codes = e4m3(y / scale).

    Shapes: x [E, T, 2*I], gate half first; counts int32 [E]; codes uint8 [E, T, I] and scale float32 [E, T, I / 128],
    written in place; rows from counts[e] on stay as they are. Returns nothing.
    Rounding points: y in float32, never in x's dtype; then the scale, a product with f32(1 / 448), and the quotient, a
    true division, to float32. ue8m0 is the "log2" of `per_token_cast_to_fp8`. vLLM's Triton kernel; its CUDA op rounds
    in bfloat16 on the way.
    Errors: ContractError for an I that is no multiple of 128, counts beyond T, mismatched shapes, memory both written
    and read.
    Source: vllm/model_executor/layers/fused_moe/experts/batched_deep_gemm_moe.py, _silu_mul_fp8_quant_deep_gemm.
    """
    half = x.shape[-1] // 2
    real = np.arange(x.shape[1]) < counts[:, None]
    rows = nx.load(x[real])
    y = single(nx, nx.mul(nx.silu(rows[:, :half]), rows[:, half:]))
    codes[real], scale[real] = _group_codes(nx, y, ue8m0)
