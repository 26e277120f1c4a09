"""Around experts' products with packed weights and products in groups: any batch, tiles, ids that lie, any address."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab.device import fp8_groups, moe_marlin, moe_packed, moe_wna16, runtime
from vtlab.ops.errors import ContractError

from .compare import assert_bytes
from .device_doors import past_the_door
from .device_run import Emulated, mirror_of
from .emulation import EmulatedRuntime
from .lowbit_loops import codes, scales, words
from .scalar import draw
from .test_device_calls_w4a8 import older

E, N, K = 3, 64, 256
MODULES = {"moe_wna16_gemm": moe_wna16, "moe_wna16_marlin_gemm": moe_marlin}
OPS = pytest.mark.parametrize("op", MODULES)


def call_of(op: str, tokens: int, kind: str = "bfloat16") -> dict:
    """A call on the host, the second expert without a row and the last token's first choice without an expert."""
    ids = np.random.Generator(np.random.PCG64(tokens)).integers(0, 2, (tokens, 2)).astype(np.int32) * 2
    ids[-1, 0] = -1
    routed = {"ids": ids, "weights": np.abs(draw((tokens, 2), "float32", 3))}
    x = draw((tokens, K), kind, 1)
    if op == "moe_wna16_gemm":
        packed, factors = codes(8, E, N, K // 2).astype(np.uint8), scales(E * N, 4, kind).reshape(E, N, 4)
        return {"x": x, "qweight": packed, "scales": factors, **routed}
    perm = np.array([np.random.Generator(np.random.PCG64(e)).permutation(K) for e in range(E)], np.int32)
    packed, factors = words(E * K // 16, 2 * N).reshape(E, K // 16, 2 * N), scales(E * 4, N, kind).reshape(E, 4, N)
    return {"a": x, "b_q_weight": packed, "b_scales": factors, "perm": perm, **routed, "quant_type": "uint4b8"}


def sent(device, call: dict) -> dict:
    return {name: device.send(value) for name, value in call.items()}


def run(device, op: str, call: dict) -> np.ndarray:
    return np.array(device.fetch(device.call(op, sent(device, call))))


def part(call: dict, tokens: slice) -> dict:
    """Some of the tokens alone."""
    first = next(iter(call))
    return call | {name: np.ascontiguousarray(call[name][tokens]) for name in (first, "ids", "weights")}


@OPS
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_a_token_has_its_bytes_in_any_batch(device, op, kind):
    """Alone, unsorted; in low tiles; in taller ones; and beside tokens that are not finite."""
    call = call_of(op, 70, kind)
    whole = run(device, op, call).reshape(70, 2, N)
    for tokens in (slice(0, 1), slice(69, 70), slice(3, 12)):
        assert_bytes(run(device, op, part(call, tokens)).reshape(-1, 2, N), whole[tokens], str(tokens))
    call[next(iter(call))][5] = np.nan
    spoiled = run(device, op, call).reshape(70, 2, N)
    assert np.isnan(spoiled[5].astype(np.float32)).all()
    assert_bytes(np.delete(spoiled, 5, axis=0), np.delete(whole, 5, axis=0))


@OPS
def test_how_pairs_are_tiled_changes_no_byte(op, monkeypatch):
    emulated = EmulatedRuntime()
    call = call_of(op, 20)
    want = run(Emulated(emulated), op, call)
    rings = moe_packed.RINGS
    for ring in rings:
        monkeypatch.setattr(moe_packed, "RINGS", (ring._replace(least=0),))
        assert_bytes(run(Emulated(emulated), op, call), want)
    heights = {f"{ring.high}" for ring in rings}
    assert {end for end in (name.rsplit("_", 1)[1] for name in emulated.launched) if end in heights} == heights


@pytest.mark.parametrize("op, turned", [*((op, False) for op in MODULES), ("moe_wna16_marlin_gemm", True)])
def test_tiles_by_the_warp_group_change_no_byte(op, turned, monkeypatch):
    """Of 120 pairs on two of three experts, on Hopper; groups of 128, or of 64, in an order of their own."""
    emulated, module = EmulatedRuntime(), MODULES[op]
    call = call_of(op, 60)
    if op == "moe_wna16_gemm":
        call["scales"] = np.ascontiguousarray(call["scales"][:, :, :2])
    elif not turned:
        call.pop("perm")
    forms = module.LOADED
    monkeypatch.setattr(module, "LOADED", (forms[0]._replace(least=10**9),))
    want = run(Emulated(emulated), op, call)
    for form in forms:
        monkeypatch.setattr(module, "LOADED", (form._replace(least=1),))
        assert_bytes(run(Emulated(emulated), op, call), want)
        assert [name for name in emulated.launched if name.endswith(form.name)]


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("beside", [(), ("b_bias",), ("weights",), ("b_bias", "weights")], ids=str)
def test_results_are_rounded_where_the_mirror_rounds_them(device, kind, beside):
    """Sum, bias and weight in the results' dtype, in this order: a rounding more or less moves one element in four,
    another order of the sum one in a thousand."""
    tokens, depth = 100, 640
    rng = np.random.Generator(np.random.PCG64(len(beside)))
    call = {
        "a": draw((tokens, depth), kind, 1), "b_q_weight": words(E * depth // 16, 2 * N).reshape(E, depth // 16, 2 * N),
        "b_scales": scales(E * 5, N, kind).reshape(E, 5, N), "b_zeros": words(E * 5, N // 8).reshape(E, 5, N // 8),
        "ids": rng.integers(0, E, (tokens, 2)).astype(np.int32), "quant_type": "uint4",
    }  # fmt: skip
    more = {"b_bias": draw((E, N), kind, 2), "weights": draw((tokens, 2), "float32", 3)}
    call |= {name: more[name] for name in beside}
    got = run(device, "moe_wna16_marlin_gemm", call)
    want = mirror_of("moe_wna16_marlin_gemm", call, device.place)[0][0]
    assert np.mean(got.view(np.uint16) != want.view(np.uint16)) < 0.005


@OPS
@pytest.mark.parametrize("bad", [-2, E, 2**31 - 1])
def test_experts_that_are_not_there(device, op, bad):
    """On the device alone: a call that may wait raises; one that may not makes the row NaN, and no other."""
    call = call_of(op, 9)
    want = run(device, op, call)
    ids = np.array(call["ids"])
    ids[4, 1] = ids[7, 0] = bad
    arrays = sent(device, call | {"ids": ids})
    with pytest.raises(ContractError, match=f"expert {bad} at position 9"):
        past_the_door(device, MODULES[op], op, dict(arrays))
    out = device.send(np.zeros((18, N), want.dtype))
    past_the_door(device, MODULES[op], op, arrays | {"out": out})
    got = device.fetch(out)
    assert np.isnan(got[[9, 14]].astype(np.float32)).all()
    assert_bytes(np.delete(got, [9, 14], axis=0), np.delete(want, [9, 14], axis=0))


@OPS
def test_operands_at_any_address(device, op):
    """Where no 16 bytes move at a time: copies that do."""
    call = call_of(op, 9)
    want = run(device, op, call)
    moved = sent(device, call | {"out": np.zeros_like(want)})
    for name, value in (call | {"out": want}).items():
        if isinstance(value, np.ndarray):
            shift = value.dtype.itemsize
            moved[name] = device.raw(value.nbytes + shift)[shift:].view(value.dtype).reshape(value.shape)
            moved[name][...] = device.send(value)
    assert_bytes(device.fetch(device.call(op, moved)), want)


@OPS
def test_a_capture_waits_for_nobody(op):
    emulated = EmulatedRuntime()
    device, call = Emulated(emulated), call_of(op, 21)
    arrays = sent(device, call) | {"out": emulated.empty((42, N), next(iter(call.values())).dtype)}
    want = np.array(device.call(op, dict(arrays)))
    emulated.in_capture, emulated.read = True, None
    assert_bytes(device.call(op, dict(arrays)), want)


def test_groups_of_no_whole_lane_are_declined():
    call = call_of("moe_wna16_gemm", 3) | {"scales": scales(E * N, 16, "bfloat16").reshape(E, N, 16)}
    marlin = call_of("moe_wna16_marlin_gemm", 3) | {"b_scales": scales(E * 32, N, "bfloat16").reshape(E, 32, N)}
    with runtime.using(EmulatedRuntime()):
        assert moe_wna16.moe_wna16_gemm(**call) is NotImplemented
        assert moe_marlin.moe_wna16_marlin_gemm(**marlin) is NotImplemented


def by_heads(B: int, H: int, D: int, R: int) -> dict:
    rng = np.random.Generator(np.random.PCG64(B))
    a, b = (rng.integers(0, 0x59, shape).astype(np.uint8) for shape in ((B, H, R), (H, D, R)))
    steps = (B, H, R // 128), (H, -(-D // 128), R // 128)
    sa, sb = (rng.uniform(0.01, 0.05, shape).astype(np.float32) for shape in steps)
    return {"a": a, "scale_a": sa, "b": b, "scale_b": sb}


def in_stretches(sizes: list[int], M: int, N: int) -> dict:
    rng, K = np.random.Generator(np.random.PCG64(2)), 256
    a, b = (rng.integers(0, 0x59, (K, width)).astype(np.uint8) for width in (M, N))
    sa, sb = (rng.uniform(0.01, 0.05, (K // 128, width)).astype(np.float32) for width in (M, N))
    return {"a": a, "scale_a": sa, "b": b, "scale_b": sb, "ks": np.int32(sizes)}


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=["by token", "by head"])
@pytest.mark.parametrize("shift", [0, 1])
def test_heads_in_any_layout(device, order, shift):
    """Tokens or heads side by side, scales in columns; codes at any address, where no 16 bytes move at a time in the
    mirror's order."""
    call = by_heads(5, 3, 64, 256)
    want = device.fetch(device.call("fp8_einsum", sent(device, call)))
    laid = call["a"].transpose(order)
    raw = device.raw(laid.size + shift)[shift:].reshape(laid.shape)
    raw[...] = device.send(np.ascontiguousarray(laid))
    columns = device.send(np.ascontiguousarray(call["scale_a"].transpose(2, 1, 0))).transpose(2, 1, 0)
    moved = sent(device, call) | {"a": raw.transpose(order), "scale_a": columns}
    if shift:
        want = mirror_of("fp8_einsum", call, device.place)[0][0]
    assert_bytes(device.fetch(device.call("fp8_einsum", moved)), want)


def test_heads_of_several_launches(device):
    """A launch has tensor maps for eight; each head's results are those it has alone."""
    call = by_heads(3, 10, 64, 256)
    got = device.fetch(device.call("fp8_einsum", sent(device, call)))
    for head in (0, 7, 8, 9):
        own = slice(head, head + 1)
        alone = {"a": call["a"][:, own], "scale_a": call["scale_a"][:, own], "b": call["b"][own],
                 "scale_b": call["scale_b"][own]}  # fmt: skip
        alone = {name: np.ascontiguousarray(value) for name, value in alone.items()}
        assert_bytes(np.ascontiguousarray(got[:, own]), device.fetch(device.call("fp8_einsum", sent(device, alone))))


def test_groups_on_other_gpus_have_the_mirrors_bytes():
    """Where Hopper has tensor cores for them."""
    stretches = in_stretches([128, 128], 16, 32)
    for op, call in (("fp8_einsum", by_heads(5, 3, 64, 256)), ("k_grouped_fp8_gemm_tn", stretches)):
        device = older(capability=(8, 9))
        want = mirror_of(op, call, device.place)[0][0]
        assert_bytes(device.fetch(device.call(op, sent(device, call))), want)


@pytest.mark.parametrize("widths", [(5, 4), (16, 144)], ids=str)
def test_sizes_that_lie_read_nothing_else(device, widths):
    """The host looks where it can; past it, a group ends where the operands do."""
    call = sent(device, in_stretches([128, 128], *widths))
    want = device.fetch(device.call("k_grouped_fp8_gemm_tn", call))
    for sizes, same in (([128, 1 << 20], 2), ([-128, 128], 0), ([64, 128], 0)):
        got = past_the_door(device, fp8_groups, "k_grouped_fp8_gemm_tn", call | {"ks": device.send(np.int32(sizes))})
        assert_bytes(np.array(device.fetch(got))[:same], want[:same])
