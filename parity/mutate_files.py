"""Small random damage to a binary file, of the kinds that break parsers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

EXTREMES = [0, 1, 2, 2**7, 2**8 - 1, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**61, 2**62]
EXTREMES += [2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1, -1]
_JSON_VALUES = [*map(str, EXTREMES), "1e400", "4.0", "true", "null", '""', "[]", "{}", "[" * 3000, "9" * 5000, '"BOOL"']


def mutate(random: Random, corpus: Sequence[bytes]) -> bytes:
    """One file of `corpus` with one to three pieces of damage."""
    content = bytearray(random.choice(corpus))
    json_only = content[8:9] == b"{" and random.random() < 0.6  # other damage seldom gets past the header's length
    for _ in range(random.choice((1, 1, 2, 3))):
        (_edit_json if json_only else random.choice(_DAMAGE))(random, content, corpus)
    return bytes(content)


def _span(random: Random, content: bytearray) -> slice:
    start = random.randrange(len(content) + 1)
    return slice(start, start + random.choice((1, 2, 4, 8, 16, 64)))


def _flip_bits(random: Random, content: bytearray, corpus: Sequence[bytes]) -> None:
    for _ in range(random.choice((1, 1, 2, 8)) if content else 0):
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)


def _truncate(random: Random, content: bytearray, corpus: Sequence[bytes]) -> None:
    del content[random.randrange(len(content) + 1) :]


def _overwrite_number(random: Random, content: bytearray, corpus: Sequence[bytes]) -> None:
    """An extreme, or the value that was there and a little more or less, over any 1, 2, 4 or 8 bytes."""
    width = random.choice((1, 2, 4, 8))
    if len(content) >= width:
        at = random.randrange(len(content) - width + 1)
        _write(random, content, at, width)


def _overwrite_length(random: Random, content: bytearray, corpus: Sequence[bytes]) -> None:
    """As above, but where something small stands in eight or four bytes: a length, a count, a type, an offset."""
    width = random.choice((4, 8))
    at = range(max(0, len(content) - width + 1))
    lengths = [i for i in at if int.from_bytes(content[i : i + width], "little") <= len(content)]
    if lengths:
        _write(random, content, random.choice(lengths), width)


def _write(random: Random, content: bytearray, at: int, width: int) -> None:
    old = int.from_bytes(content[at : at + width], "little")
    new = random.choice((random.choice(EXTREMES), old + random.randint(-40, 40), len(content) - at))
    content[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")


def _splice(random: Random, content: bytearray, corpus: Sequence[bytes]) -> None:
    """The head of this file before the tail of another."""
    other = random.choice(corpus)
    content[random.randrange(len(content) + 1) :] = other[random.randrange(len(other) + 1) :]


def _duplicate(random: Random, content: bytearray, corpus: Sequence[bytes]) -> None:
    at = random.randrange(len(content) + 1)
    content[at:at] = content[_span(random, content)]


def _insert(random: Random, content: bytearray, corpus: Sequence[bytes]) -> None:
    at = random.randrange(len(content) + 1)
    content[at:at] = random.randbytes(random.choice((1, 4, 8, 32)))


def _delete(random: Random, content: bytearray, corpus: Sequence[bytes]) -> None:
    del content[_span(random, content)]


def _edit_json(random: Random, content: bytearray, corpus: Sequence[bytes]) -> None:
    """Replace a number, a string or a bracket pair of a JSON header, and mostly put its length right again."""
    tokens = list(re.finditer(rb'-?\d+|"[^"]*"|\[[^\]]*\]', content[8:]))
    if content[8:9] != b"{" or not tokens:
        return
    token, length = random.choice(tokens), int.from_bytes(content[:8], "little")
    new = random.choice((random.choice(_JSON_VALUES).encode(), random.choice(tokens).group()))
    content[8 + token.start() : 8 + token.end()] = new
    if random.random() < 0.8:
        content[:8] = ((length + len(new) - len(token.group())) % 2**64).to_bytes(8, "little")


_DAMAGE = (
    _flip_bits,
    _truncate,
    _overwrite_number,
    _overwrite_length,
    _overwrite_length,
    _splice,
    _duplicate,
    _insert,
    _delete,
    _edit_json,
)
