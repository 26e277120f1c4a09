"""The settings of GPTQModel, AutoGPTQ and AutoAWQ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain

from ..fields import Fields
from .matrix import Scheme
from .settings import HEAD, Quantization, names
from .wna16 import Awq, Gptq

_FORMATS = ("gptq", "gptq_v2")


def gptq(given: Fields) -> Quantization:
    """GPTQModel's `dynamic` rules are honoured: "-:regex" leaves a linear as it is, "+:regex" changes its numbers."""
    given.only("pack_dtype", ("int32",), "int32")
    given.only("is_marlin_format", (False,), False)
    default, head = _gptq(given, {}), given.flag("lm_head")
    rules = _dynamic(given)
    listed = _listed(given, "modules_in_block_to_quantize")

    def choose(name: str) -> Scheme | None:
        for skips, pattern, scheme in rules:
            if pattern.match(name):
                return None if skips else scheme
        if name == HEAD:
            return default if head else None
        return default if listed is None or any(one in name for one in listed) else None

    return Quantization("gptq", choose)


def _gptq(given: Fields, other: Mapping) -> Gptq:
    given = Fields({**given.data, **{given.prefix + key: value for key, value in other.items()}}, given.file,
                   given.prefix)  # fmt: skip
    bits, group_size = given.only("bits", (2, 3, 4, 8)), given.integer("group_size")
    if group_size != -1 and group_size < 1:
        raise given.error("group_size", group_size, "-1 or at least 1")
    name = "checkpoint_format" if given.given("checkpoint_format") else "format"
    v2 = given.only(name, _FORMATS, "gptq") == "gptq_v2"
    order = given.flag("desc_act") and group_size != -1
    return Gptq(bits, group_size, given.flag("sym", True), order, v2)


def _listed(given: Fields, field: str) -> tuple[str, ...] | None:
    """Names in one list or in lists of lists, None where the file has none."""
    value = given.get(field)
    if value is None:
        return None
    inner = [[one] if isinstance(one, str) else one for one in value] if isinstance(value, list) else [value]
    if not all(isinstance(one, list) and all(isinstance(name, str) for name in one) for one in inner):
        raise given.error(field, value, "a list of names, or of lists of names")
    return tuple(chain.from_iterable(inner))


def _dynamic(given: Fields) -> tuple[tuple[bool, re.Pattern, Gptq], ...]:
    rules = given.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise given.error("dynamic", rules, "an object of rules")
    found = []
    for key, other in rules.items():
        text = key[2:] if key[:2] in ("+:", "-:") else key
        try:
            pattern = re.compile(text)
        except re.error as problem:
            raise given.error("dynamic", key, f"regular expressions ({problem})") from None
        if not isinstance(other or {}, Mapping):
            raise given.error(f"dynamic[{key!r}]", other, "an object of settings")
        found.append((key.startswith("-:"), pattern, _gptq(given, other or {})))
    return tuple(found)


def awq(given: Fields) -> Quantization:
    """Four bits in the layout of AWQ's GEMM kernel; `modules_to_not_convert` names parts of names."""
    given.only("w_bit" if given.given("w_bit") else "bits", (4,))
    size = given.integer("q_group_size" if given.given("q_group_size") else "group_size")
    given.only("zero_point", (True,), True)
    name = "version" if given.given("version") else "format"
    if str(given.get(name) or "gemm").lower() != "gemm":
        raise given.error(name, given.get(name), "'gemm'")
    if size != -1 and size < 1:
        raise given.error("group_size", size, "-1 or at least 1")
    scheme, left, head = Awq(size), names(given, "modules_to_not_convert"), given.flag("lm_head")

    def choose(name: str) -> Scheme | None:
        if (name == HEAD and not head) or any(one in name for one in left):
            return None
        return scheme

    return Quantization("awq", choose)
