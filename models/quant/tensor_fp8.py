"""The settings of AutoFP8, DeepSeek and transformers ("fp8"), and of NVIDIA's ModelOpt."""

from __future__ import annotations

from fnmatch import fnmatch

from ..fields import Fields
from .fp4 import Nvfp4
from .matrix import Scheme
from .settings import HEAD, Quantization, names, no_cache_scales
from .w8a8 import W8A8Blocks, W8A8Fp8


def fp8(given: Fields) -> Quantization:
    """e4m3 with a scale for a tensor, or in blocks with `weight_scale_inv`; the head is never quantised."""
    given.only("fmt", ("e4m3",), "e4m3")
    block, static = given.get("weight_block_size"), given.only("activation_scheme", ("static", "dynamic")) == "static"
    scheme: Scheme = W8A8Fp8(channels=False, static=static)
    if block is not None:
        given.only("activation_scheme", ("dynamic",))
        scheme = W8A8Blocks(block_size(given, "weight_block_size", block), "weight_scale_inv")
    left = names(given, "ignored_layers", "modules_to_not_convert")

    def choose(name: str) -> Scheme | None:
        return None if name == HEAD or any(name == one or name.startswith(f"{one}.") for one in left) else scheme

    return Quantization("fp8", choose)


def block_size(given: Fields, field: str, value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise given.error(field, value, "[rows, columns] of at least 1")
    return value[0], value[1]


_MODELOPT = {
    "FP8": W8A8Fp8(channels=False, static=True),
    "NVFP4": Nvfp4(modelopt=True, quantised=True),
    "W4A16_NVFP4": Nvfp4(modelopt=True, quantised=False),
}


def modelopt(given: Fields) -> Quantization:
    """`exclude_modules` and `ignore` are wildcards, or names that linears lie within."""
    given = given.within("quantization") if given.get("quantization") is not None else given
    algorithm = str(given.get("quant_algo")).upper()
    if algorithm not in _MODELOPT:
        raise given.error("quant_algo", given.get("quant_algo"), " or ".join(_MODELOPT))
    if "FP4" in algorithm:
        given.only("group_size", (16,), 16)
    no_cache_scales(given, "kv_cache_quant_algo", "kv_cache_scheme")
    left = names(given, "exclude_modules", "ignore")

    def choose(name: str) -> Scheme | None:
        within = any(name == one or name.startswith(f"{one}.") or fnmatch(name, one) for one in left)
        return None if within else _MODELOPT[algorithm]

    return Quantization("modelopt", choose)
