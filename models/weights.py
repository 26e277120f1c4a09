"""A checkpoint's tensors in the form that a forward wants: merged projections, one dtype, GGUF's transforms undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import numpy as np

from vtlab.gguf.dequant import dequantize
from vtlab.ops.dtypes import dtype as dtype_of
from vtlab.ops.errors import FormatError
from vtlab.ops.numerics import round_to

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
    def from_tensors(cls, config: ModelConfig, tensors: Mapping[str, np.ndarray], dtype: str = "float32") -> Weights:
        """From arrays by Hugging Face name.

        Errors: FormatError, before any tensor is read, for a missing or extra tensor, a wrong shape, a dtype that
        is no float.
        """
        tensors = FAMILIES[config.family].renamed(config, tensors)
        wanted = _check(config, tensors, gguf=False)
        for slot in (slot for slot in wanted if slot.hf):
            kind = np.dtype(tensors[slot.hf].dtype).name
            if kind not in _READABLE:
                raise FormatError(config.file, None, slot.hf, f"dtype {kind}", " or ".join(_READABLE))

        def read(slot: Slot) -> np.ndarray:
            data = tensors[slot.hf]
            return data if slot.from_hf is None else slot.from_hf(data)

        return _assemble(config, wanted, read, dtype, config.rope)

    @classmethod
    def from_gguf(cls, config: ModelConfig, gguf, dtype: str = "float32", blocks: bool = False) -> Weights:
        """From an open GGUF file, rows put into Hugging Face's order.

        blocks : matrices whose parts are all in block types stay in the file's blocks, neighbouring parts of one type
        joined, and a lone one in the mapped file; what else there is, and all of it by default, is dequantized.
        Errors: FormatError, before any tensor is read, for a missing or extra tensor or a wrong shape; ContractError
        for blocks in a dtype that their products do not give.
        """
        wanted = _check(config, gguf.tensors, gguf=True)
        if blocks:
            check_dtype(dtype_of(dtype))

        def read(slot: Slot) -> np.ndarray:
            data = dequantize(gguf.tensors[slot.gguf])
            return data if slot.gguf_rows is None else data[slot.gguf_rows]

        def kept(slots: list[Slot]) -> tuple[Blocks, ...] | None:
            tensors = [gguf.tensors.get(slot.gguf) for slot in slots]
            if None in tensors or not stays([tensor.type for tensor in tensors]):
                return None
            rows = [slice(None) if slot.gguf_rows is None else slot.gguf_rows for slot in slots]
            return joined([Blocks(tensor.type, tensor.data[which]) for tensor, which in zip(tensors, rows)])

        rope = FAMILIES[config.family].gguf_rope(config, gguf)
        return _assemble(config, wanted, read, dtype, rope, kept if blocks else None)


def _check(config: ModelConfig, tensors: Mapping, *, gguf: bool) -> list[Slot]:
    """The slots that the file fills, and constants."""
    family = FAMILIES[config.family]
    slots = list(family.slots(config))
    wanted = [slot for slot in slots if slot.name(gguf)]
    names = {slot.name(gguf) for slot in wanted}
    missing = sorted(names - set(tensors))
    if missing:
        raise FormatError(config.file, None, missing[0], f"no such tensor ({len(missing)} missing)", "a tensor")
    extra = sorted(name for name in set(tensors) - names if not family.ignored(config, name, gguf))
    if extra:
        got = f"a tensor that a {config.family} model has no use for ({len(extra)} of them)"
        raise FormatError(config.file, None, extra[0], got, f"the {len(names)} tensors of its configuration")
    for slot in wanted:
        shape = tuple(tensors[slot.name(gguf)].shape)
        if shape != slot.shape:
            raise FormatError(config.file, None, slot.name(gguf), f"shape {shape}", f"shape {slot.shape}")
    return [slot for slot in slots if slot.name(gguf) or slot.constant is not None]


def _assemble(
    config: ModelConfig,
    wanted: list[Slot],
    read: Callable[[Slot], np.ndarray],
    dtype: str,
    rope: Mapping,
    kept: Callable[[list[Slot]], tuple[Blocks, ...] | None] | None = None,
) -> Weights:
    """kept : the blocks of a matrix's slots, or None where it is to be read."""
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
        bias = None if bias is None else _cast(merged(bias), np.dtype(np.float32))
        blocks = kept(slots) if kept is not None and len(slots[0].shape) == 2 else None
        if blocks is not None:
            return BlockLinear(blocks, bias, dtype_of(dtype))
        data = merged(slots)
        if data.ndim == 1:
            return float(data[0]) if slots[0].scalar else data
        return Linear(data, bias)

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
