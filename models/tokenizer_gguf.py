"""The fast tokenizer behind a GGUF file, rebuilt from its `tokenizer.ggml.*` metadata.

Two models occur. "gpt2" is byte-level BPE with explicit merges; `tokenizer.ggml.pre` names how text is split
before merging. "llama" is SentencePiece BPE with scores: a piece of a higher score is made earlier, as in the merges
that Hugging Face recovers when it converts a SentencePiece model. User-defined pieces (runs of spaces) come first, as
there, where their score is 0; GGUF converters write -1000.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from vtlab.ops.errors import FormatError

from .tokenizer import Tokenizer
from .tokenizer_pieces import PieceBackend, add

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

# tokenizer.ggml.pre -> (pre-tokenizer, normalizer, whether a whole word in the vocabulary skips the merges)
_GPT2, _DIGITS, _LLAMA3, _QWEN2 = "gpt-2", "digits", "llama3", "qwen2"
_PRE = {
    "gpt-2": _GPT2, "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "command-r": _DIGITS,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "falcon3": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
}  # fmt: skip


def build(metadata: Mapping[str, object], file: str | Path) -> Tokenizer:
    """A `Tokenizer` from GGUF metadata; FormatError, naming the key, for what is missing, contradictory or unknown."""
    fields = _Fields(metadata, file)
    kind = fields.want("model")
    if kind == "gpt2":
        backend, bos_by_default = _byte_level(fields), _PRE.get(fields.get("pre")) == _LLAMA3
    elif kind == "llama":
        backend, bos_by_default = _sentencepiece(fields), True
    else:
        raise fields.error("model", kind, "gpt2 or llama")
    eos = fields.token_id("eos_token_id")
    stops = {eos, fields.token_id("eot_token_id"), fields.token_id("eom_token_id")}
    return Tokenizer(
        backend,
        bos_id=fields.token_id("bos_token_id"),
        eos_id=eos,
        add_bos=bool(fields.get("add_bos_token", bos_by_default)),
        add_eos=bool(fields.get("add_eos_token", False)),
        stop_ids=frozenset(stops - {None}),
    )


class _Fields:
    """The `tokenizer.ggml.*` keys, with the vocabulary's three lists checked against each other."""

    def __init__(self, metadata: Mapping[str, object], file: str | Path):
        self.metadata, self.file = metadata, file
        self.tokens = list(map(str, self.want("tokens")))
        size = len(self.tokens)
        self.types = np.asarray(self.get("token_type", [NORMAL] * size), np.int64).tolist()
        if len(self.types) != size:
            raise self.error("token_type", f"{len(self.types)} entries", f"{size}, one for each token")
        different = len(set(self.tokens))
        if different != size:
            raise self.error("tokens", f"{different} different tokens", f"{size} different ones")

    def get(self, key: str, default: object = None) -> object:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def want(self, key: str) -> object:
        value = self.get(key)
        if value is None:
            raise self.error(key, "nothing", "a value")
        return value

    def token_id(self, key: str) -> int | None:
        """An id of the vocabulary, or None where the key is absent."""
        value = self.get(key)
        if value is not None and not 0 <= int(value) < len(self.tokens):
            raise self.error(key, value, f"an id below {len(self.tokens)}")
        return None if value is None else int(value)

    def error(self, key: str, got: object, want: object) -> FormatError:
        return FormatError(self.file, None, f"tokenizer.ggml.{key}", got, want)


def _byte_level(fields: _Fields) -> Backend:
    split = fields.want("pre")
    if split not in _PRE:
        raise fields.error("pre", split, " or ".join(_PRE))
    style = _PRE[split]
    vocabulary = {token: i for i, token in enumerate(fields.tokens)}
    joins = [tuple(merge.split(" ", 1)) for merge in fields.want("merges")]
    for merge in joins:
        if len(merge) != 2 or any(part not in vocabulary for part in (*merge, "".join(merge))):
            raise fields.error("merges", " ".join(merge), "two tokens of the vocabulary that join to a third")
    backend = Backend(models.BPE(vocabulary, joins, ignore_merges=style == _LLAMA3))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style in (_GPT2, _DIGITS))
    steps = {
        _GPT2: [],
        _DIGITS: [pre_tokenizers.Digits(individual_digits=True)],
        _LLAMA3: [pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")],
        _QWEN2: [pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")],
    }[style]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    if style == _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    add(backend, *_added(fields.tokens, fields.types))
    return backend


def _sentencepiece(fields: _Fields) -> PieceBackend:
    scores = np.asarray(fields.want("scores"), np.float64)
    if len(scores) != len(fields.tokens):
        raise fields.error("scores", f"{len(scores)} entries", f"{len(fields.tokens)}, one for each token")
    unknown = fields.token_id("unknown_token_id")
    pieces = _pieces(fields)
    if len(set(pieces)) != len(pieces):
        raise fields.error("tokens", "two spellings of one run of spaces", "one")
    prefix, types = bool(fields.get("add_space_prefix", True)), np.array(fields.types)
    replace = normalizers.Replace(" ", SPACE)
    decode = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    control, defined = _added(pieces, fields.types)
    return PieceBackend(
        pieces,
        np.where(types == USER_DEFINED, 0.0, scores),
        (types == NORMAL) | (types == USER_DEFINED),
        unknown=unknown,
        byte_fallback=BYTE in fields.types,
        normalizer=normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace,
        decoder=decoders.Sequence([*decode, decoders.Strip(" ", 1, 0)] if prefix else decode),
        control=control,
        defined=defined,
    )


def _pieces(fields: _Fields) -> list[str]:
    """Tokens as SentencePiece spells them: GGUF converters write the spaces of user-defined tokens as spaces."""
    return [
        token.replace(" ", SPACE) if kind == USER_DEFINED else token for token, kind in zip(fields.tokens, fields.types)
    ]


def _added(pieces: list[str], types: list[int]) -> tuple[list[str], list[str]]:
    """Control tokens and user-defined tokens, which are found in the text before it is split and merged.

    A SentencePiece vocabulary spells runs of spaces with U+2581, so in a text of plain spaces they come from
    merges, and a U+2581 written in the text reads as a space. Both as in the fast tokenizers; llama.cpp differs
    in the second.
    """
    control = [piece for piece, kind in zip(pieces, types) if kind in (CONTROL, UNKNOWN)]
    return control, [piece for piece, kind in zip(pieces, types) if kind == USER_DEFINED]


__all__ = ["build"]
