"""Small wrongs planted in the kernels' sources: the device cases, emulated, must turn red for each."""

from __future__ import annotations

import math
import multiprocessing
import sys

import pytest

from . import (
    planted,
    test_device_calls,
    test_device_calls_attention,
    test_device_calls_casts,
    test_device_calls_ggml,
    test_device_calls_kv,
    test_device_calls_quant,
    test_device_calls_w4a8,
)
from .compare import ParityError
from .device_cases import cases, device_ops
from .device_run import Emulated, check_case
from .device_wrongs_attention import WRONGS as ATTENTION
from .device_wrongs_casts import WRONGS as CASTS
from .device_wrongs_chunks import WRONGS as CHUNKS
from .device_wrongs_experts import WRONGS as EXPERTS
from .device_wrongs_fp4 import WRONGS as FP4
from .device_wrongs_fp8 import WRONGS as FP8
from .device_wrongs_ggml import WRONGS as GGML
from .device_wrongs_int8 import WRONGS as INT8
from .device_wrongs_kv_quant import WRONGS as KV_QUANT
from .device_wrongs_lowbit import WRONGS as LOWBIT
from .device_wrongs_moe import WRONGS as MOE
from .device_wrongs_quant import WRONGS as QUANT
from .device_wrongs_recurrent import WRONGS as RECURRENT
from .device_wrongs_rope import WRONGS as ROPE
from .device_wrongs_sampling import WRONGS as SAMPLING
from .device_wrongs_ssd import WRONGS as SSD
from .emulation import EmulatedRuntime, compiler

CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
SURVIVED = 3

WRONGS = {
    "norm": {
        "drop a level of the lanes' tree": ("m = lanes >> 1; m >= 1; m >>= 1) partial +=",
                                            "m = lanes >> 1; m >= 2; m >>= 1) partial +="),
        "drop a level over the warps": ("((s[0] + s[4]) + (s[2] + s[6])) +", "(s[0] + s[4]) +"),
        "overlapping turns": ("#define TREE_SPAN 2048", "#define TREE_SPAN 2040"),
        "neighbours backwards": ("partial += v[j] * v[j];", "partial += v[V - 1 - j] * v[V - 1 - j];"),
        "sum for mean": ("count > 0.0f ? mean_of(total, count) : total", "total"),
        "another power of two": ("vt_float(0x7f000000 - bits)", "vt_float(0x7e800000 - bits)"),
        "the first row's root for all": ("team.root_of(roots, j)", "team.root_of(roots, 0)"),
        "normalise the unrounded sum": ("if (flags & NATIVE) return;", "return;"),
        "Gemma's weight without one": ("scaled * (w[j] + 1.0f)", "scaled * w[j]"),
        "forget the first of the native roundings": ("through(scaled, weight_kind) * w[j]", "scaled * w[j]"),
        "keep the mean": ("v[j] = (v[j] - mean) * inverse;", "v[j] = v[j] * inverse;"),
        "do not wait for the warps": ("warps[threadIdx.x >> 5] = partial;\n    __syncthreads();",
                                      "warps[threadIdx.x >> 5] = partial;"),
        "SiLU for the sigmoid": ("if (sigmoid) gate_products<false>", "if (sigmoid) gate_products<true>"),
    },
    "activation": {
        "fast functions beyond their range": ("&& largest < FAST_LIMIT", ""),
        "always round the act": ("<true>(out, g, u, variant ? kind : F32,", "<true>(out, g, u, kind,"),
        "clamp the gate on both sides": ("vt_minimum(g[j], limit)", "vt_minimum(vt_maximum(g[j], -limit), limit)"),
        "tanh's cube without its factor": ("((0.044715f * g) * g) * g", "(g * g) * g"),
        "GELU's fast form in its tail": ("vt_fma(e, 0x1p-23f, 52 * 0x1p-24f)", "52 * 0x1p-24f"),
        "GELU's guess in its tail": ("vt_fma(e, GELU_NEAR_SLOPE, GELU_NEAR)", "GELU_NEAR"),
        "SiLU's guess beyond its range": ("least > LARGEST_GATE ? near << 17 : 0xffffffffu", "near << 17"),
        "the first vector's middles": ("(made, a[d], b[d]) << 8 * d", "(made, a[d], b[d])"),
        "an open element's neighbour": ("(int)(blockDim.x * 8) + (n & 7)", "(int)(blockDim.x * 8) + (n & 6)"),
        "the act never rounded to bfloat16": (
            "if (!ROUNDED) y[j] = y[j] * u[j];\n            rooms",
            "y[j] = y[j] * u[j];\n            rooms",
        ),
        "multiply by the cap's inverse": ("y / cap", "y * (1.0f / cap)"),
        "keep NaN in relu": ("y > 0.0f ? y : 0.0f", "y < 0.0f ? 0.0f : y"),
        "leave out the last group": ("column < width}", "column < width - 1}"),
    },
    "elementwise": {
        "a bias of every row": ("at.row * b_stride", "at.row * width"),
        "the hardware's NaN": ("if (x != x) return (unsigned)vt_bits(x) >> 16 | 0x40u;", ""),
        "add the scale": ("v[j] *= scale", "v[j] += scale"),
        "the first column's factor": ("load(w, col, at.column, F32)", "load(w, col, 0, F32)"),
    },
    "splits": {
        "contiguous rows": ("[row * stride + at]", "[row * periods * width + at]"),
        "the middle part backwards": ("[group * w1 + within - w0]", "[group * w1 + w1 - 1 - (within - w0)]"),
        "heads before tokens": ("row * periods + period;", "period * rows + row;"),
    },
    "gates": {
        "a growing decay": ("-vt_exp(A_log[head])", "vt_exp(A_log[head])"),
        "no bias": ("y[0] + dt_bias[head]", "y[0]"),
        "swap q and k": ("head < keys ? q : k", "head < keys ? k : q"),
        "keys of k over those of q": ("value ? v : of_k ? k : q", "value ? v : q"),
        "gates of every second block": ("turn * blockDim.x + threadIdx.x", "2 * turn * blockDim.x + threadIdx.x"),
        "a team less before the values": ("first -= (int)key_teams", "first -= (int)key_teams - 1"),
        "never round the gate": ("through(vt_sigmoid(one[0]), (int)act_kind)", "vt_sigmoid(one[0])"),
    },
    "kv_cache": {
        "negative slots wrap": ("""if (slot < 0 || slot >= room) return;
    int head""", """if (slot >= room) return;
    int head"""),
        "every block's first page row": ("(slot - b * size) * row", "0 * row"),
        "the key's head for the value": ("+ head * values.head + within] = v", "+ head * values.head] = v"),
        "the last token is lost": ("at.row >= tokens ||", "at.row + 1 >= tokens ||"),
        "values by rows": ("column[j * page_size]", "column[j]"),
        "packs of the first head": ("at = (block * packs + pack) * page_size", "at = block * packs * page_size"),
    },
    "kv_blocks": {
        "never in order": ("*in_order = found < pairs;", "*in_order = 0;"),
        "order for targets alone": ("meets |= table[at] == (u64)source;", ";"),
        "order for sources alone": ("meets = old == (u64)target;", ""),
        "ranges of one size are blocks": (" || source % size || target % size", ""),
        "ranges never overlap": ("if (touch) atomicMin(&found, (i64)i);", ""),
        "every second pair": ("pair += ordered ? 1 : workers", "pair += 2 * workers"),
        "the last unit stays": ("there[d] = lane < entries.lanes", "there[d] = lane < entries.lanes - 1"),
        "ranges without their ends": ("if (first < size - tail) dst[tail + first] = src[tail + first];", ""),
        "downwards whatever overlaps": ("bool upwards = (u64)dst <= (u64)src;", "bool upwards = false;"),
        "a page too far": ("row = position - page * page_size;", "row = position - page * page_size + 1;"),
        "the first request's pages": ("table[request * table_stride + page]", "table[page]"),
        "no wait for the places": ("""    }
    __syncthreads();
    int lanes""", """    }
    int lanes"""),
    },
    "kv_latent": {
        "the latent twice": ("(const U*)rotated + at.row * rotated_stride + (at.lane - latent_lanes)",
                             "(const U*)latent + at.row * latent_stride + (at.lane - latent_lanes)"),
        "chunks begin at 0": ("            position += begin;\n", ""),
        "tokens past their request": ("if (token >= bounds[request + 1]) return NOTHING;", ""),
        "slots count entries of one block": ("b * block + (slot", "(slot"),
    },
    "matmul": {
        "half a turn further": ("k += TURN;", "k += TURN / 2;"),
        "do not wait for the weights": ("""copies_arrive_but<STAGES - 2>();
        warp_meets();""", "warp_meets();"),
        "do not wait for weights and rows": ("""copies_arrive_but<STAGES - 2>();
        __syncthreads();""", "__syncthreads();"),
        "lanes do not wait for each other": ("        warp_meets();", "        "),
        "round the product": ("sum[r][m] = vt_fma(x[j], y[r][j], sum[r][m])", "sum[r][m] += x[j] * y[r][j]"),
        "the upper rows unswapped": ("((BM / 2 + y0) ^ x_swap)", "(BM / 2 + y0)"),
        "chains in one place": ("(chain * tiles + number)", "number"),
        "chains backwards": ("(chains + l * size + at)", "(chains + (count - 1 - l) * size + at)"),
        "the first matrix for all": ("corner.batch * b_batch", "0 * b_batch"),
        "columns of half a lane": ("across = 8 * (thread & (lanes - 1))", "across = 4 * (thread & (lanes - 1))"),
        "four lanes a chain": ("chain = thread / lanes", "chain = thread / 4"),
        "the first rows for all": ("top + warp * OWN + i < rows ? top + warp * OWN + i", "i < rows ? i"),
        "half of the rows of `a`": ("x_at[(m + p) * WORDS + at]", "x_at[m * WORDS + at]"),
        "warps do not wait for each other": ("__syncthreads();  // this turn's", "// this turn's"),
        "a turn's end for all turns": ("(turn + 1 == turns && w * 256 >= within)", "w * 256 >= within"),
        "no wait for the next piece": ("""                right.deposit((float*)memory[buffer] + PIECE * BM);
                __syncthreads();""", """                right.deposit((float*)memory[buffer] + PIECE * BM);"""),
    },
    **ATTENTION, **CASTS, **CHUNKS, **EXPERTS, **FP4, **FP8, **GGML, **INT8, **KV_QUANT, **LOWBIT, **MOE, **QUANT,
    **RECURRENT, **ROPE, **SAMPLING, **SSD,
}  # fmt: skip


BEFORE_HOPPER = {
    "w4a8_matmul": ["cutlass_w4a8_mm", "cutlass_w4a8_moe_mm"],
    "marlin_fp4": ["apply_fp4_marlin_linear"],
    "moe": ["moe_grouped_gemm"],
}
"""Family: ops that have other kernels there."""


def survives(family: str, name: str) -> bool:
    """Whether every device case of the family still passes with the wrong in its source."""
    device = Emulated(EmulatedRuntime({family: WRONGS[family][name]}))
    try:
        for case in cases(device_ops()):
            if case.family == family:
                check_case(device, case)
        test_device_calls.test_strided_and_misaligned_rows(device, shift=0, gap=8)
        for op in ("silu_and_mul", "gelu_and_mul") if family == "activation" else ():
            test_device_calls.test_every_gate_where_there_are_few(device, op)
        for op in test_device_calls_quant.CALLS if family in QUANT else ():
            test_device_calls_quant.test_slices_of_wider_rows(device, op, shift=8)
        if family == "quant_fp8":
            test_device_calls_quant.test_more_elements_than_all_threads_take_at_once(device)
            for blocks in (1, 2, 3):
                test_device_calls_quant.test_blocks_keep_a_tensor(device, blocks, "bfloat16")
        if family == "mxfp4":
            test_device_calls_casts.test_long_rows_follow_each_other(device)
        if family == "fp4":
            test_device_calls_quant.test_slices_of_wider_rows(device, "scaled_fp4_quant", shift=1)
            test_device_calls_quant.test_codes_at_any_address(device, "scaled_fp4_quant")
            for tiles in (False, True):
                test_device_calls_quant.test_blocks_of_fp4_take_turns(device, tiles)
        if family == "w4a8_matmul":
            test_device_calls_w4a8.test_many_tiles_of_one_expert(device)
            test_device_calls_w4a8.test_tiles_of_256_rows(device)
        before_hopper = EmulatedRuntime({family: WRONGS[family][name]})
        before_hopper.capability = lambda: (8, 9)
        for case in cases(BEFORE_HOPPER.get(family, ())):
            check_case(Emulated(before_hopper), case)
        if family == "attention":
            test_device_calls_attention.test_what_is_not_finite_reaches_those_who_see_it(device, rows=40, bad=math.nan)
        for kind in ("Q2_K", "IQ2_XXS") if family == "ggml_matmul" else ():
            test_device_calls_ggml.test_one_row_of_sizes_far_from_one(device, kind, 1e-34)
        for seed in range(6 if family == "kv_blocks" else 0):
            test_device_calls_kv.test_lists_are_followed_in_their_order(device, seed)
    except ParityError:
        return False
    return True


def _judge(family: str, name: str) -> None:
    sys.exit(SURVIVED if survives(family, name) else 0)


@pytest.mark.mutation
@pytest.mark.kernel_mutation
@pytest.mark.skipif(compiler() is None, reason="emulation needs a C++ compiler")
@pytest.mark.parametrize("family, name", [(family, name) for family, wrongs in WRONGS.items() for name in wrongs])
def test_a_wrong_kernel_is_noticed(family, name, record_property):
    """In a process of its own: a wrong kernel may write anywhere, and to die of that is to be noticed."""
    record_property("wrong", [f"{family}: {name}", planted.key_of(family, WRONGS[family][name])])
    child = CONTEXT.Process(target=_judge, args=(family, name))
    child.start()
    child.join()
    assert child.exitcode != SURVIVED, f"{family}: {name!r} survives"
    assert child.exitcode <= 0, f"{family}: {name!r} could not be tried"
