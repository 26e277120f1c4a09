"""What a checkpoint says of its quantisation: the scheme of every linear, whichever tool wrote it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vtlab.ops.errors import FormatError

from ..fields import Fields
from .matrix import Scheme

HEAD = "lm_head"


@dataclass(frozen=True)
class Quantization:
    """method : the tool's name for it. choose : a linear's name -> its scheme, None for one that is not quantised."""

    method: str
    choose: Callable[[str], Scheme | None]

    def scheme(self, name: str) -> Scheme | None:
        """The scheme of the linear whose weight would be called `name` + ".weight"; look-ups have none."""
        return None if "embed" in name.rpartition(".")[2] else self.choose(name)


def read(given: Fields) -> Quantization | None:
    """From config.json's `quantization_config` (`compression_config` before), or from the file that older tools wrote
    beside it. Errors: FormatError, naming the field, for a method or settings that no scheme honours."""
    from . import compressed, gptq_awq, tensor_fp8

    methods: Mapping[str, Callable[[Fields], Quantization]] = {
        "gptq": gptq_awq.gptq, "awq": gptq_awq.awq, "compressed-tensors": compressed.read, "fp8": tensor_fp8.fp8,
        "modelopt": tensor_fp8.modelopt, "modelopt_fp4": tensor_fp8.modelopt,
    }  # fmt: skip
    for name in ("quantization_config", "compression_config"):
        if given.get(name) is not None:
            fields = given.within(name)
            return methods[fields.only("quant_method", tuple(methods))](fields)
    for name, method in (("hf_quant_config.json", "modelopt"), ("quantize_config.json", "gptq")):
        beside = Path(given.file).with_name(name)
        if beside.is_file():
            return methods[method](Fields(_json(beside), beside))
    return None


def _json(file: Path) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(file, None, file.name, error, "JSON") from None


def names(given: Fields, *fields: str) -> tuple[str, ...]:
    """The list of strings under the first of these fields that is there."""
    for field in fields:
        value = given.get(field)
        if value is not None:
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise given.error(field, value, "a list of names")
            return tuple(value)
    return ()


def no_cache_scales(given: Fields, *fields: str) -> None:
    """Refuse keys and values of 8 bits: caches are in the model's dtype."""
    for field in fields:
        given.only(field, (None,))
