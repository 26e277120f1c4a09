"""Text to token ids and back, exactly as Hugging Face's fast tokenizers do it.

A `Tokenizer` comes from a model folder (`tokenizer.json`) or from a GGUF file's metadata
(`models/tokenizer_gguf.py` rebuilds the fast tokenizer that the file was converted from).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers

from vtlab.ops.errors import ContractError, FormatError

from .tokenizer_pieces import PieceBackend

REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Tokenizer:
    """A fast tokenizer with the special ids that a model wants around its text.

    Attributes
    ----------
    backend : what does the work: a `tokenizers.Tokenizer` without a post-processor, or `PieceBackend` over the scored
        pieces of a GGUF file; `add_bos` and `add_eos` say what goes around a text.
    bos_id, eos_id : None where the vocabulary has none. `stop_ids` are the ids that end a generation.
    """

    backend: tokenizers.Tokenizer | PieceBackend = field(repr=False)
    bos_id: int | None = None
    eos_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    stop_ids: frozenset[int] = frozenset()

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """From `tokenizer.json`, with the special tokens of `tokenizer_config.json`, in a model folder."""
        return _from_folder(Path(folder))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], file: str | Path = "GGUF metadata") -> Tokenizer:
        """From the `tokenizer.ggml.*` metadata of a GGUF file; `file` is named in errors."""
        from .tokenizer_gguf import build

        return build(metadata, file)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        if isinstance(self.backend, PieceBackend):
            return self.backend.get_vocab_size()
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        add_special puts the model's BOS (and EOS) around the text, where the model wants them.
        parse_special=False reads the text of a control token ("<bos>") as plain text: for text from outside.
        User-defined tokens are text, and found either way.
        """
        if not isinstance(text, str):
            raise ContractError("encode", "text", type(text).__name__, "str")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            got = f"a lone surrogate at {error.start}"
            raise ContractError("encode", "text", got, "text that UTF-8 can write") from None
        self.backend.encode_special_tokens = not parse_special
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if not add_special:
            return ids
        before = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        after = [self.eos_id] if self.add_eos and self.eos_id is not None else []
        return before + ids + after

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, control tokens vanish unless asked for."""
        ids = [int(i) for i in ids]
        for i in ids:
            if self.token(i) is None:
                raise ContractError("decode", "ids", i, f"an id of the vocabulary (below {self.vocab_size})")
        return self.backend.decode(ids, skip_special_tokens=skip_special)

    def token(self, i: int) -> str | None:
        """The vocabulary's own spelling of one id ("Ġthe", "▁the", "<0x0A>"), or None where there is none."""
        return self.backend.id_to_token(i) if 0 <= i < 2**32 else None

    def stream(self, prompt: Sequence[int] = (), *, skip_special: bool = True) -> TextStream:
        """A decoder for tokens that arrive one at a time, after `prompt`."""
        return TextStream(self, list(prompt), skip_special)


class TextStream:
    """Text of tokens that arrive one by one: the pieces that `push` returns add up to the text of them all.

    A character whose UTF-8 bytes are spread over tokens is held back until it is whole. Text is decoded from
    a few tokens back, since some decoders drop the space of a first token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool):
        self._tokenizer, self._skip = tokenizer, skip_special
        self._ids = list(prompt[-8:])
        self._start, self._read = 0, len(self._ids)

    def push(self, token: int) -> str:
        """Take one token; the text that is now certain, "" while a character is incomplete."""
        self._ids.append(int(token))
        return self._advance(final=False)

    def flush(self) -> str:
        """What is held back, with U+FFFD for the bytes that never became a character."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._decode(self._ids[self._start : self._read])
        now = self._decode(self._ids[self._start :])
        if not final and now.endswith(REPLACEMENT):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip)


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FormatError(file, None, "tokenizer.json", "no such file", "a fast tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for whatever it cannot read
        raise FormatError(file, None, "tokenizer.json", error, "a fast tokenizer") from None
    config = _read_json(folder / "tokenizer_config.json")
    around = backend.encode("", add_special_tokens=True).ids
    bos, eos = (_special(backend, file, config, name) for name in ("bos_token", "eos_token"))
    extra = _read_json(folder / "generation_config.json").get("eos_token_id")
    stops = {eos} if extra is None else set(extra if isinstance(extra, list) else [extra])
    backend.post_processor = None
    return Tokenizer(
        backend,
        bos_id=bos,
        eos_id=eos,
        add_bos=bool(config.get("add_bos_token", bos is not None and bos in around[:1])),
        add_eos=bool(config.get("add_eos_token", eos is not None and eos in around[-1:] and eos != bos)),
        stop_ids=frozenset(stops - {None}),
    )


def _special(backend: tokenizers.Tokenizer, file: Path, config: Mapping, name: str) -> int | None:
    text = config.get(name)
    text = text.get("content") if isinstance(text, Mapping) else text
    if text is None:
        return None
    found = backend.token_to_id(text)
    if found is None:
        raise FormatError(file, None, name, repr(text), "a token of the vocabulary")
    return found


def _read_json(file: Path) -> dict:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(file, None, file.name, error, "JSON") from None
    if not isinstance(data, dict):
        raise FormatError(file, None, file.name, type(data).__name__, "a JSON object")
    return data
