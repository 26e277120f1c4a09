"""A checkpoint's tensors in the form that a forward wants: merged projections, one dtype, GGUF's transforms undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import numpy as np

from vtlab.gguf.dequant import TYPES, dequantize
from vtlab.ops.dtypes import dtype as dtype_of
from vtlab.ops.errors import FormatError
from vtlab.ops.numerics import round_to

from . import quant
from .block_linear import BlockLinear, Blocks, check_dtype, joined, stays
from .config import ModelConfig
from .families import FAMILIES
from .linear import Linear
from .slots import Slot

_READABLE = ("float32", "bfloat16", "float16", "float64")


class Layer(SimpleNamespace):
    """The tensors of one layer by the targets of its family's slots: a `Linear` for a matrix, an array for a vector,
    a float for a scalar.

    qkv and gate_up are single linears; Gemma's norm weights are kept as float32(1 + w).
    """

    def get(self, target: str):
        """The tensor, or None where this layer has none."""
        return vars(self).get(target)

    def mapped(self, function: Callable) -> Layer:
        """The same layer with every tensor replaced by function(tensor)."""
        return type(self)(**{name: function(value) for name, value in vars(self).items()})


class Weights(Layer):
    """All tensors of a model: `embed`, `norm`, `head` (which is `embed` where embeddings are tied), what else its
    family has outside of layers, and `layers`.

    rope : layer kind -> rope_parameters, with a GGUF file's frequency divisors worked in.
    """

    def mapped(self, function: Callable[[np.ndarray], object]) -> Weights:
        """The same weights with every array replaced by function(array), once where two names share it."""
        done: dict[int, object] = {}

        def once(value):
            if isinstance(value, float):
                return value
            if id(value) not in done:
                done[id(value)] = value.mapped(once) if isinstance(value, Linear) else function(value)
            return done[id(value)]

        kept = {name: value for name, value in vars(self).items() if name not in ("layers", "rope")}
        layers = tuple(layer.mapped(once) for layer in self.layers)
        return Weights(**{name: once(value) for name, value in kept.items()}, layers=layers, rope=self.rope)

    @classmethod
    def from_tensors(
        cls, config: ModelConfig, tensors: Mapping[str, np.ndarray], dtype: str = "float32", packed: bool = False
    ) -> Weights:
        """From arrays by Hugging Face name.

        packed : quantised matrices stay in their format, and activations meet them as it says; by default they are
        expanded.
        Errors: FormatError, before any tensor is read, for a missing or extra tensor, a wrong shape, a dtype that
        is no float, or not the one of its format; then for numbers that mean nothing in a format. ContractError for
        packed weights that the checkpoint does not have, or in float32.
        """
        if packed:
            quant.check_dtype(config, dtype_of(dtype))
        tensors = FAMILIES[config.family].renamed(config, tensors)
        held = quant.Quantised(config, FAMILIES[config.family].slots(config), tensors)
        wanted = _check(config, tensors, gguf=False, held=held)
        for slot in (slot for slot in wanted if slot.hf and slot.hf not in held.sites):
            kind = np.dtype(tensors[slot.hf].dtype).name
            if kind not in _READABLE:
                raise FormatError(config.file, None, slot.hf, f"dtype {kind}", " or ".join(_READABLE))

        def read(slot: Slot) -> np.ndarray:
            data = tensors[slot.hf]
            return data if slot.from_hf is None else slot.from_hf(data)

        def kept(slots: list[Slot], bias: np.ndarray | None) -> Linear | None:
            return held.linear(slots, bias, dtype_of(dtype), packed)

        return _assemble(config, wanted, read, dtype, config.rope, kept)

    @classmethod
    def from_gguf(cls, config: ModelConfig, gguf, dtype: str = "float32", blocks: bool = False) -> Weights:
        """From an open GGUF file, rows put into Hugging Face's order.

        blocks : matrices whose parts are all in block types stay in the file's blocks, neighbouring parts of one type
        joined, and a lone one in the mapped file; what else there is, and all of it by default, is dequantized.
        Errors: FormatError, before any tensor is read, for a missing or extra tensor, a wrong shape or a type that
        nothing here decodes; ContractError for blocks in a dtype that their products do not give.
        """
        wanted = _check(config, gguf.tensors, gguf=True)
        for tensor in (gguf.tensors[slot.gguf] for slot in wanted if slot.gguf):
            if tensor.type not in TYPES:
                raise FormatError(
                    config.file, tensor.offset, tensor.name, f"type {tensor.type}", "one of " + ", ".join(TYPES)
                )
        if blocks:
            check_dtype(dtype_of(dtype))

        def read(slot: Slot) -> np.ndarray:
            data = dequantize(gguf.tensors[slot.gguf])
            return data if slot.gguf_rows is None else data[slot.gguf_rows]

        def kept(slots: list[Slot], bias: np.ndarray | None) -> Linear | None:
            tensors = [gguf.tensors.get(slot.gguf) for slot in slots]
            if None in tensors or not stays([tensor.type for tensor in tensors]):
                return None
            rows = [slice(None) if slot.gguf_rows is None else slot.gguf_rows for slot in slots]
            parts = joined([Blocks(tensor.type, tensor.data[which]) for tensor, which in zip(tensors, rows)])
            return BlockLinear(parts, None if bias is None else bias.astype(np.float32), dtype_of(dtype))

        rope = FAMILIES[config.family].gguf_rope(config, gguf)
        return _assemble(config, wanted, read, dtype, rope, kept if blocks else lambda slots, bias: None)


def _check(config: ModelConfig, tensors: Mapping, *, gguf: bool, held: quant.Quantised | None = None) -> list[Slot]:
    """The slots that the file fills, and constants. held : those that it has in quantised form."""
    family = FAMILIES[config.family]
    slots = list(family.slots(config))
    wanted = [slot for slot in slots if slot.name(gguf) and not (held and slot.hf in held.sites)]
    names = {slot.name(gguf) for slot in wanted} | (held.names(optional=False) if held else set())
    missing = sorted(names - set(tensors))
    if missing:
        raise FormatError(config.file, None, missing[0], _absent(missing, set(tensors) - names), "a tensor")
    maybe = held.names(optional=True) if held else set()
    extra = sorted(name for name in set(tensors) - names - maybe if not family.ignored(config, name, gguf))
    if held:
        held.refuse_cache_scales(extra)
    if extra:
        got = f"a tensor that a {config.family} model has no use for ({len(extra)} of them)"
        raise FormatError(config.file, None, extra[0], got, f"the {len(names)} tensors of its configuration")
    for slot in wanted:
        shape = tuple(tensors[slot.name(gguf)].shape)
        if shape != slot.shape:
            raise FormatError(config.file, None, slot.name(gguf), f"shape {shape}", f"shape {slot.shape}")
    if held:
        held.check()
    return [slot for slot in slots if slot.name(gguf) or slot.constant is not None]


def _absent(missing: list[str], others: set[str]) -> str:
    """What is said of the first of them, with the tensors beside it that the model has no use for."""
    module = missing[0].rpartition(".")[0]
    found = (name.rpartition(".") for name in others)
    beside = sorted(last for within, _, last in found if module and within == module)
    count = "" if len(missing) == 1 else f", one of {len(missing)} that are missing"
    return f"no such tensor{count}" + (f"; beside it {', '.join(beside)}" if beside else "")


def _assemble(
    config: ModelConfig,
    wanted: list[Slot],
    read: Callable[[Slot], np.ndarray],
    dtype: str,
    rope: Mapping,
    kept: Callable[[list[Slot], np.ndarray | None], Linear | None],
) -> Weights:
    """kept : (a matrix's slots, its bias) -> what they stay in, or None where they are to be read."""
    parts: dict[int | None, dict[str, list[Slot]]] = {None: {}}
    for slot in wanted:
        parts.setdefault(slot.layer, {}).setdefault(slot.target, []).append(slot)

    def values(slot: Slot) -> np.ndarray:
        return read(slot) if slot.constant is None else slot.constant

    def merged(slots: list[Slot]) -> np.ndarray:
        """The parts in one array, each released once it is copied; a single matrix is not copied."""
        kind = dtype_of(slots[0].dtype or dtype)
        if len(slots) == 1:
            data = np.ascontiguousarray(_cast(values(slots[0]), kind))
            return data.copy() if data.ndim == 1 else data
        out = np.empty((sum(slot.shape[0] for slot in slots), *slots[0].shape[1:]), kind)
        row = 0
        for slot in slots:
            out[row : row + slot.shape[0]] = _cast(values(slot), kind)
            row += slot.shape[0]
        return out

    def tensor(found: dict[str, list[Slot]], target: str):
        slots, bias = found[target], found.get(f"{target}_bias")
        bias = None if bias is None else merged(bias)
        linear = kept(slots, bias) if len(slots[0].shape) == 2 else None
        if linear is not None:
            return linear
        data = merged(slots)
        if data.ndim == 1:
            return float(data[0]) if slots[0].scalar else data
        return Linear(data, None if bias is None else _cast(bias, np.dtype(np.float32)))

    def tensors(found: dict[str, list[Slot]]) -> dict[str, object]:
        biases = {f"{target}_bias" for target, slots in found.items() if len(slots[0].shape) == 2}
        return {target: tensor(found, target) for target in found if target not in biases}

    outside = tensors(parts.pop(None))
    outside.setdefault("head", outside["embed"])
    layers = tuple(Layer(**tensors(parts.get(index, {}))) for index in range(len(config.layers)))
    return Weights(**outside, layers=layers, rope=rope)


def _cast(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The values in `dtype`, rounded once to nearest even where it is narrower."""
    if data.dtype == dtype:
        return data
    if dtype == np.float32 and data.dtype != np.float64:
        return data.astype(np.float32)
    return round_to(np.asarray(data, np.float64), dtype)
