"""Blocks of 256 values of sixteen rows, unpacked: 136 words of pairs of int16 a block, row beside row.

Word 8 g + l holds elements 16 g + l and 16 g + l + 8, each code times the scale of its sub-block; the last eight words
hold the minimums' scales of each two times 16 values. `unpack_*` is called as those of `ggml_32` are; it writes two
scales a block, d and dmin.
"""

from __future__ import annotations

import numpy as np

from .ggml_32 import fetch, sixteen_rows
from .memory import put
from .words import (
    float16_of_rows,
    four_rows,
    high_bytes,
    high_float16,
    inlined,
    less,
    low_bytes,
    low_float16,
    scaled,
    spread_bytes,
    transposed,
    twice,
    unsigned_right,
    word_everywhere,
    words_of_rows,
)  # fmt: skip

BLOCK = 136 * 16
_NIBBLE, _TWO, _ONE = np.int32(0x000F000F), np.int32(0x00030003), np.int32(0x00010001)


@inlined
def eight(at, step):
    """32 bytes at `at` of sixteen rows: word l has bytes l, l + 16, l + 8 and l + 24."""
    a0, a1 = spread_bytes(four_rows(at, 4 * step), four_rows(at + 16, 4 * step))
    at += step
    b0, b1 = spread_bytes(four_rows(at, 4 * step), four_rows(at + 16, 4 * step))
    at += step
    c0, c1 = spread_bytes(four_rows(at, 4 * step), four_rows(at + 16, 4 * step))
    at += step
    d0, d1 = spread_bytes(four_rows(at, 4 * step), four_rows(at + 16, 4 * step))
    return transposed(a0, b0, c0, d0), transposed(a1, b1, c1, d1)


@inlined
def scale_byte(four, j):
    """Byte j % 4 of each word, unsigned, in both halves."""
    return twice(unsigned_right(four, 8 * (j % 4)) & np.int32(0xFF))


@inlined
def six_bits(at, step):
    """Scales of sub-blocks 0 ... 3 and 4 ... 7 of Q4_K and Q5_K as bytes, the minimums likewise; d and dmin."""
    both, first, second, third = sixteen_rows(at, step)
    low, high = np.int32(0x3F3F3F3F), np.int32(0x0F0F0F0F)
    top = np.int32(0x30303030)
    s_last = (third & high) | (unsigned_right(first, 2) & top)
    m_last = (unsigned_right(third, 4) & high) | (unsigned_right(second, 2) & top)
    return first & low, s_last, second & low, m_last, both


@inlined
def _scales(at, step, words):
    """Scales of Q4_K and Q5_K as bytes, d and dmin; the minimums go to `words`."""
    s_first, s_last, m_first, m_last, both = six_bits(at, step)
    for j in range(4):
        put(scale_byte(m_first, j), words, 16 * (128 + j))
        put(scale_byte(m_last, j), words, 16 * (132 + j))
    return s_first, s_last, both


@inlined
def _put_nibbles(x, s_low, s_high, words, at):
    """Four words of 64 values' lane from one word of bytes."""
    put(scaled(x & _NIBBLE, s_low), words, at)
    put(scaled(unsigned_right(x, 8) & _NIBBLE, s_low), words, at + 128)
    put(scaled(unsigned_right(x, 4) & _NIBBLE, s_high), words, at + 256)
    put(scaled(unsigned_right(x, 12) & _NIBBLE, s_high), words, at + 384)


@inlined
def unpack_q4_k(b, step, blocks, words, scales):
    """d, dmin and scales at 0, nibbles at 16."""
    for i in range(blocks):
        at, to = b + 144 * i, words + 4 * BLOCK * i
        fetch(b + 144 * 16 * i, step, 144)
        s_first, s_last, both = _scales(at, step, to)
        put(low_float16(both), scales, 32 * i)
        put(high_float16(both), scales, 32 * i + 16)
        for p in range(4):
            s = s_first if p < 2 else s_last
            s_low, s_high = scale_byte(s, 2 * p), scale_byte(s, 2 * p + 1)
            (x0, x1, x2, x3), (x4, x5, x6, x7) = eight(at + 16 + 32 * p, step)
            lane = 512 * p
            _put_nibbles(x0, s_low, s_high, to, lane)
            _put_nibbles(x1, s_low, s_high, to, lane + 16)
            _put_nibbles(x2, s_low, s_high, to, lane + 32)
            _put_nibbles(x3, s_low, s_high, to, lane + 48)
            _put_nibbles(x4, s_low, s_high, to, lane + 64)
            _put_nibbles(x5, s_low, s_high, to, lane + 80)
            _put_nibbles(x6, s_low, s_high, to, lane + 96)
            _put_nibbles(x7, s_low, s_high, to, lane + 112)


@inlined
def _put_fives(x, h, p, s_low, s_high, words, at):
    """As `_put_nibbles`, with bits 2 p and 2 p + 1 of h on top."""
    one, two = (unsigned_right(h, 2 * p) & _ONE) << 4, (unsigned_right(h, 8 + 2 * p) & _ONE) << 4
    three, four = (unsigned_right(h, 2 * p + 1) & _ONE) << 4, (unsigned_right(h, 9 + 2 * p) & _ONE) << 4
    put(scaled((x & _NIBBLE) | one, s_low), words, at)
    put(scaled((unsigned_right(x, 8) & _NIBBLE) | two, s_low), words, at + 128)
    put(scaled((unsigned_right(x, 4) & _NIBBLE) | three, s_high), words, at + 256)
    put(scaled((unsigned_right(x, 12) & _NIBBLE) | four, s_high), words, at + 384)


@inlined
def unpack_q5_k(b, step, blocks, words, scales):
    """d, dmin and scales at 0, fifth bits at 16, nibbles at 48."""
    for i in range(blocks):
        at, to = b + 176 * i, words + 4 * BLOCK * i
        fetch(b + 176 * 16 * i, step, 176)
        s_first, s_last, both = _scales(at, step, to)
        put(low_float16(both), scales, 32 * i)
        put(high_float16(both), scales, 32 * i + 16)
        (h0, h1, h2, h3), (h4, h5, h6, h7) = eight(at + 16, step)
        for p in range(4):
            s = s_first if p < 2 else s_last
            s_low, s_high = scale_byte(s, 2 * p), scale_byte(s, 2 * p + 1)
            (x0, x1, x2, x3), (x4, x5, x6, x7) = eight(at + 48 + 32 * p, step)
            lane = 512 * p
            _put_fives(x0, h0, p, s_low, s_high, to, lane)
            _put_fives(x1, h1, p, s_low, s_high, to, lane + 16)
            _put_fives(x2, h2, p, s_low, s_high, to, lane + 32)
            _put_fives(x3, h3, p, s_low, s_high, to, lane + 48)
            _put_fives(x4, h4, p, s_low, s_high, to, lane + 64)
            _put_fives(x5, h5, p, s_low, s_high, to, lane + 80)
            _put_fives(x6, h6, p, s_low, s_high, to, lane + 96)
            _put_fives(x7, h7, p, s_low, s_high, to, lane + 112)


@inlined
def signed_byte(four, j):
    """Byte j % 4 of each word, signed, in both halves."""
    return twice(((four << (24 - 8 * (j % 4))) >> 24) & np.int32(0xFFFF))


@inlined
def _put_sixes(low, shift, h, t, offset, s_even, s_odd, words, at):
    """Two words: nibbles of `low` after `shift`, bits 2 t and 2 t + 1 of h on top, less 32."""
    even = (unsigned_right(low, shift) & _NIBBLE) | ((unsigned_right(h, 2 * t) & _TWO) << 4)
    odd = (unsigned_right(low, shift + 8) & _NIBBLE) | ((unsigned_right(h, 2 * t + 8) & _TWO) << 4)
    put(scaled(less(even, offset), s_even), words, at)
    put(scaled(less(odd, offset), s_odd), words, at + 128)


@inlined
def unpack_q6_k(b, step, blocks, words, scales):
    """Low nibbles at 0, upper two bits at 128, scales at 192, d at 208."""
    offset = word_everywhere(0x00200020)
    for i in range(blocks):
        at, to = b + 210 * i, words + 4 * BLOCK * i
        fetch(b + 210 * 16 * i, step, 210)
        put(float16_of_rows(at + 208, step), scales, 32 * i)
        s0, s1, s2, s3 = sixteen_rows(at + 192, step)
        for half in range(2):
            (h0, h1, h2, h3), (h4, h5, h6, h7) = eight(at + 128 + 32 * half, step)
            for t in range(4):
                (x0, x1, x2, x3), (x4, x5, x6, x7) = eight(at + 64 * half + 32 * (t % 2), step)
                first = s0 if half == 0 else s2
                last = s1 if half == 0 else s3
                four = first if t < 2 else last
                even, odd = signed_byte(four, 2 * t), signed_byte(four, 2 * t + 1)
                shift, lane = 4 * (t // 2), 16 * 8 * (8 * half + 2 * t)
                _put_sixes(x0, shift, h0, t, offset, even, odd, to, lane)
                _put_sixes(x1, shift, h1, t, offset, even, odd, to, lane + 16)
                _put_sixes(x2, shift, h2, t, offset, even, odd, to, lane + 32)
                _put_sixes(x3, shift, h3, t, offset, even, odd, to, lane + 48)
                _put_sixes(x4, shift, h4, t, offset, even, odd, to, lane + 64)
                _put_sixes(x5, shift, h5, t, offset, even, odd, to, lane + 80)
                _put_sixes(x6, shift, h6, t, offset, even, odd, to, lane + 96)
                _put_sixes(x7, shift, h7, t, offset, even, odd, to, lane + 112)


@inlined
def _put_threes(x, h, bit, t, offset, s_even, s_odd, words, at):
    """Two words: bits 2 t and 2 t + 1 of x, bit `bit` of h on top, less `offset`; without h in Q2_K."""
    even = (unsigned_right(x, 2 * t) & _TWO) | ((unsigned_right(h, bit) & _ONE) << 2)
    odd = (unsigned_right(x, 2 * t + 8) & _TWO) | ((unsigned_right(h, bit + 8) & _ONE) << 2)
    put(scaled(less(even, offset), s_even), words, at)
    put(scaled(less(odd, offset), s_odd), words, at + 128)


@inlined
def _put_all_threes(xs, hs, bit, t, offset, even, odd, words, lane):
    (x0, x1, x2, x3), (x4, x5, x6, x7) = xs
    (h0, h1, h2, h3), (h4, h5, h6, h7) = hs
    _put_threes(x0, h0, bit, t, offset, even, odd, words, lane)
    _put_threes(x1, h1, bit, t, offset, even, odd, words, lane + 16)
    _put_threes(x2, h2, bit, t, offset, even, odd, words, lane + 32)
    _put_threes(x3, h3, bit, t, offset, even, odd, words, lane + 48)
    _put_threes(x4, h4, bit, t, offset, even, odd, words, lane + 64)
    _put_threes(x5, h5, bit, t, offset, even, odd, words, lane + 80)
    _put_threes(x6, h6, bit, t, offset, even, odd, words, lane + 96)
    _put_threes(x7, h7, bit, t, offset, even, odd, words, lane + 112)


@inlined
def unpack_q3_k(b, step, blocks, words, scales):
    """Upper bits at 0, lower two at 32, scales at 96, d at 108."""
    offset, middle = word_everywhere(0x00040004), word_everywhere(0x00200020)
    nibbles, twos = np.int32(0x0F0F0F0F), np.int32(0x03030303)
    for i in range(blocks):
        at, to = b + 110 * i, words + 4 * BLOCK * i
        fetch(b + 110 * 16 * i, step, 110)
        put(float16_of_rows(at + 108, step), scales, 32 * i)
        a, c, top = words_of_rows(at + 96, step), words_of_rows(at + 100, step), words_of_rows(at + 104, step)
        hs = eight(at, step)
        for half in range(2):
            xs = eight(at + 32 + 32 * half, step)
            for t in range(4):
                j = 8 * half + 2 * t
                low = a if t < 2 else c
                low = unsigned_right(low, 4 * half) & nibbles
                six = low | ((unsigned_right(top, 2 * (j // 4)) & twos) << 4)
                even, odd = less(scale_byte(six, j), middle), less(scale_byte(six, j + 1), middle)
                _put_all_threes(xs, hs, 4 * half + t, t, offset, even, odd, to, 128 * j)


@inlined
def unpack_q2_k(b, step, blocks, words, scales):
    """Scales and minimums at 0, codes at 16, d at 80, dmin at 82."""
    nothing = word_everywhere(0)
    none = (nothing, nothing, nothing, nothing)
    nibbles = np.int32(0x0F0F0F0F)
    for i in range(blocks):
        at, to = b + 84 * i, words + 4 * BLOCK * i
        fetch(b + 84 * 16 * i, step, 84)
        both = words_of_rows(at + 80, step)
        put(low_float16(both), scales, 32 * i)
        put(high_float16(both), scales, 32 * i + 16)
        s0, s1, s2, s3 = sixteen_rows(at, step)
        for half in range(2):
            xs = eight(at + 16 + 32 * half, step)
            for t in range(4):
                first = s0 if half == 0 else s2
                last = s1 if half == 0 else s3
                four = first if t < 2 else last
                j = 8 * half + 2 * t
                even, odd = scale_byte(four & nibbles, j), scale_byte(four & nibbles, j + 1)
                _put_all_threes(xs, (none, none), 0, t, nothing, even, odd, to, 128 * j)
                low = unsigned_right(unsigned_right(four, 4) & nibbles, 8 * (j % 4)) & np.int32(0x0F0F)
                pair = (low & np.int32(0xF)) | ((low & np.int32(0xF00)) << 8)
                put(pair, to, 16 * (128 + j // 2))


@inlined
def put_signed(at, scale, words, lane):
    """32 signed bytes of each of sixteen rows that lie 32 bytes apart at `at`, times the rows' scale."""
    (x0, x1, x2, x3), (x4, x5, x6, x7) = eight(at, 32)
    _put_bytes(x0, scale, words, lane)
    _put_bytes(x1, scale, words, lane + 16)
    _put_bytes(x2, scale, words, lane + 32)
    _put_bytes(x3, scale, words, lane + 48)
    _put_bytes(x4, scale, words, lane + 64)
    _put_bytes(x5, scale, words, lane + 80)
    _put_bytes(x6, scale, words, lane + 96)
    _put_bytes(x7, scale, words, lane + 112)


@inlined
def _put_bytes(x, scale, words, at):
    put(scaled(low_bytes(x), scale), words, at)
    put(scaled(high_bytes(x), scale), words, at + 128)
