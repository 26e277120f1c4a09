"""The settings of compressed-tensors, which llm-compressor writes: groups of targets, each with a scheme."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..fields import Fields
from .fp4 import MX_BLOCK, Mxfp4, Nvfp4
from .matrix import Scheme
from .settings import Quantization, names, no_cache_scales
from .tensor_fp8 import block_size
from .w8a8 import W8A8Blocks, W8A8Fp8, W8A8Int8
from .wna16 import PackQuantized

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
            "mxfp4-pack-quantized")  # fmt: skip


def read(given: Fields) -> Quantization:
    """A linear's group is the first whose targets name it or match its name ("re:…"), else the one for "Linear"."""
    no_cache_scales(given, "kv_cache_scheme")
    if given.get("transform_config"):
        raise given.error("transform_config", given.get("transform_config"), "nothing")
    if given.get("sparsity_config"):  # where older tools note how many zeros they counted: "dense" stores them, too
        given.within("sparsity_config").only("format", ("dense",))
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise given.error("config_groups", groups, "groups of targets")
    targets: dict[str, Scheme] = {}
    for name in groups:
        group = given.within("config_groups").within(name)
        scheme = _scheme(group, given)
        targets |= {target: scheme for target in names(group, "targets") if target not in targets}
    for target in targets:
        if not target.startswith("re:") and "." not in target and target not in ("Linear", "lm_head"):
            raise given.error("config_groups.targets", target, "'Linear', names of linears, 're:' and a pattern")
    ignore = names(given, "ignore")
    for entry in (*targets, *ignore):
        _compiled(given, entry)

    def choose(name: str) -> Scheme | None:
        if any(_matches(entry, name) for entry in ignore):
            return None
        named = (scheme for target, scheme in targets.items() if _matches(target, name))
        return next(named, targets.get("Linear"))

    return Quantization("compressed-tensors", choose)


def _compiled(given: Fields, entry: str) -> None:
    try:
        re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
    except re.error as problem:
        raise given.error("config_groups", entry, f"a regular expression ({problem})") from None


def _matches(entry: str, name: str) -> bool:
    return re.match(entry[3:], name) is not None if entry.startswith("re:") else entry == name


def _scheme(group: Fields, whole: Fields) -> Scheme:
    of = group if group.given("format") else whole
    name = of.only("format", _FORMATS)
    group.only("output_activations", (None,))
    weights = group.within("weights")
    given = group.within("input_activations") if group.get("input_activations") is not None else None
    weights.only("dynamic", (False,), False)
    if name == "nvfp4-pack-quantized":
        return _nvfp4(weights, given)
    if name == "mxfp4-pack-quantized":
        return _mxfp4(weights, given)
    if name == "pack-quantized":
        return _words(weights, group)
    if weights.only("type", ("int", "float")) == "int":
        return _int8(weights, group, given)
    return _fp8(weights, given)


def _grid(weights: Fields, given: Fields | None, bits: int, kind: str, strategy: str, size: int) -> None:
    for fields in (weights, given):
        if fields is not None:
            fields.only("num_bits", (bits,))
            fields.only("type", (kind,))
            fields.only("symmetric", (True,), True)
            fields.only("strategy", (strategy,))
            fields.only("group_size", (size,))


def _nvfp4(weights: Fields, given: Fields | None) -> Scheme:
    _grid(weights, given, 4, "float", "tensor_group", 16)
    return Nvfp4(modelopt=False, quantised=given is not None)


def _mxfp4(weights: Fields, given: Fields | None) -> Scheme:
    _grid(weights, given, 4, "float", "group", MX_BLOCK)
    if given is not None:
        given.only("dynamic", (True,))
    return Mxfp4(quantised=given is not None)


def _words(weights: Fields, group: Fields) -> Scheme:
    group.only("input_activations", (None,))
    weights.only("type", ("int",), "int")
    channel = weights.only("strategy", ("group", "channel")) == "channel"
    size = -1 if channel else weights.integer("group_size")
    if size != -1 and size < 1:
        raise weights.error("group_size", size, "at least 1")
    order = weights.only("actorder", ("group", "dynamic", "weight", "static", True, False, None))
    bits, symmetric = weights.only("num_bits", (4, 8)), weights.flag("symmetric", True)
    return PackQuantized(bits, size, symmetric, order in ("group", "dynamic", True))


def _int8(weights: Fields, group: Fields, given: Fields | None) -> Scheme:
    if given is None:
        raise group.error("input_activations", None, "int8 activations for int8 weights that are not packed")
    weights.only("symmetric", (True,), True)
    channels = weights.only("strategy", ("tensor", "channel")) == "channel"
    for fields in (weights, given):
        fields.only("num_bits", (8,))
        fields.only("type", ("int",), "int")
    static = not given.flag("dynamic")
    given.only("strategy", ("tensor" if static else "token",))
    return W8A8Int8(channels, static, given.flag("symmetric", True))


def _fp8(weights: Fields, given: Fields | None) -> Scheme:
    strategy = weights.only("strategy", ("tensor", "channel", "block"))
    for fields in (weights, given):
        if fields is not None:
            fields.only("num_bits", (8,))
            fields.only("type", ("float",))
            fields.only("symmetric", (True,), True)
    if strategy == "block":
        block = block_size(weights, "block_structure", weights.get("block_structure"))
        if given is not None:
            given.only("dynamic", (True,))
            given.only("strategy", ("group",))
            given.only("group_size", (block[1],))
        return W8A8Blocks(block, "weight_scale", packed=given is not None)
    static = given is not None and not given.flag("dynamic")
    if given is not None:
        given.only("strategy", ("tensor" if static else "token",))
    return W8A8Fp8(strategy == "channel", static, packed=given is not None)
