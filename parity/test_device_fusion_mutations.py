"""Small wrongs in generated kernels and in what they stand on: the chains' cases, emulated, must turn red for each."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from vtlab.device import source
from vtlab.device.fusion import text_of
from vtlab.ops import fusion

from .chain_cases import chain_cases, check_chain
from .compare import ParityError
from .device_run import Emulated
from .emulation import EmulatedRuntime, compiler
from .test_device_mutations import CONTEXT, SURVIVED

HEADERS = {
    "half a turn further on": ("fused_add_rms_norm", "first + t * TREE_SPAN", "first + t * (TREE_SPAN / 2)"),
    "all rows but the last": ("fused_add_rms_norm", "present = row < rows &&", "present = row + 1 < rows &&"),
    "eight elements twice": ("fused_add_rms_norm", "base += TREE_SPAN)", "base += TREE_SPAN - 8)"),
    "no maximum of the last warp": ("rms_norm_quant_per_token", "lane < count ? tops[lane] : 0u",
                                    "lane < count - 1 ? tops[lane] : 0u"),
    "half a group": ("silu_and_mul_quant_per_group", "size_of(x, 0u, inside), LANES)",
                     "size_of(x, 0u, inside), LANES / 2)"),
    "a row's NaN is the largest": ("rms_norm_quant_per_token", "larger(top, largest_of(x, false))",
                                   "larger(top, largest_of(x, true))"),
    "a product for the quotient": ("rms_norm_quant_per_token", "vt_fma(x[j], inverse, x[j] * low)", "x[j] * inverse"),
    "half up": ("rms_norm_quant_fp8", "0x7ffffu + (bits >> 20 & 1u)", "0x80000u"),
    "subnormal codes halved": ("rms_norm_quant_fp8", "size * 512.0f", "size * 256.0f"),
    "no saturation": ("rms_norm_quant_fp8", "size >= 448.0f", "size >= 1e30f"),
    "a NaN like any other": ("rms_norm_quant_fp8", "(hi != hi ? 0x7fu : e4m3_by_hand(hi))", "e4m3_by_hand(hi)"),
    "a tile's zeros to the right": ("silu_mul_fp4_quant_swizzled", "c < across * 4; ++c", "c < blocks; ++c"),
    "a tile's zeros downwards": ("sigmoid_gate_fp4_quant_swizzled", "int real = (int)(rows & 127);", "int real = 0;"),
    "a block's half twice": ("rms_norm_fp4_quant", "e2m1_of_bf16(y[2 * n + 1].a, quick[n])",
                             "e2m1_of_bf16(y[2 * n].a, quick[n])"),
    "half of a block's largest": ("silu_mul_fp4_quant", "larger_pair<true>(both, __shfl_xor_sync(FULL_WARP, both, 1))",
                                  "larger_pair<true>(both, both)"),
    "the other lane's scale": ("rms_norm_fp4_quant", "quick[t] = odd ? others : mine;", "quick[t] = mine;"),
    "every step is middling": ("silu_and_mul_fp4_quant", "is_middling(step, scale) && ", ""),
    "quick codes of NaN": ("sigmoid_gate_fp4_quant", "largest_pair<true>(y[t].a)", "largest_pair<false>(y[t].a)"),
    "the other lanes' half of a tree": ("rms_norm_fp4_quant", "joined += other_lane(joined, 8);", "joined += joined;"),
    "a largest of four vectors": ("rms_norm_quant_per_token", "for (int i = 1; i < B; ++i) pair =",
                                  "for (int i = 2; i < B; ++i) pair ="),
    "lanes beyond a row": ("rms_norm_gated_quant_fp8", "ROWS ? (int)(rows - row) : ROWS) : 0;",
                           "ROWS ? (int)(rows - row) : ROWS) : ROWS;"),
    "the same row again": ("rms_norm_fp4_quant", "return row + step;", "return row;"),
    "four rows side by side": ("rms_norm_fp4_quant_swizzled", "own_row + 32", "own_row + 1"),
    "the last row of some": ("rms_norm_fp4_quant_swizzled", "lane + held > 3", "lane == 3"),
    "the first team's rest": ("rms_norm_fp4_quant_swizzled", "own * least + (own < more ? own : more)", "0"),
    "a row too few": ("rms_norm_fp4_quant_swizzled", "least + (own < more ? 1 : 0)", "least"),
    "four columns for four rows": ("rms_norm_fp4_quant_swizzled", "lane & 2 ? 0x3276u : 0x5410u",
                                   "lane & 2 ? 0x5410u : 0x3276u"),
    "no zeros below a ring's rows": ("rms_norm_fp4_quant_swizzled", "if (TILED) fill_tiles(", "if (false) fill_tiles("),
    "a row on its way": ("rms_norm_fp4_quant", "ring.await(&barriers[ring.team][slot], parity);", ""),
    "the same kind of vector": ("rms_norm_fp4_quant", "first[0] + other_lane(first[1], 4)",
                                  "first[0] + other_lane(first[0], 4)"),
    "the same kind of vector again": ("rms_norm_fp4_quant", "second[0] + other_lane(second[1], 4)",
                                      "second[0] + other_lane(second[0], 4)"),
    "half of four warps' partials": ("rms_norm_fp4_quant", "p[0][h] + other_lane(p[0][h], 8)", "p[0][h] + p[0][h]"),
    "signs of other elements": ("rms_norm_fp4_quant", "joined_halves(a >> 4, b)", "joined_halves(b >> 4, a)"),
    "a first turn's barrier": ("rms_norm_fp4_quant", "        parity ^= slot;\n", ""),
    "codes as they were read": ("rms_norm_fp4_quant", "{ring.flipped ? b : a, ring.flipped ? a : b}", "{a, b}"),
    "slow codes of another block": ("rms_norm_fp4_quant",
                                    "brains(y, i);\n            if (factors", "brains(y, 0);\n            if (factors"),
    "a sum too few": ("fused_add_rms_norm_fp4_quant", "8 ? threadIdx.x >> 4 :", "8 ? threadIdx.x >> 5 :"),
    "a span further on": ("rms_norm_fp4_quant", "(t >> 1) * TREE_SPAN", "(t >> 1) * (TREE_SPAN - 16)"),
    "tiles of other rows": ("silu_mul_fp4_quant_swizzled", "(eight & 15) * 2 + (lane", "(eight & 15) + (lane"),
    "no zeros beside a row": ("silu_and_mul_fp4_quant_swizzled", "if (frame.pads)", "if (false)"),
    "another row's root": ("rms_norm_gated_quant_fp8", "from_lane(x, team.begin + t)", "from_lane(x, team.begin)"),
    "another turn's scale": ("silu_and_mul_quant_per_group", "other_lane(mine.low, own ^ t)", "mine.low"),
    "scales of one turn": ("silu_and_mul_quant_per_group", "frame.at(own) / (8 * LANES)", "frame.at(0) / (8 * LANES)"),
    "another gate": ("silu_and_mul_quant_per_group", "pick(n >> 3, n & 7, gate, up)", "pick(n >> 3, 0, gate, up)"),
    "codes of one half": ("silu_mul_fp4_quant", "(out + (at >> 1))", "(out + (at >> 4 << 3))"),
    "no sign": ("rms_norm_quant_fp8", ">> 24 & 0x80u", ">> 24 & 0x00u"),
}  # fmt: skip
"""Name -> (recipe, text in a header, replacement)."""

GENERATED = {
    "normalise the unrounded sum": ("fused_add_rms_norm", "n13[t][j] = n3[t][j]", "n13[t][j] = n2[t][j]"),
    "square the unrounded sum": ("fused_add_rms_norm", "frame.squares(n3, 0)", "frame.squares(n2, 0)"),
    "Gemma's weight without one": ("fused_add_rms_norm", " + 1.0f", ""),
    "the sum for the mean": ("fused_add_rms_norm", "mean_of(n5, n6)", "n5"),
    "quantise what was not rounded": ("rms_norm_quant_fp8", "n17[t][j] * n19", "n16[t][j] * n19"),
    "multiply by the scale": ("rms_norm_quant_fp8", "1.0f / n18", "n18"),
    "no least scale": ("rms_norm_quant_per_token", ", 4.359654e-06f)", ", 0.0f)"),
    "every scale at row 0": ("rms_norm_quant_per_token", "store_one(out_scale, row,", "store_one(out_scale, 0,"),
    "SiLU for the sigmoid": ("sigmoid_gate_quant_fp8", "guessed<false>", "guessed<true>"),
    "another act again": ("silu_and_mul_quant_fp8", "exact_product<true>", "exact_product<false>"),
    "twice the first half": ("silu_and_mul_quant_fp8", "in_x_stride + width + ", "in_x_stride + "),
    "half a block": ("silu_mul_fp4_quant", "group_size<2>", "group_size<1>"),
    "no global scale": ("silu_mul_fp4_quant", "n14[t] = n5 * n12[t]", "n14[t] = n12[t]"),
    "a scale never rounded": ("silu_mul_fp4_quant", "= through_e4m3(", "= ("),
    "tiles in rows": ("sigmoid_gate_fp4_quant_swizzled", "put_blocks<true>", "put_blocks<false>"),
    "the first column's bias": ("bias_relu", "fetch<V>(in_bias, frame.at(t)", "fetch<V>(in_bias, 0"),
    "the other norm's weight": ("sandwich_norm", "fetch<V>(in_pre_weight", "fetch<V>(in_post_weight"),
}
"""Name -> (recipe, text in its source, wherever it stands, replacement)."""


def _cases(recipe):
    """The recipe's cases, as cases of a chain that is declared like it."""
    original = recipe.name.partition("__")[0]
    for case in chain_cases():
        if case.op == original:
            yield dataclasses.replace(case, recipe=recipe)


def _survives(recipe, machine: EmulatedRuntime) -> bool:
    try:
        for case in _cases(recipe):
            check_chain(Emulated(machine), case)
    except ParityError:
        return False
    return True


def _header_survives(name: str) -> bool:
    recipe, old, new = HEADERS[name]
    return _survives(fusion.lookup(recipe), EmulatedRuntime({recipe: (old, new)}))


def _source_survives(name: str) -> bool:
    recipe, old, new = GENERATED[name]
    recipe = fusion.lookup(recipe)
    wrong = fusion.declare(
        fusion.Recipe(
            f"{recipe.name}__wrong", recipe.operands, recipe.steps, " ".join(recipe.returns), recipe.params,
            dtypes=recipe.dtypes,
        )
    )  # fmt: skip
    text = text_of(wrong)
    assert old in text, f"{name}: {old!r} does not stand in the source"
    source.generate(wrong.name, lambda: text.replace(old, new), ahead=False)
    return _survives(wrong, EmulatedRuntime())


def _judge(survives, name: str) -> None:
    sys.exit(SURVIVED if survives(name) else 0)


@pytest.mark.mutation
@pytest.mark.kernel_mutation
@pytest.mark.skipif(compiler() is None, reason="emulation needs a C++ compiler")
@pytest.mark.parametrize(
    "survives, name",
    [*((_header_survives, name) for name in HEADERS), *((_source_survives, name) for name in GENERATED)],
    ids=[*HEADERS, *GENERATED],
)
def test_a_wrong_kernel_is_noticed(survives, name):
    """In a process of its own: a wrong kernel may write anywhere, and to die of that is to be noticed."""
    child = CONTEXT.Process(target=_judge, args=(survives, name))
    child.start()
    child.join()
    assert child.exitcode != SURVIVED, f"{name!r} survives"
    assert child.exitcode <= 0, f"{name!r} could not be tried"
