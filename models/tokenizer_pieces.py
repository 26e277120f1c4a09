"""SentencePiece BPE over a vocabulary with scores, in a tenth of the memory that a table of its merges takes.

The `tokenizers` library wants every way to make a piece from two others beforehand: 75 MB for 262,144 pieces, and a
second to find them. Here two neighbours are looked up when they meet: whether their pieces make a third, and how good
that merge is, follows from the vocabulary itself. What is around it stays the library's: control tokens and
user-defined tokens in the text, the normalizer, the decoder.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import tokenizers
from tokenizers import AddedToken, models

from .tokenizer_merges import merges

_MEETINGS = 1 << 13  # pairs of pieces that are remembered


class Pieces:
    """Different texts by number, and back: their UTF-8 one behind the other, and buckets of numbers by checksum."""

    def __init__(self, texts: Sequence[str]):
        raw = [text.encode("utf-8", "surrogatepass") for text in texts]
        self._bytes = b"".join(raw)
        ends = np.cumsum(np.fromiter(map(len, raw), np.int64, len(raw)))
        self._ends = array("I", np.concatenate([[0], ends]).astype(np.uint32).tobytes())
        self._mask = (1 << max(len(raw) - 1, 1).bit_length()) - 1
        sums = np.fromiter(map(crc32, raw), np.uint32, len(raw)) & self._mask
        order = np.argsort(sums, kind="stable").astype(np.uint32)
        self._order = array("I", order.tobytes())
        starts = np.searchsorted(sums[order], np.arange(self._mask + 2))
        self._starts = array("I", starts.astype(np.uint32).tobytes())

    def __len__(self) -> int:
        return len(self._ends) - 1

    def raw(self, number: int) -> bytes:
        return self._bytes[self._ends[number] : self._ends[number + 1]]

    def find(self, raw: bytes) -> int:
        """The number of a text in UTF-8; -1 where it is none of them."""
        bucket = crc32(raw) & self._mask
        for at in range(self._starts[bucket], self._starts[bucket + 1]):
            number = self._order[at]
            if self.raw(number) == raw:
                return number
        return -1


class PieceBackend:
    """What `Tokenizer` uses of a `tokenizers.Tokenizer`, over scored pieces.

    pieces : the vocabulary as SentencePiece spells it, different texts. scores : float64 [pieces]; the best merge is
    the one whose result has the highest score, then the longest left half, then the longest right half, then the
    result that stands first. usable : bool [pieces], which may be halves and results. unknown : the id of what is not
    in the vocabulary, or None. byte_fallback : unknown characters are spelled in the pieces <0x00> ... <0xFF>.
    normalizer, decoder : the library's. control, defined : texts that are found before anything is merged.
    """

    def __init__(
        self, pieces: Sequence[str], scores, usable, *, unknown, byte_fallback, normalizer, decoder, control, defined
    ):
        self._pieces, self._unknown, self._bytes = Pieces(pieces), unknown, byte_fallback
        self._scores = array("d", np.where(np.isnan(scores), -np.inf, scores).astype(np.float64).tobytes())
        self._lengths = array("I", np.fromiter(map(len, pieces), np.uint32, len(pieces)).tobytes())
        self._usable = np.asarray(usable, np.uint8).tobytes()
        self._normalizer, self._decoder = normalizer, decoder
        self._control, self._defined = ([self.token_to_id(text) for text in texts] for texts in (control, defined))
        self._hidden = frozenset(self._control)
        # finds the tokens in a text; what lies between them is one token of this model
        between = "between"
        while between in control or between in defined:
            between += "s"
        self._finder = tokenizers.Tokenizer(models.WordLevel({between: 0}, unk_token=between))
        add(self._finder, control, defined)
        self._named = {self._finder.token_to_id(text): self.token_to_id(text) for text in (*control, *defined) if text}
        self._met: dict[tuple[int, int], tuple | None] = {}

    @property
    def encode_special_tokens(self) -> bool:
        return self._finder.encode_special_tokens

    @encode_special_tokens.setter
    def encode_special_tokens(self, value: bool) -> None:
        self._finder.encode_special_tokens = value

    def get_vocab_size(self) -> int:
        return len(self._pieces)

    def token_to_id(self, text: str) -> int | None:
        found = self._pieces.find(text.encode("utf-8", "surrogatepass"))
        return None if found < 0 else found

    def id_to_token(self, number: int) -> str | None:
        return self._pieces.raw(number).decode("utf-8", "surrogatepass") if number < len(self._pieces) else None

    def encode(self, text: str, add_special_tokens: bool = False) -> SimpleNamespace:
        """`.ids` of the text."""
        ids: list[int] = []
        found = self._finder.encode(text, add_special_tokens=False)
        for number, (begin, end) in zip(found.ids, found.offsets):
            if number in self._named:
                ids.append(self._named[number])
            else:
                ids += self._merged(self._symbols(self._normalizer.normalize_str(text[begin:end])))
        return SimpleNamespace(ids=ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._decoder.decode([
            self.id_to_token(number) for number in ids if not (skip_special_tokens and number in self._hidden)
        ])  # fmt: skip

    def library(self) -> tokenizers.Tokenizer:
        """The library's own tokenizer of the same vocabulary, with its table of merges."""
        texts = [self.id_to_token(number) for number in range(len(self._pieces))]
        usable = np.flatnonzero(np.frombuffer(self._usable, np.uint8))
        some = [texts[number] for number in usable.tolist()]
        halves = merges(some, np.frombuffer(self._scores, np.float64)[usable])
        left, right = (map(some.__getitem__, half.tolist()) for half in halves)
        unknown = None if self._unknown is None else texts[self._unknown]
        vocabulary = {text: number for number, text in enumerate(texts)}
        found = tokenizers.Tokenizer(
            models.BPE(vocabulary, list(zip(left, right)), unk_token=unknown, fuse_unk=True, byte_fallback=self._bytes)
        )
        found.normalizer, found.decoder = self._normalizer, self._decoder
        add(found, *([texts[number] for number in numbers] for numbers in (self._control, self._defined)))
        return found

    def save(self, path: str) -> None:
        """The library's tokenizer as `tokenizer.json`."""
        self.library().save(path)

    def _symbols(self, text: str) -> list[int]:
        """Pieces of one character each, or of one byte of it; unknown ones in a row are one."""
        symbols, known, unknown = [], {}, False
        for character in text:
            if (spelled := known.get(character)) is None:
                spelled = known[character] = self._spelled(character)
            if not spelled:
                unknown = self._unknown is not None
                continue
            if unknown and spelled[0] >= 0:
                symbols.append(self._unknown)
                unknown = False
            symbols += spelled if spelled[0] >= 0 else spelled[1:]
        return [*symbols, self._unknown] if unknown else symbols

    def _spelled(self, character: str) -> list[int]:
        """[its piece], or [-1, the pieces of its bytes ...], or nothing."""
        raw = character.encode()
        whole = self._pieces.find(raw)
        if whole >= 0:
            return [whole]
        parts = [self._pieces.find(b"<0x%02X>" % byte) for byte in raw] if self._bytes else [-1]
        return [] if -1 in parts else [-1, *parts]

    def _meeting(self, left: int, right: int) -> tuple | None:
        """(rank, the piece that two make), the lower the earlier; None where they make none."""
        if (left, right) in self._met:
            return self._met[left, right]
        found = None
        if self._usable[left] and self._usable[right]:
            made = self._pieces.find(self._pieces.raw(left) + self._pieces.raw(right))
            if made >= 0 and self._usable[made]:
                found = (-self._scores[made], -self._lengths[left], -self._lengths[right], made), made
        if len(self._met) >= _MEETINGS:
            self._met.clear()
        self._met[left, right] = found
        return found

    def _merged(self, symbols: list[int]) -> list[int]:
        """Neighbours merged while there are any that make a piece, the best first, of equals the first in the text."""
        count = len(symbols)
        before, after = list(range(-1, count - 1)), [*range(1, count), -1]
        queue: list[tuple] = []

        def meet(at: int) -> None:
            if (found := self._meeting(symbols[at], symbols[after[at]])) is not None:
                queue.append((found[0], at, found[1]))

        for at in range(count - 1):
            meet(at)
        heapq.heapify(queue)
        while queue:
            _, at, made = heapq.heappop(queue)
            next_at = after[at]
            if symbols[at] < 0 or next_at < 0:
                continue
            found = self._meeting(symbols[at], symbols[next_at])
            if found is None or found[1] != made:
                continue
            symbols[at], symbols[next_at] = made, -1
            after[at] = after[next_at]
            if after[at] >= 0:
                before[after[at]] = at
            for left in (before[at], at):
                if left >= 0 and after[left] >= 0:
                    found = self._meeting(symbols[left], symbols[after[left]])
                    if found is not None:
                        heapq.heappush(queue, (found[0], left, found[1]))
        return [symbol for symbol in symbols if symbol >= 0]


def add(backend: tokenizers.Tokenizer, control: Sequence[str], defined: Sequence[str]) -> None:
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in defined])


__all__ = ["PieceBackend", "Pieces", "add"]
