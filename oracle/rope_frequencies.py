"""Rotary frequencies: what each `rope_type` of the Hugging Face `rope_parameters` makes of theta^(-2i/r).

A cache is one or more tables; row t of a table is [cos(t/divisor * inv) | sin(t/divisor * inv)] * mscale. Every
function takes `real`: with float64 it is the definition; with float32 each operation rounds as vLLM's float32
tensors do (powers, cosines and sines evaluated in float64 and rounded once), which is `emulate="f32"`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vtlab.ops import rotary
from vtlab.ops.contract import refuse
from vtlab.ops.numerics import round_to
from vtlab.ops.numerics.threads import parallel
from vtlab.ops.rotary import number

from .rope_rotation import is_section

ROPE_TYPES = ("default", "mrope", "linear", "dynamic", "ntk", "llama3", "yarn", "deepseek_yarn",
              "deepseek_llama_scaling", "longrope", "su", "proportional")  # fmt: skip
_ROWS = 512  # of a piece that one thread fills
_WORK = 32  # multiply-adds that a cosine costs


@dataclass(frozen=True)
class Table:
    """`rows` rows over the inverse frequencies `inv` (length half the rotary width)."""

    inv: np.ndarray
    rows: int
    divisor: float = 1.0
    mscale: float = 1.0


def rotary_width(parameters: Mapping, head_size: int) -> int:
    """The rotated lanes: `rope_dim`, else int(head_size * partial_rotary_factor); refuses odd and impossible widths."""
    share = number(parameters, "partial_rotary_factor", 1.0)
    if share > 1:
        raise refuse("rope_parameters", f"partial_rotary_factor = {share}", "at most 1")
    width = int(number(parameters, "rope_dim", int(head_size * share) or None))
    if width % 2 or not 0 < width <= head_size:
        raise refuse("rope_parameters", f"{width} rotated lanes", f"an even number in (0, {head_size}]")
    return width


def proportional(base: float, width: int, head_size: int, real: type) -> np.ndarray:
    """Gemma 4: exponents over head_size; pairs beyond width/2 get frequency 0, the identity."""
    inv = np.zeros(head_size // 2, dtype=real)
    inv[: width // 2] = 1.0 / rotary.powers(base, width // 2, head_size, real)
    return inv


def yarn(parameters: Mapping, width: int, length: float, truncate: bool, real: type) -> np.ndarray:
    """Interpolates slow pairs by the factor, keeps fast ones; the ramp runs from beta_fast to beta_slow rotations."""
    base, factor = number(parameters, "rope_theta", 10000.0, above=1.0), number(parameters, "factor")
    fast, slow = number(parameters, "beta_fast", 32.0), number(parameters, "beta_slow", 1.0)

    def pair_that_turns(rotations: float) -> float:
        return width * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_that_turns(fast), pair_that_turns(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    power = rotary.powers(base, width // 2, width, real)
    ramp = np.clip((np.arange(width // 2, dtype=real) - low) / (high - low), 0, 1)
    kept = (1 - ramp) * number(parameters, "extrapolation_factor", 1.0, above=-math.inf)
    return 1.0 / (factor * power) * (1 - kept) + 1.0 / power * kept


def ntk(parameters: Mapping, width: int, real: type) -> np.ndarray:
    """NTK by a fixed factor s: base * s, divided by s^(2/r); or with `mixed_b`, inv_i / exp(a * (i+1)^b)."""
    base, factor = number(parameters, "rope_theta", 10000.0), number(parameters, "factor")
    if parameters.get("mixed_b") is None:
        return rotary.plain(base * factor, width, real) / factor ** (2 / width)
    mixed = number(parameters, "mixed_b", above=-math.inf)
    slope = real(np.log(np.float64(real(factor)))) / real((width / 2) ** mixed)
    power = np.power(np.arange(1, width // 2 + 1, dtype=np.float64), mixed).astype(real)
    return rotary.plain(base, width, real) / np.exp((slope * power).astype(np.float64)).astype(real)


def longrope(parameters: Mapping, key: str, width: int, real: type) -> np.ndarray:
    """inv_i = 1 / (factor_i * base^(2i/r)), with the list `short_factor` or `long_factor`."""
    factors = parameters.get(key)
    if not isinstance(factors, (list, tuple)) or len(factors) != width // 2:
        got = f"{len(factors)} entries" if isinstance(factors, (list, tuple)) else repr(factors)
        raise refuse("rope_parameters", f"{key}: {got}", f"a list of {width // 2} numbers")
    divisors = np.array([number({key: value}, key) for value in factors], dtype=real)
    return 1.0 / (divisors * rotary.powers(number(parameters, "rope_theta", 10000.0), width // 2, width, real))


def magnitude(scale: float, weight: float = 1.0) -> float:
    """YaRN's attention temperature g(s, m) = 0.1 m ln s + 1, or 1 for s <= 1."""
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0


def tables(parameters: Mapping, head_size: int, max_position: int, real: type) -> list[Table]:
    """The tables of one cache, in row order; refuses unknown types and missing or impossible parameters."""
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_TYPES or parameters.get("use_fope"):
        raise refuse("rope_parameters", f"rope_type {kind!r}" + " with FoPE" * bool(parameters.get("use_fope")),
                     "one of " + ", ".join(ROPE_TYPES))  # fmt: skip
    width, base = rotary_width(parameters, head_size), number(parameters, "rope_theta", 10000.0)
    longer = 4 if _has_sections(parameters, width) else 1
    if kind in ("default", "mrope"):
        return [Table(rotary.plain(base, width, real), longer * max_position)]
    if kind == "proportional":
        return [Table(proportional(base, width, head_size, real), max_position)]
    if kind == "ntk":
        return [Table(ntk(parameters, width, real), max_position)]
    if kind == "llama3":
        return [Table(rotary.llama3(rotary.plain(base, width, real), parameters), max_position)]
    if kind == "linear":
        given = parameters.get("factor")
        factors = [number({"factor": f}, "factor") for f in (given if isinstance(given, (list, tuple)) else [given])]
        return [Table(rotary.plain(base, width, real), math.ceil(max_position * f), divisor=f) for f in factors]
    if kind == "dynamic":
        return [Table(rotary.plain(_dynamic_base(parameters, base, width, max_position), width, real), max_position)]
    length = number(parameters, "original_max_position_embeddings", above=1.0)
    if kind in ("longrope", "su"):
        return _long_and_short(parameters, width, int(length), max_position, real)
    factor, gain = number(parameters, "factor"), number(parameters, "attn_factor", 1.0)
    if kind == "yarn":
        length *= longer
        if longer > 1 or parameters.get("apply_yarn_scaling", True):
            gain *= magnitude(factor)
        inv = yarn(parameters, width, length, bool(parameters.get("truncate", True)), real)
    else:
        wanted = magnitude(factor, number(parameters, "mscale", 1.0, above=-math.inf))
        gain *= wanted / magnitude(factor, number(parameters, "mscale_all_dim", 0.0, above=-math.inf))
        inv = yarn(parameters, width, length, True, real)
    return [Table(inv, math.ceil(length * factor), mscale=gain)]


def fill(parts: list[Table], dtype: np.dtype, real: type) -> np.ndarray:
    """The cache of all tables, one under the other, rounded once to `dtype` from `real`."""
    half = parts[0].inv.size
    out = np.empty((sum(part.rows for part in parts), 2 * half), dtype)
    pieces, start = [], 0
    for part in parts:
        pieces += [(part, start, row, min(row + _ROWS, part.rows)) for row in range(0, part.rows, _ROWS)]
        start += part.rows

    def run(piece: tuple[Table, int, int, int]) -> None:
        part, start, row, stop = piece
        with np.errstate(all="ignore"):  # a thread starts with NumPy's own settings
            t = np.arange(row, stop).astype(real) / real(part.divisor)
            angle = (t[:, None] * part.inv).astype(np.float64)
            for column, turn in ((0, np.cos), (half, np.sin)):
                value = turn(angle).astype(real) * real(part.mscale)
                out[start + row : start + stop, column : column + half] = round_to(value, dtype)

    parallel(run, pieces, work=out.size * _WORK)
    return out


def _has_sections(parameters: Mapping, width: int) -> bool:
    section = parameters.get("mrope_section")
    if section is None:
        if parameters.get("rope_type") == "mrope":
            raise refuse("rope_parameters", "no mrope_section", "mrope_section, which rope_type mrope needs")
        return False
    if not is_section(section, width // 2):
        raise refuse("rope_parameters", f"mrope_section = {section}", f"three counts that add up to {width // 2}")
    return True


def _dynamic_base(parameters: Mapping, base: float, width: int, max_position: int) -> float:
    if width == 2:
        raise refuse("rope_parameters", "2 rotated lanes", "more than 2 for dynamic NTK")
    if parameters.get("alpha") is not None:
        return base * number(parameters, "alpha") ** (width / (width - 2))
    factor = number(parameters, "factor")
    growth = factor * max_position / number(parameters, "max_trained_positions", float(max_position)) - (factor - 1)
    if growth <= 0:
        raise refuse("rope_parameters", f"base growth {growth}", "factor * max_position / trained > factor - 1")
    return base * growth ** (width / (width - 2))


def _long_and_short(parameters: Mapping, width: int, length: int, max_position: int, real: type) -> list[Table]:
    scale = max_position / length
    gain = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(length))
    return [
        Table(
            longrope(parameters, f"{name}_factor", width, real), rows, mscale=number(parameters, f"{name}_mscale", gain)
        )
        for name, rows in (("short", length), ("long", max_position))
    ]
