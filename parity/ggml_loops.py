"""GGML blocks one element at a time: Python numbers and the formulas of the formats' description, no array arithmetic.

`fused` switches to the fused multiply-adds that a compiler makes of ggml's generic loops where it may contract them.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np

F32 = np.float32
SIZES = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q8_1": (32, 36),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "Q8_K": (256, 292), "IQ2_XXS": (256, 66), "IQ3_XXS": (256, 98),
}  # fmt: skip
PARTNER = dict.fromkeys(SIZES, "Q8_K") | {"Q4_0": "Q8_0", "Q5_0": "Q8_0", "Q8_0": "Q8_0"}
PARTNER |= {"Q4_1": "Q8_1", "Q5_1": "Q8_1"}
IN_LANES = ("Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Types whose blocks are eight sums in ggml's C code."""
WEIGHTS = [kind for kind in SIZES if kind not in ("Q8_1", "Q8_K")]


def f32(value) -> np.float32:
    with np.errstate(over="ignore"):
        return F32(value)


def half(raw: bytes, at: int) -> np.float32:
    return F32(struct.unpack_from("<e", raw, at)[0])


def rounded_sum(a, b, c) -> np.float32:
    """a * b + c, rounded once."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = F32(float(exact))
    nearest = min((np.nextafter(near, F32(-np.inf)), near, np.nextafter(near, F32(np.inf))),
                  key=lambda v: (abs(Fraction(float(v)) - exact), v.view(np.uint32) & 1))  # fmt: skip
    return nearest if exact else F32(0)


def nibble(byte: int, high: bool) -> int:
    return byte // 16 if high else byte % 16


def bit(number: int, index: int) -> int:
    return number >> index & 1


def six_bits(sc: bytes, j: int) -> tuple[int, int]:
    if j < 4:
        return sc[j] & 63, sc[j + 4] & 63
    return sc[j + 4] % 16 + 16 * (sc[j - 4] // 64), sc[j + 4] // 16 + 16 * (sc[j] // 64)


def signs_of(index: int) -> list[int]:
    bits = [bit(index, j) for j in range(7)]
    return [1 - 2 * b for b in (*bits, sum(bits) % 2)]


class Block:
    """One block: `q`, `s` and `m` by element, and the scales."""

    def __init__(self, kind: str, raw: bytes):
        from gguf import quants

        self.kind, self.fold, self.m, self.dmin = kind, 1.0, None, None
        n = SIZES[kind][0]
        self.s = [1] * n
        d_at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(kind, 0)
        self.d = half(raw, d_at) if kind != "Q8_K" else F32(struct.unpack_from("<f", raw, 0)[0])
        if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
            at = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8}[kind]
            self.q = [nibble(raw[at + j % 16], j >= 16) for j in range(32)]
            if kind[1] == "5":
                qh = struct.unpack_from("<I", raw, at - 4)[0]
                self.q = [q + 16 * bit(qh, j) for j, q in enumerate(self.q)]
            if kind[3] == "0":
                self.q = [q - (8 if kind == "Q4_0" else 16) for q in self.q]
            else:
                self.dmin = half(raw, 2)
        elif kind in ("Q8_0", "Q8_1", "Q8_K"):
            self.q = list(struct.unpack_from(f"<{n}b", raw, {"Q8_0": 2, "Q8_1": 4, "Q8_K": 4}[kind]))
            if kind == "Q8_1":
                self.total = half(raw, 2)
            elif kind == "Q8_K":
                self.sums = struct.unpack_from("<16h", raw, 260)
        else:
            self.q, self.s, self.m = [], [], [] if kind in ("Q2_K", "Q4_K", "Q5_K") else None
            if self.m is not None:
                self.dmin = half(raw, 82 if kind == "Q2_K" else 2)
            for e in range(256):
                q, s, m = getattr(self, "_" + kind.lower())(raw, e, quants)
                self.q.append(q)
                self.s.append(s)
                if self.m is not None:
                    self.m.append(m)

    def _q2_k(self, raw, e, _):
        h, t, low = e // 128, e // 32 % 4, e % 32
        scale = raw[8 * h + 2 * t + (low >= 16)]
        return raw[16 + 32 * h + low] >> 2 * t & 3, scale & 15, scale >> 4

    def _q3_k(self, raw, e, _):
        h, t, low = e // 128, e // 32 % 4, e % 32
        q = (raw[32 + 32 * h + low] >> 2 * t & 3) - (0 if bit(raw[low], 4 * h + t) else 4)
        sc, j = raw[96:108], 8 * h + 2 * t + (low >= 16)
        least = sc[j] & 15 if j < 8 else sc[j - 8] >> 4
        return q, (least | (sc[8 + j % 4] >> 2 * (j // 4) & 3) << 4) - 32, 0

    def _q4_k(self, raw, e, _):
        p, high = e // 64, e % 64 >= 32
        return nibble(raw[16 + 32 * p + e % 32], high), *six_bits(raw[4:16], 2 * p + high)

    def _q5_k(self, raw, e, _):
        p, high = e // 64, e % 64 >= 32
        q = nibble(raw[48 + 32 * p + e % 32], high) + 16 * bit(raw[16 + e % 32], 2 * p + high)
        return q, *six_bits(raw[4:16], 2 * p + high)

    def _q6_k(self, raw, e, _):
        h, t, low = e // 128, e // 32 % 4, e % 32
        least = nibble(raw[64 * h + 32 * (t % 2) + low], t >= 2)
        q = least + 16 * (raw[128 + 32 * h + low] >> 2 * t & 3) - 32
        return q, struct.unpack_from("b", raw, 192 + 8 * h + 2 * t + (low >= 16))[0], 0

    def _iq2_xxs(self, raw, e, quants):
        self.fold = 0.125
        ib, part, j = e // 32, e % 32 // 8, e % 8
        a0, a1 = struct.unpack_from("<II", raw, 2 + 8 * ib)
        quants.IQ2_XXS.init_grid()
        magnitude = int(quants.IQ2_XXS.grid.reshape(256, 8)[a0 >> 8 * part & 255, j])
        return magnitude * signs_of(a1 >> 7 * part & 127)[j], 2 * (a1 >> 28) + 1, 0

    def _iq3_xxs(self, raw, e, quants):
        self.fold = 0.25
        ib, part, j = e // 32, e % 32 // 8, e % 8
        a = struct.unpack_from("<I", raw, 66 + 4 * ib)[0]
        quants.IQ3_XXS.init_grid()
        magnitude = int(quants.IQ3_XXS.grid.reshape(256, 4)[raw[2 + 8 * ib + 2 * part + j // 4], j % 4])
        return magnitude * signs_of(a >> 7 * part & 127)[j], 2 * (a >> 28) + 1, 0

    def value(self, e: int) -> np.float32:
        """Element e as dequantize_row gives it."""
        scale = self.d if self.kind[3:] in ("0", "1") else self.d * F32(self.s[e] * self.fold)
        v = scale * F32(self.q[e])
        if self.m is not None:
            return v - self.dmin * F32(self.m[e])
        return v if self.dmin is None else v + self.dmin

    def exact(self, e: int) -> float:
        """Element e without rounding."""
        low = 0.0 if self.dmin is None else float(self.dmin) * (self.m[e] if self.m is not None else -1)
        return float(self.d) * (self.s[e] * self.fold) * self.q[e] - low


def blocks(kind: str, row: np.ndarray) -> list[Block]:
    raw, size = row.tobytes(), SIZES[kind][1]
    return [Block(kind, raw[at : at + size]) for at in range(0, len(raw), size)]


def dequantised(kind: str, row: np.ndarray) -> np.ndarray:
    return np.array([b.value(e) for b in blocks(kind, row) for e in range(SIZES[kind][0])], F32)


def vec_dot(kind: str, w_row: np.ndarray, a_row: np.ndarray, fused: bool = False, lanes: bool = True) -> np.float32:
    """The dot product in ggml's generic order; without `lanes` in that of CUDA kernels, where a block is one term."""
    if not lanes and kind in IN_LANES:
        return _one_term_a_block(kind, w_row, a_row)
    total, eight = F32(0), [F32(0)] * 8
    plus = rounded_sum if fused else lambda a, b, c: c + a * b
    for w, a in zip(blocks(kind, w_row), blocks(PARTNER[kind], a_row)):
        products = [q * s * c for q, s, c in zip(w.q, w.s, a.q)]
        whole = f32(sum(products))
        if kind == "Q4_0":
            total = plus(whole * w.d, a.d, total)
        elif kind in ("Q4_1", "Q5_1"):
            total = total + plus(w.d * a.d, whole, w.dmin * a.total)
        elif kind == "Q2_K":
            low = f32(sum(w.m[16 * j] * a.sums[j] for j in range(16)))
            total = total + plus(a.d * w.d, whole, -((a.d * w.dmin) * low))
        elif kind in IN_LANES:
            for lane in range(8):
                eight[lane] = plus(w.d * a.d, f32(sum(products[lane::8])), eight[lane])
            if w.m is not None:
                low = f32(sum(w.m[16 * j] * a.sums[j] for j in range(16)))
                total = plus(-(w.dmin * a.d), low, total)
        else:
            total = plus(w.d * a.d, whole, total)
    for lane in eight:
        total = total + lane
    return total * F32(blocks(kind, w_row)[0].fold)


def _one_term_a_block(kind: str, w_row: np.ndarray, a_row: np.ndarray) -> np.float32:
    total = F32(0)
    for w, a in zip(blocks(kind, w_row), blocks("Q8_K", a_row)):
        isum = sum(q * s * c for q, s, c in zip(w.q, w.s, a.q))
        if w.m is None:
            total = total + f32(isum) * (w.d * a.d)
        else:
            summs = sum(m * c for m, c in zip(w.m, a.q))
            total = total + ((w.d * a.d) * f32(isum) - (a.d * w.dmin) * f32(summs))
    return total


def truth(kind: str, w_row: np.ndarray, a_row: np.ndarray) -> tuple[float, float]:
    """(sum of the products of what the blocks stand for, sum of their magnitudes), to float64's accuracy."""
    terms = []
    for w, a in zip(blocks(kind, w_row), blocks(PARTNER[kind], a_row)):
        for e in range(len(w.q)):
            terms.append(float(w.d) * w.s[e] * w.fold * w.q[e] * float(a.d) * a.q[e])
            if w.m is not None:
                terms.append(-float(w.dmin) * w.m[e] * float(a.d) * a.q[e])
        if PARTNER[kind] == "Q8_1" and w.dmin is not None:
            terms.append(float(w.dmin) * float(a.total))
    return math.fsum(terms), math.fsum(map(abs, terms))


def quantised(kind: str, row: np.ndarray) -> bytes:
    """One row of float32 as blocks of Q8_0, Q8_1 or Q8_K."""
    out, size = b"", SIZES[kind][0]
    for at in range(0, len(row), size):
        x = [F32(v) for v in row[at : at + size]]
        out += _eight_k(x) if kind == "Q8_K" else _eight(x, kind == "Q8_1")
    return out


def _eight(x: list, with_sum: bool) -> bytes:
    peak = F32("nan") if any(v != v for v in x) else max(map(abs, x))
    with np.errstate(all="ignore"):
        d = peak / F32(127)
        inverse = F32(1) / d
        usable = bool(np.isfinite(inverse))
        codes = []
        for v in x:
            y = float(v * inverse) if usable else 0.0
            codes.append(0 if y != y else int(math.copysign(math.floor(Fraction(abs(y)) + Fraction(1, 2)), y)))
        stored = np.float16(d)
        total = np.float16(d * F32(sum(codes)))
    raw = stored.tobytes() + (total.tobytes() if with_sum else b"")
    return raw + struct.pack("<32b", *codes)


def _eight_k(x: list) -> bytes:
    extremum = F32(0)
    for v in x:
        if abs(v) > abs(extremum):
            extremum = v
    with np.errstate(all="ignore"):
        inverse = F32(-127) / extremum
        if extremum == 0 or np.isinf(inverse):
            return bytes(292)
        codes = [0 if y != y else min(127, round(Fraction(float(y)))) for y in (inverse * v for v in x)]
        d = F32(1) / inverse
    sums = [sum(codes[j : j + 16]) for j in range(0, 256, 16)]
    return struct.pack("<f", d) + struct.pack("<256b", *codes) + struct.pack("<16h", *sums)
