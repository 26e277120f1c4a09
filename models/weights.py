"""A checkpoint's tensors in the form that a forward wants: merged projections, one dtype, GGUF's transforms undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from vtlab.gguf.dequant import dequantize
from vtlab.ops.dtypes import dtype as dtype_of
from vtlab.ops.errors import FormatError
from vtlab.ops.numerics import round_to

from .config import FULL, ModelConfig
from .weight_names import ROPE_FREQS, Slot, ignored, slots

_READABLE = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, eq=False)
class Layer:
    """One decoder layer. qkv [q + 2 kv, H] and gate_up [2 I, H] are single GEMM weights; norms that do not occur are
    None. Gemma's norm weights are stored as float32(1 + w), what its norm multiplies with.
    """

    attn_norm: np.ndarray
    qkv: np.ndarray
    o: np.ndarray
    ffn_norm: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray
    q_norm: np.ndarray | None = None
    k_norm: np.ndarray | None = None
    post_attn_norm: np.ndarray | None = None
    post_ffn_norm: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Weights:
    """All tensors of a model. `head` is `embed` itself where embeddings are tied.

    rope : layer type -> rope_parameters, with a GGUF file's frequency divisors worked in.
    """

    embed: np.ndarray
    norm: np.ndarray
    head: np.ndarray
    layers: tuple[Layer, ...]
    rope: Mapping[str, Mapping]

    def mapped(self, function: Callable[[np.ndarray], object]) -> Weights:
        """The same weights with every array replaced by function(array), once where two names share it."""
        done: dict[int, object] = {}

        def once(array):
            if array is None:
                return None
            if id(array) not in done:
                done[id(array)] = function(array)
            return done[id(array)]

        layers = tuple(Layer(**{name: once(array) for name, array in vars(layer).items()}) for layer in self.layers)
        return replace(self, embed=once(self.embed), norm=once(self.norm), head=once(self.head), layers=layers)

    @classmethod
    def from_tensors(cls, config: ModelConfig, tensors: Mapping[str, np.ndarray], dtype: str = "float32") -> Weights:
        """From arrays by Hugging Face name.

        Errors: FormatError, before any tensor is read, for a missing or extra tensor, a wrong shape, a dtype that
        is no float.
        """
        wanted = list(slots(config, gguf=False))
        _check(config, wanted, tensors, gguf=False)
        for slot in wanted:
            kind = np.dtype(tensors[slot.name].dtype).name
            if kind not in _READABLE:
                raise FormatError(config.file, None, slot.name, f"dtype {kind}", " or ".join(_READABLE))
        return _assemble(config, wanted, lambda slot: tensors[slot.name], dtype, config.rope)

    @classmethod
    def from_gguf(cls, config: ModelConfig, gguf, dtype: str = "float32") -> Weights:
        """From an open GGUF file: blocks are dequantized, llama's rotary rows put into Hugging Face's order.

        Errors: FormatError, before any tensor is read, for a missing or extra tensor or a wrong shape.
        """
        wanted = list(slots(config, gguf=True))
        _check(config, wanted, gguf.tensors, gguf=True)

        def read(slot: Slot) -> np.ndarray:
            data = dequantize(gguf.tensors[slot.name])
            if config.family == "llama" and slot.slot in ("q", "k"):
                return unpermute(data, config.head_dim)
            return data

        return _assemble(config, wanted, read, dtype, _rope(config, gguf), one_added=True)


def unpermute(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows in llama.cpp's order (head, pair, half) to Hugging Face's (head, half, pair): [heads * head_dim, in]."""
    rows, width = weight.shape
    return weight.reshape(rows // head_dim, head_dim // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _check(config: ModelConfig, wanted: list[Slot], tensors: Mapping, *, gguf: bool) -> None:
    names = {slot.name for slot in wanted}
    missing = sorted(names - set(tensors))
    if missing:
        raise FormatError(config.file, None, missing[0], f"no such tensor ({len(missing)} missing)", "a tensor")
    extra = sorted(name for name in set(tensors) - names if not ignored(name, config, gguf=gguf))
    if extra:
        got = f"a tensor that a {config.family} model has no use for ({len(extra)} of them)"
        raise FormatError(config.file, None, extra[0], got, f"the {len(names)} tensors of its configuration")
    for slot in wanted:
        shape = tuple(tensors[slot.name].shape)
        if shape != slot.shape:
            raise FormatError(config.file, None, slot.name, f"shape {shape}", f"shape {slot.shape}")


def _rope(config: ModelConfig, gguf) -> Mapping[str, Mapping]:
    """llama3 scaling in a GGUF file is a vector of divisors, one for each pair; longrope's lists are such divisors."""
    if ROPE_FREQS not in gguf.tensors:
        return config.rope
    divisors = dequantize(gguf.tensors[ROPE_FREQS])
    if divisors.shape != (config.head_dim // 2,) or not (np.isfinite(divisors) & (divisors > 0)).all():
        want = f"{config.head_dim // 2} positive numbers"
        raise FormatError(config.file, None, ROPE_FREQS, f"shape {divisors.shape}, least {divisors.min()}", want)
    parameters = {
        "rope_type": "longrope", "rope_theta": config.rope[FULL]["rope_theta"],
        "original_max_position_embeddings": config.max_position_embeddings,
        "short_factor": divisors.tolist(), "long_factor": divisors.tolist(), "short_mscale": 1.0, "long_mscale": 1.0,
    }  # fmt: skip
    return {FULL: parameters}


def _assemble(
    config: ModelConfig,
    wanted: list[Slot],
    read: Callable[[Slot], np.ndarray],
    dtype: str,
    rope: Mapping,
    one_added: bool = False,
) -> Weights:
    by_layer: dict[int | None, dict[str, Slot]] = {}
    for slot in wanted:
        by_layer.setdefault(slot.layer, {})[slot.slot] = slot

    def matrix(*parts: Slot) -> np.ndarray:
        """The parts below each other in one array, each released once it is copied; a single part is not copied."""
        if len(parts) == 1:
            return np.ascontiguousarray(_cast(read(parts[0]), dtype_of(dtype)))
        out = np.empty((sum(part.shape[0] for part in parts), parts[0].shape[1]), dtype_of(dtype))
        row = 0
        for part in parts:
            out[row : row + part.shape[0]] = _cast(read(part), out.dtype)
            row += part.shape[0]
        return out

    def norm(slot: Slot | None) -> np.ndarray | None:
        if slot is None:
            return None
        weight = read(slot)
        if not config.gemma:
            return _cast(weight, dtype_of(dtype)).copy()
        weight = np.asarray(weight, np.float64) + (0.0 if one_added else 1.0)
        return round_to(weight, np.float32)

    def layer(found: dict[str, Slot]) -> Layer:
        norms = {name: norm(found.get(name)) for name in _NORMS}
        return Layer(
            qkv=matrix(found["q"], found["k"], found["v"]),
            o=matrix(found["o"]),
            gate_up=matrix(found["gate"], found["up"]),
            down=matrix(found["down"]),
            **norms,
        )

    outside = by_layer[None]
    embed = matrix(outside["embed"])
    return Weights(
        embed=embed,
        norm=norm(outside["norm"]),
        head=embed if config.tie_word_embeddings else matrix(outside["head"]),
        layers=tuple(layer(by_layer[index]) for index in range(config.num_hidden_layers)),
        rope=rope,
    )


_NORMS = ("attn_norm", "q_norm", "k_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm")


def _cast(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The values in `dtype`, rounded once to nearest even where it is narrower."""
    if data.dtype == dtype:
        return data
    if dtype == np.float32 and data.dtype != np.float64:
        return data.astype(np.float32)
    return round_to(np.asarray(data, np.float64), dtype)
