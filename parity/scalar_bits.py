"""SplitMix64, its inverse, and Philox4x32 in Python integers: a second opinion that shares no code with the oracle."""

from __future__ import annotations

WORD, LONG = 2**32, 2**64
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def splitmix(counter: int) -> int:
    """SplitMix64's output for a counter, each shift a floor division."""
    z = (counter + GOLDEN) % LONG
    for shift, multiplier in zip((30, 27), MULTIPLIERS):
        z = (z ^ (z // 2**shift)) * multiplier % LONG
    return z ^ (z // 2**31)


def unsplitmix(output: int) -> int:
    """The counter whose output this is: each step undone."""

    z = output
    for shift, multiplier in zip((31, 27, 30), (*MULTIPLIERS[::-1], 1)):
        start = z
        for _ in range(64 // shift):
            z = start ^ (z >> shift)
        z = z * pow(multiplier, -1, LONG) % LONG
    return (z - GOLDEN) % LONG


def signed(value: int) -> int:
    """The int64 of these 64 bits."""
    return value - LONG if value >= LONG // 2 else value


def philox(key: tuple[int, int], counter: tuple[int, int, int, int], rounds: int = 10) -> tuple[int, ...]:
    """Philox4x32 as the paper draws it: two multiplications, each giving a high and a low half."""
    left, right = key
    a, b, c, d = counter
    for _ in range(rounds):
        (high_a, low_a), (high_c, low_c) = divmod(0xD2511F53 * a, WORD), divmod(0xCD9E8D57 * c, WORD)
        a, b, c, d = high_c ^ b ^ left, low_c, high_a ^ d ^ right, low_a
        left, right = (left + 0x9E3779B9) % WORD, (right + 0xBB67AE85) % WORD
    return a, b, c, d


def words_of(seed: int, offset: int) -> tuple[int, ...]:
    """Philox of an int64 seed and offset, as the samplers key it."""
    return philox((seed % WORD, seed % LONG // WORD), (offset % WORD, offset % LONG // WORD, 0, 0))
