"""One quantised weight goes through every packing there is: codes come back, and the products are one product."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vtlab import ops, oracle

from .compare import assert_bytes, assert_nmse
from .scalar import draw

K, N = 256, 128
BF16 = ml_dtypes.bfloat16
NMSE = (3 * 2.0**-9) ** 2  # a weight and a result round to bfloat16 once each, Machete's zeros beside them
ARITHMETICS = ["truth", "mirror", "ops"]


def call(how: str, op: str, *args, **kwargs):
    found = {"truth": getattr(oracle, op), "mirror": getattr(oracle, op).mirror, "ops": getattr(ops, op)}[how]
    return found(*args, **kwargs)


def weight(quant_type: str, group_size: int):
    """(x, what it should give, codes [K, N], scales, zero points or None, bits)."""
    w, x = draw((K, N), "bfloat16", 1), draw((5, K), "bfloat16", 2)
    reference, q, scales, *zeros = oracle.quantize_weights(w, quant_type=quant_type, group_size=group_size)
    exact = x.astype(np.float64) @ reference.astype(np.float64)
    assert_nmse(exact, x.astype(np.float64) @ w.astype(np.float64), 0.02)
    return x, exact, q, scales, zeros[0] if zeros else None, 8 if "8" in quant_type[4:5] else 4


@pytest.mark.parametrize("how", ARITHMETICS)
@pytest.mark.parametrize(
    ("quant_type", "group_size"), [("uint4b8", 64), ("uint8b128", -1), ("uint4", 64), ("uint4", -1)]
)
def test_a_weight_in_every_packing_is_one_product(quant_type, group_size, how):
    x, exact, q, scales, zeros, bits = weight(quant_type, group_size)
    packed = oracle.gptq_pack(q, bits=bits)
    assert_bytes(oracle.gptq_unpack(packed, bits=bits), q)

    marlin = call(how, "gptq_marlin_repack", packed, bits=bits)
    assert_bytes(call(how, "marlin_unpack", marlin, bits=bits), q)
    permuted = call(how, "marlin_permute_scales", scales, size_k=K, group_size=group_size)
    points = None if zeros is None else call(how, "marlin_zero_points", zeros, bits=bits)
    products = {"marlin": call(how, "marlin_gemm", x, marlin, permuted, points, quant_type=quant_type)}

    machete = call(how, "machete_prepack_b", packed, bits=bits)
    assert_bytes(call(how, "machete_unpack_b", machete, bits=bits), packed)
    added = None if zeros is None else (-zeros * scales.astype(np.float32)).astype(BF16)
    products["machete"] = call(how, "machete_mm", x, machete, scales, added, quant_type=quant_type)

    midpoint = np.full(scales.shape, 1 << (bits - 1), np.int32) if zeros is None else zeros
    stored = oracle.awq_pack(midpoint, bits=bits, interleaved=False)  # GPTQ's zero points lie along N, as these
    products["gptq"] = call(how, "gptq_gemm", x, packed, stored, scales, bits=bits, use_v2_format=True)
    if bits == 4:
        words, points = (oracle.awq_pack(one, bits=4) for one in (q, midpoint))
        assert_bytes(oracle.awq_unpack(words, bits=4), q)
        products["awq"] = call(how, "awq_gemm", x, words, scales, points)
        assert_bytes(call(how, "awq_marlin_repack", words, bits=4), marlin)
        if zeros is not None:
            assert_bytes(call(how, "awq_to_marlin_zero_points", points, bits=4),
                         call(how, "marlin_zero_points", zeros, bits=4))  # fmt: skip
    if quant_type == "uint8b128":
        bytes_, row = call(how, "allspark_repack_weight", q.astype(np.uint8), scales)[:2]
        assert_bytes(call(how, "allspark_unpack_weight", bytes_, row, n=N)[0], q.astype(np.uint8))
        products["allspark"] = call(how, "allspark_w8a16_gemm", x, bytes_, row, n=N)
    for name, product in products.items():
        assert_nmse(product, exact, NMSE, name)


@pytest.mark.parametrize("how", ARITHMETICS)
def test_a_weight_in_activation_order_is_one_product(how):
    """Rows belong to groups in any order: as they lie, shuffled by exllama, and sorted for Marlin."""
    x, _, q, scales, _, _ = weight("uint4b8", 64)
    groups = np.random.default_rng(3).permutation(K).astype(np.int32) // 64
    exact = x.astype(np.float64) @ ((q - 8) * scales.astype(np.float64)[groups])
    packed = oracle.gptq_pack(q, bits=4)
    stored = oracle.awq_pack(np.full((4, N), 8, np.int32), bits=4, interleaved=False)
    zeros = {"bits": 4, "use_v2_format": True}
    products = {"as they lie": call(how, "gptq_gemm", x, packed, stored, scales, groups, **zeros)}

    order = np.argsort(groups, kind="stable").astype(np.int32)
    shuffled = call(how, "gptq_shuffle", packed, order, bits=4)
    assert_bytes(call(how, "gptq_unshuffle", shuffled, order, bits=4), packed)
    products["exllama"] = call(how, "gptq_gemm", x, shuffled, stored, scales, order, use_exllama=True, **zeros)

    marlin = call(how, "gptq_marlin_repack", packed, order, bits=4)
    assert_bytes(call(how, "marlin_unpack", marlin, bits=4), q[order])
    permuted = call(how, "marlin_permute_scales", scales, size_k=K, group_size=64)
    products["marlin"] = call(how, "marlin_gemm", x, marlin, permuted, perm=order, quant_type="uint4b8")
    for name, product in products.items():
        assert_nmse(product, exact, NMSE, name)
