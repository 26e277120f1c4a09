"""The quantised linears of a checkpoint: which slots they fill, whether their tensors fit, and what they become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from vtlab import ops
from vtlab.ops.errors import ContractError, FormatError

from ..config import ModelConfig
from ..linear import Linear
from ..slots import Slot
from .matrix import QuantLinear, Scheme, joined
from .stored import FLOATS, Part, Site, Stored

_WEIGHT = ".weight"
_CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "prob_scale", "output_scale")


class Quantised:
    """Sites by the name that the weight would have. Errors: FormatError for parts of one linear that are stored in
    different ways, for shapes that a format does not have."""

    def __init__(self, config: ModelConfig, slots: Iterable[Slot], tensors: Mapping[str, np.ndarray]):
        self._tensors, self._file = tensors, config.file
        self.sites: dict[str, tuple[Scheme, Site]] = {}
        self._stored: dict[str, Mapping[str, Stored]] = {}
        if config.quantization is None:
            return
        slots = list(slots)
        biases = {slot.hf for slot in slots if len(slot.shape) == 1}
        first: dict[tuple, tuple[str, Scheme | None]] = {}
        for slot in slots:
            if slot.hf is None or len(slot.shape) != 2 or not slot.hf.endswith(_WEIGHT):
                continue
            name = slot.hf.removesuffix(_WEIGHT)
            scheme = config.quantization.scheme(name)
            other, same = first.setdefault((slot.layer, slot.target), (name, scheme))
            if scheme != same:
                got, want = scheme or "not quantised", f"{same or 'not quantised'}, as {other}: they are one linear"
                raise FormatError(config.file, None, name, got, want)
            if scheme is not None:
                self._add(slot.hf, scheme, Site(config.file, name, *slot.shape), f"{name}.bias" in biases)

    def _add(self, weight: str, scheme: Scheme, site: Site, biased: bool) -> None:
        found = dict(scheme.stored(site))
        if not biased:
            found["bias"] = Stored((site.rows,), FLOATS, optional=True)
        self.sites[weight], self._stored[weight] = (scheme, site), found

    def names(self, *, optional: bool) -> set[str]:
        """The tensors that they must have, or may have."""
        return {
            f"{site.module}.{suffix}"
            for weight, (_, site) in self.sites.items()
            for suffix, stored in self._stored[weight].items()
            if stored.optional == optional
        }

    def check(self) -> None:
        """Errors: FormatError for a shape or a dtype other than the configuration's."""
        for weight, (_, site) in self.sites.items():
            for suffix, stored in self._stored[weight].items():
                data = self._tensors.get(f"{site.module}.{suffix}")
                if data is None:
                    continue
                file = self._file_of(f"{site.module}.{suffix}")
                if not stored.fits(tuple(data.shape)):
                    raise site.error(suffix, f"shape {tuple(data.shape)}", stored, file)
                if np.dtype(data.dtype).name not in stored.dtypes:
                    raise site.error(suffix, f"dtype {np.dtype(data.dtype).name}", " or ".join(stored.dtypes), file)

    def refuse_cache_scales(self, extra: Iterable[str]) -> None:
        """Errors: FormatError for scales of keys and values of eight bits, which no cache here has."""
        for name in extra:
            if self.sites and name.rpartition(".")[2] in _CACHE_SCALES:
                got = "a scale of quantised keys and values"
                raise FormatError(self._file_of(name), None, name, got, "a cache in the model's dtype")

    def linear(self, slots: Sequence[Slot], bias: np.ndarray | None, dtype: np.dtype, packed: bool) -> Linear | None:
        """The linear of these slots, or None where they are not quantised.

        bias : in `dtype`. packed : leave the matrix to its format's op, where it has one; else W is expanded.
        """
        if slots[0].hf not in self.sites:
            return None
        found = [self.sites[slot.hf] for slot in slots]
        parts = [scheme.matrix(self._part(scheme, site), dtype) for scheme, site in found]
        if packed and found[0][0].packed and not any(_expanded(slot) for slot in slots):
            return QuantLinear(joined(parts), bias, dtype)
        wide = [part.expanded() for part in parts]
        weight = [data if slot.from_hf is None else slot.from_hf(data) for slot, data in zip(slots, wide)]
        bias = None if bias is None else bias.astype(np.float32)
        return Linear(weight[0] if len(weight) == 1 else np.concatenate(weight), bias)

    def _part(self, scheme: Scheme, site: Site) -> Part:
        names = {suffix: f"{site.module}.{suffix}" for suffix in self._stored[site.module + _WEIGHT]}
        held = {suffix: self._tensors[name] for suffix, name in names.items() if name in self._tensors}
        part = Part(site, held, {suffix: self._file_of(name) for suffix, name in names.items()})
        if "bias" in held and held["bias"].any():
            raise part.error("bias", "numbers other than 0", "no bias: the model has none")
        return part

    def _file_of(self, name: str) -> str | Path:
        owner = getattr(self._tensors, "file_of", None)
        return owner(name) if owner is not None and name in self._tensors else self._file


def _expanded(slot: Slot) -> bool:
    """Experts have a product of their own, and rows that a family rearranges lie in its order only once expanded."""
    return slot.from_hf is not None or slot.target.startswith("experts")


def default_weights(config: ModelConfig, slots: Iterable[Slot], dtype: str, device: str) -> str:
    """What `load` does by itself: "packed" where activations of eight or four bits belong to the format, or the device
    has an op for every packed weight; else "dequantized", which gives the same bytes."""
    if config.quantization is None or dtype == "float32":
        return "dequantized"
    schemes = [scheme for scheme, _ in Quantised(config, slots, {}).sites.values()]
    if any(scheme.activations for scheme in schemes):
        return "packed"
    fits = all(dtype in scheme.dtypes for scheme in schemes)
    native = fits and all(ops.providers.op_registered(op, device) for scheme in schemes for op in scheme.ops)
    native = native and device != "cpu"
    return "packed" if native else "dequantized"


def check_dtype(config: ModelConfig, dtype: np.dtype) -> None:
    """Refuse packed weights where there are none, and dtypes that their products do not give."""
    if config.quantization is None:
        raise ContractError("load", "weights", "packed", "dequantized for a checkpoint that is not quantised")
    if dtype.name not in ("bfloat16", "float16"):
        raise ContractError("load", "dtype", dtype, "bfloat16 or float16 for packed weights")
