"""Products of GGML blocks: scalar loops in ggml's order, llama.cpp's own floats, exact products, edges."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle
from vtlab.goldens.capture import ggml_library
from vtlab.ops.blocks import LAYOUTS
from vtlab.ops.errors import ContractError
from vtlab.oracle.ggml_dot import ONE_SUM, lanes_of

from . import ggml_loops as loops
from .compare import assert_bytes, assert_nmse, assert_within
from .goldens import op_cases
from .harness import case, checks, mutations
from .scalar import draw
from .test_ggml import blocks

F32 = np.float32
KINDS = [case(kind=kind) for kind in loops.WEIGHTS]


def quantised(kind: str, x: np.ndarray) -> np.ndarray:
    return np.stack([np.frombuffer(loops.quantised(loops.PARTNER[kind], row.astype(F32)), np.uint8) for row in x])


@checks("vec_dot", cases=KINDS)
def test_vec_dot_against_scalar_loop(case):
    rows = 24 if case.kind == "Q4_0" else 4  # its order shows in few rows
    w, x = blocks(case.kind, rows, 768, 1), draw((rows, 768), "float32", 2)
    x[1:] = [loops.dequantised(case.kind, row) for row in w[1:]]  # a row by itself: integers as large as they get
    a = quantised(case.kind, x)
    want = np.array([loops.vec_dot(case.kind, one, two) for one, two in zip(w, a)])
    assert_bytes(oracle.vec_dot.mirror(w, a, quant_type=case.kind), want, case.kind)
    got = oracle.vec_dot(w, a, quant_type=case.kind)
    for value, one, two in zip(got, w, a):
        exact, size = loops.truth(case.kind, one, two)
        assert abs(value - exact) <= 2.0**-24 * abs(exact) + 2.0**-45 * size
    assert np.all(np.abs(got - want) <= 1e-5 * np.array([loops.truth(case.kind, *pair)[1] for pair in zip(w, a)]))


@checks("vec_dot", cases=KINDS)
def test_vec_dot_against_llama_cpp(case):
    (golden,) = (g for g in op_cases("ggml", "vec_dot") if g.name == case.kind)
    assert_bytes(oracle.vec_dot.mirror(**golden.call()), golden.outputs["out"], str(golden))


LIBRARY = ggml_library.installed()


@pytest.mark.skipif(LIBRARY is None, reason="llama-cpp-python is not installed, and VTLAB_GGML names no folder")
@pytest.mark.parametrize("kind", loops.WEIGHTS)
def test_vec_dot_live(kind):
    """This build's generic C code gives our bytes, or those with the fused steps that its compiler made of them."""
    library = ggml_library.Library(LIBRARY)
    w = blocks(kind, 12, 512, 3)
    a = quantised(kind, draw((12, 512), "float32", 4))
    got = np.array([library.vec_dot(one, two, 512, kind) for one, two in zip(w, a)])
    exact, size = np.array([loops.truth(kind, *pair) for pair in zip(w, a)]).T
    if np.any(np.abs(got - exact) > 1e-3 * size):
        pytest.skip(f"this build's generic {kind} contradicts its own decoder: its compiler broke it")
    plain = oracle.vec_dot.mirror(w, a, quant_type=kind)
    if not np.array_equal(got, plain):
        plain = np.array([loops.vec_dot(kind, one, two, fused=True) for one, two in zip(w, a)])
    assert_bytes(got, plain, kind)


@checks("matmul_bt_quant", cases=KINDS)
def test_products_are_dots_of_quantised_rows(case):
    b = blocks(case.kind, 5, 512, 5)
    for dtype in ("float32", "bfloat16", "float16"):
        x = draw((2, 512), dtype, 6)
        want = np.array([[loops.vec_dot(case.kind, w, a) for w in b] for a in quantised(case.kind, x)])
        got = oracle.matmul_bt_quant.mirror(x, b, quant_type=case.kind)
        assert_bytes(got, want, case.kind)
    half = oracle.matmul_bt_quant.mirror(x, b, quant_type=case.kind, out_dtype="bfloat16")
    assert_bytes(half, got.astype(ml_dtypes.bfloat16), case.kind)


HARD = ("random", "zero", "least", "largest", "integers")
CUDA = [case(kind=kind, how=how) for kind in loops.IN_LANES for how in HARD]


def hard_blocks(kind: str, how: str, rows: int, length: int) -> np.ndarray:
    """Random blocks, and those whose scales or codes stand at the ends of their ranges."""
    raw = blocks(kind, rows, length, 18)
    fields = raw.reshape(-1).view(LAYOUTS[kind].block)
    scales = [name for name in ("d", "dmin") if name in fields.dtype.names]
    if how == "zero":
        raw[:] = 0
    elif how == "integers":  # every code and every scale of 16 or 32 with all bits set: sums as large as they get
        raw[::2] = 255
        raw[1::2] = 0
        fields["d"] = 0.01
        if "dmin" in scales:
            fields["dmin"] = 0.01
    elif how != "random":
        for name in scales:
            fields[name] = np.copysign(2.0**-24 if how == "least" else 65504.0, fields[name])
    return raw


@checks("matmul_bt_quant", cases=CUDA)
def test_the_order_of_cuda_kernels(case):
    """One term a block instead of eight lanes: these very bytes, within NMSE 1e-6 of the CPU's and of the truth."""
    b, x = hard_blocks(case.kind, case.how, 12, 1024), draw((4, 1024), "float32", 19, scale=3)
    x[2] = 0
    x[3] = loops.dequantised(case.kind, b[4]) if case.how in ("random", "integers") else 127
    a, kind = quantised(case.kind, x), {"quant_type": case.kind}
    got = oracle.matmul_bt_quant.mirror_on("cuda", x, b, **kind)
    assert_bytes(got, np.array([[loops.vec_dot(case.kind, w, row, lanes=False) for w in b] for row in a]), case.how)
    mirror, truth = oracle.matmul_bt_quant.mirror(x, b, **kind), oracle.matmul_bt_quant(x, b, **kind)
    if case.how == "zero":
        assert not got.any() and not mirror.any() and not truth.any()
        return
    assert np.isfinite(got).all() and not got[2].any()
    for want in (mirror, truth):
        assert_nmse(got, want, 1e-12, case.how)  # the contract allows 1e-6
    contract = oracle.matmul_bt_quant.contract
    arguments = {"a": x, "b": b, **kind}
    roundings = contract.mirror.count({"M": 4, "K": 1024, "N": 12, "B": b.shape[1]})
    assert_within(got, truth, roundings * 2.0**-24 * contract.mirror.scale(arguments, None) + np.spacing(np.abs(truth)))


@pytest.mark.parametrize("kind", [*loops.WEIGHTS, "Q8_K"])
def test_other_types_have_one_order(kind):
    assert (kind in loops.IN_LANES) == (lanes_of(kind) != lanes_of(kind, ONE_SUM))
    if kind in loops.IN_LANES:
        return
    x = draw((3, 512), "float32", 20)
    b = oracle.quantize_row_q8_k(draw((4, 512), "float32", 21)) if kind == "Q8_K" else blocks(kind, 7, 512, 22)
    assert_bytes(oracle.matmul_bt_quant.mirror_on("cuda", x, b, quant_type=kind),
                 oracle.matmul_bt_quant.mirror(x, b, quant_type=kind), kind)  # fmt: skip


@checks("matmul_bt_quant", cases=KINDS)
def test_products_are_near_those_of_the_unquantised(case):
    """Eight-bit activations cost at most 5e-4 of the energy, as upstream's own test allows."""
    b, x = blocks(case.kind, 33, 2048, 7), draw((3, 2048), "float32", 8)
    rows = oracle.embedding_quant(b, np.arange(33), quant_type=case.kind).astype(np.float64)
    assert_nmse(oracle.matmul_bt_quant(x, b, quant_type=case.kind), x.astype(np.float64) @ rows.T, 5e-4, case.kind)


@checks("matmul_bt_quant", "vec_dot", cases=KINDS)
def test_an_element_depends_on_its_rows_alone(case):
    b, x = blocks(case.kind, 17, 256, 9), draw((16, 512), "float32", 10)[:, :256]
    for run in (oracle.matmul_bt_quant, oracle.matmul_bt_quant.mirror):
        whole = run(x, b, quant_type=case.kind)
        assert_bytes(run(x[3:4], b[5:12], quant_type=case.kind), whole[3:4, 5:12].copy())
        assert_bytes(run(x.copy(), b[::2], quant_type=case.kind), whole[:, ::2].copy())
    a = quantised(case.kind, x[:17])
    dots = oracle.vec_dot.mirror(b[:16], a, quant_type=case.kind)
    assert_bytes(dots, np.diagonal(whole).copy())


@checks("matmul_bt_quant", cases=KINDS)
def test_zero_activations_and_zero_scales(case):
    b = blocks(case.kind, 3, 256, 11)
    zeros = oracle.matmul_bt_quant.mirror(np.zeros((2, 256), F32), b, quant_type=case.kind)
    assert not zeros.any()
    assert not oracle.matmul_bt_quant.mirror(draw((2, 256), "float32", 1), 0 * b, quant_type=case.kind).any()


@checks("matmul_bt_quant")
def test_many_rows_of_weights_are_taken_in_pieces():
    b, x = blocks("Q4_1", 2500, 512, 16), draw((2, 512), "float32", 17)
    whole = oracle.matmul_bt_quant.mirror(x, b, quant_type="Q4_1")
    for start in (0, 2040, 2480):
        part = oracle.matmul_bt_quant.mirror(x, b[start : start + 20], quant_type="Q4_1")
        assert_bytes(part, whole[:, start : start + 20].copy())


@checks("matmul_bt_quant")
def test_weights_of_q8_k_are_dequantised():
    x = draw((3, 512), "float32", 12)
    b = oracle.quantize_row_q8_k(draw((4, 512), "float32", 13))
    rows = np.stack([loops.dequantised("Q8_K", row) for row in b])
    want = np.zeros((3, 4), F32)
    for m in range(3):
        for n in range(4):
            for k in range(512):
                want[m, n] = np.float64(x[m, k]) * np.float64(rows[n, k]) + np.float64(want[m, n])
    got = oracle.matmul_bt_quant.mirror(x, b, quant_type="Q8_K")
    assert np.abs(got - want).max() <= 2.0**-24 * np.abs(want).max()  # the loop rounds twice, rarely otherwise
    assert_nmse(oracle.matmul_bt_quant(x, b, quant_type="Q8_K"), x.astype(np.float64) @ rows.T, 1e-13)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_activations_that_are_no_numbers(value):
    x = draw((2, 256), "float32", 14)
    x[0, 40] = value
    for kind in loops.WEIGHTS:
        out = oracle.matmul_bt_quant.mirror(x, blocks(kind, 3, 256, 15), quant_type=kind)
        passed_over = loops.PARTNER[kind] == "Q8_K" and np.isnan(value)
        assert np.isnan(out[0]).all() != passed_over and np.isfinite(out[1]).all(), kind


@pytest.mark.parametrize(
    ("change", "argument"),
    [({"a": np.zeros((2, 48), F32)}, "a"), ({"a": np.zeros((2, 96), F32)}, "b"),
     ({"b": np.zeros((3, 36), np.uint8)}, "b"), ({"b": np.zeros((3, 34), np.int8)}, "b"),
     ({"quant_type": "Q8_1"}, "quant_type"), ({"quant_type": "Q4_K"}, "a"), ({"out_dtype": "float16"}, "out_dtype"),
     ({"a": np.zeros((2, 32), np.int32)}, "a"), ({"a": np.zeros((2, 64), F32)[:, ::2]}, "a")],
)  # fmt: skip
def test_bad_products_are_refused(change, argument):
    good = {"a": np.zeros((2, 32), F32), "b": np.zeros((3, 34), np.uint8), "quant_type": "Q8_0"}
    with pytest.raises(ContractError) as caught:
        oracle.matmul_bt_quant(**(good | change))
    assert (caught.value.op, caught.value.argument) == ("matmul_bt_quant", argument)


@pytest.mark.parametrize(("w", "a", "argument"), [((2, 35), (2, 34), "w"), ((2, 34), (2, 36), "a"),
                                                  ((2, 34), (3, 34), "a")])  # fmt: skip
def test_bad_dots_are_refused(w, a, argument):
    with pytest.raises(ContractError) as caught:
        oracle.vec_dot(np.zeros(w, np.uint8), np.zeros(a, np.uint8), quant_type="Q8_0")
    assert (caught.value.op, caught.value.argument) == ("vec_dot", argument)


_JOIN = "    total = low\n    for lane in lanes:\n        total = nx.add(total, lane)\n    return total"
_ORDER = {
    "no fold at the end": ("shape), w.fold)", "shape), 1.0)", "ggml_dot._finish"),
    "Q4_0: scales first": ("nx.mul(nx.mul(nx.load(i), nx.load(dw)), nx.load(da))",
                           "nx.mul(nx.load(i), nx.mul(nx.load(dw), nx.load(da)))", "ggml_dot._codes_first"),
    "minimums added": ("low = nx.sub(low,", "low = nx.add(low,", "ggml_dot._in_lanes"),
    "lanes before minimums": (_JOIN, _JOIN.replace("total = low", "total = 0 * low").replace(
        "return total", "return nx.add(total, low)"), "ggml_dot._in_lanes"),
    "neighbours share a lane": ("elements // lanes, lanes).transpose(1, 3, 0, 2)",
                                "lanes, elements // lanes).transpose(1, 2, 0, 3)", "ggml_dot._by_lane"),
    "five bits without the fifth": ("| fifth << 4", "| fifth << 3", "ggml_blocks._five_bits"),
    "upper bits of the scales dropped": ("third & 15 | first >> 6 << 4", "third & 15", "ggml_blocks._six_bit_scales"),
    "s = stored scale": ("2 * (a >> 28).astype(np.int32) + 1", "2 * (a >> 28).astype(np.int32)",
                         "ggml_blocks._iq3_xxs"),
}  # fmt: skip
mutations("vec_dot", _ORDER)
mutations(
    "matmul_bt_quant",
    {
        **{name: _ORDER[name] for name in ("no fold at the end", "minimums added", "lanes before minimums")},
        "CUDA: the minimums' scale by the other": ("low = nx.mul(nx.load(da), nx.load(dmin)) if integer",
                                                   "low = nx.mul(nx.load(dw), nx.load(dmin)) if integer",
                                                   "ggml_dot._with_minimum"),
        "a piece's rows reversed": ("b[start : start + step]", "b[start : start + step][::-1]"),
        "signs of 128 magnitudes": ("np.array([0, 7, 14, 21], np.uint32) & 127",
                                    "np.array([0, 7, 14, 21], np.uint32) & 63", "ggml_blocks._signed"),
        "quantised in bfloat16": ("quantised(nx, a, quant_type), quant",
                                  "quantised(nx, nx.store(nx.load(a), 'bfloat16'), quant_type), quant"),
    },
)  # fmt: skip
