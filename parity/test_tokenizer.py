"""Tokenizers against ids that transformers and llama.cpp gave, and against their own rules on tiny vocabularies."""

from __future__ import annotations

import itertools
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from vtlab.models import tokenizer_pieces
from vtlab.models.demo import demo_installed, demo_path
from vtlab.models.loading import load_tokenizer
from vtlab.models.tokenizer import Tokenizer
from vtlab.models.tokenizer_merges import merges
from vtlab.ops.errors import ContractError, FormatError

DATA = Path(__file__).parent / "data"
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6


def ggml(**fields) -> dict:
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


@lru_cache
def pinned(name: str) -> tuple[Tokenizer, list[dict]]:
    """The golden cases of a model, and a tokenizer over the part of its vocabulary that they can reach."""
    data = json.loads((DATA / f"{name}_tokens.json").read_text())
    part = data["vocabulary"]
    tokens = [f"unreachable {i}" for i in range(part["size"])]
    types = [UNUSED] * part["size"]
    for token, i in part["tokens"].items():
        tokens[i], types[i] = token, part["types"].get(str(i), NORMAL)
    fields = part["metadata"] | ggml(tokens=tokens, token_type=types, merges=part["merges"])
    return Tokenizer.from_gguf(fields, name), data["cases"]


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_byte_level_ids_equal_the_golden_ids(name):
    tokenizer, cases = pinned(name)
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        plain = case.get("plain_ids")
        if plain is not None:
            assert tokenizer.encode(case["text"], parse_special=False) == plain, case["text"]


@pytest.mark.skipif(not demo_installed(), reason="the demo extra is not installed")
def test_gemma_ids_equal_the_golden_ids():
    gemma = load_tokenizer(demo_path())
    for case in json.loads((DATA / "gemma3_tokens.json").read_text())["cases"]:
        assert gemma.encode(case["text"]) == case["ids"], case["text"]
        assert gemma.decode(case["ids"][1:], skip_special=False) == case["text"]


def spm(**changes) -> Tokenizer:
    """A SentencePiece vocabulary in which "abc" is reachable through "bc" (better score) or "ab"."""
    rows = [("<unk>", 2, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    rows += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    rows += [("  ", USER_DEFINED, -1000.0), ("<tag>", USER_DEFINED, -1000.0), ("bc", NORMAL, -1.0),
             ("ab", NORMAL, -2.0),
             ("\u2581a", NORMAL, -3.0), ("abc", NORMAL, -4.0), ("\u2581", NORMAL, -5.0), ("a", NORMAL, -6.0),
             ("b", NORMAL, -7.0), ("c", NORMAL, -8.0)]  # fmt: skip
    tokens, types, scores = zip(*rows)
    fields = ggml(model="llama", tokens=list(tokens), token_type=list(types), scores=list(scores), bos_token_id=1,
                  eos_token_id=2, unknown_token_id=0, add_space_prefix=False) | ggml(**changes)  # fmt: skip
    return Tokenizer.from_gguf(fields, "tiny.gguf")


def spelled(tokenizer: Tokenizer, text: str, **options) -> list[str]:
    return [tokenizer.token(i) for i in tokenizer.encode(text, **options)]


def test_sentencepiece_merges_the_best_score_first():
    assert spelled(spm(), "abc") == ["<s>", "abc"]
    assert spelled(spm(), "ab", add_special=False) == ["ab"]
    assert spelled(spm(), "aabcb", add_special=False) == ["a", "abc", "b"]


@given(st.lists(st.text("ab\U0001f600\ud800", max_size=6), unique=True), st.integers(0, 2**32))
def test_merges_are_all_ways_to_halve_a_piece_in_the_declared_order(pieces, seed):
    scores = np.random.Generator(np.random.PCG64(seed)).integers(-2, 3, len(pieces)).astype(np.float64)
    want = []
    for i, piece in enumerate(pieces):
        for j, left in enumerate(pieces):
            want += [
                (-scores[i], -len(left), -len(right), i, j, k)
                for k, right in enumerate(pieces)
                if left and right and left + right == piece
            ]
    left, right = merges(pieces, scores)
    assert list(zip(left.tolist(), right.tolist())) == [way[4:] for way in sorted(want)]


_WORDS = ["".join(word) for length in (1, 2, 3, 4) for word in itertools.product("ab\u2581", repeat=length)]
_PARTS = ["é", "<0xC3>", "<s>", "<tag>", "\U0001f600", "<unk>", "between", "  "]


def library_of(rows: list[tuple[str, int, float]], unknown: str | None) -> tokenizers.Tokenizer:
    """The library's tokenizer over (text, kind, score), its merges from all ways to halve a piece."""
    usable = [(text, 0.0 if kind == USER_DEFINED else score) for text, kind, score in rows
              if kind in (NORMAL, USER_DEFINED)]  # fmt: skip
    some = [text for text, _ in usable]
    halves = merges(some, np.array([score for _, score in usable]))
    joins = [(some[left], some[right]) for left, right in zip(*(half.tolist() for half in halves))]
    model = tokenizers.models.BPE({text: i for i, (text, _, _) in enumerate(rows)}, joins, unk_token=unknown,
                                  fuse_unk=True, byte_fallback=any(kind == BYTE for _, kind, _ in rows))  # fmt: skip
    found = tokenizers.Tokenizer(model)
    token = lambda text, special: tokenizers.AddedToken(text, normalized=False, special=special)
    found.add_special_tokens([token(text, True) for text, kind, _ in rows if kind in (2, CONTROL)])
    found.add_tokens([token(text, False) for text, kind, _ in rows if kind == USER_DEFINED])
    return found


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("spelled", [0, 200, 256])
@pytest.mark.parametrize("unknown", [True, False])
def test_pieces_that_meet_merge_as_in_the_librarys_table(prefix, spelled, unknown):
    """Vocabularies full of ties, with and without bytes, an unknown token, user-defined pieces, control tokens."""
    rng = np.random.Generator(np.random.PCG64([prefix, spelled, unknown]))
    kinds, odds = (NORMAL, USER_DEFINED, UNUSED, CONTROL), (0.91, 0.03, 0.04, 0.02)
    for _ in range(12):
        rows = [(word, kinds[rng.choice(4, p=odds)]) for word in _WORDS if len(word) == 1 or rng.random() < 0.6]
        rows += [("<s>", CONTROL), ("<tag>", USER_DEFINED), ("<unk>", 2)]
        rows += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)][:spelled]
        rows = [(*rows[i], float(rng.integers(-2, 1))) for i in rng.permutation(len(rows))]
        tokens, types, scores = map(list, zip(*rows))
        fields = ggml(model="llama", tokens=tokens, token_type=types, scores=scores, add_space_prefix=prefix,
                      unknown_token_id=tokens.index("<unk>") if unknown else None)  # fmt: skip
        ours = Tokenizer.from_gguf(fields).backend
        library = library_of(rows, "<unk>" if unknown else None)
        library.normalizer, library.decoder = ours._normalizer, ours._decoder
        for parsed in (True, False):
            ours.encode_special_tokens = library.encode_special_tokens = not parsed
            for odd in (0.0, 0.05, 0.3):
                parts = rng.choice(_PARTS, 60), rng.choice(["a", "b", " ", "\u2581"], 60)
                text = "".join(np.where(rng.random(60) < odd, *parts).tolist())
                ids = library.encode(text, add_special_tokens=False).ids
                assert ours.encode(text).ids == ids, (rows, text)
                for skipped in (True, False):
                    want = library.decode(ids, skip_special_tokens=skipped)
                    assert ours.decode(ids, skip_special_tokens=skipped) == want


def test_pieces_are_found_by_their_text_alone(monkeypatch):
    """Whatever their checksums, and however few meetings are remembered."""
    want = spm().encode("abcab bcabc aabbcc")
    monkeypatch.setattr(tokenizer_pieces, "crc32", lambda raw: 5 + len(raw) % 2)
    monkeypatch.setattr(tokenizer_pieces, "_MEETINGS", 2)
    crowded = spm()
    assert crowded.encode("abcab bcabc aabbcc") == want
    assert len(crowded.backend._met) <= 2
    assert crowded.backend.token_to_id("nowhere") is None and crowded.token(crowded.vocab_size) is None


def test_sentencepiece_falls_back_to_bytes_and_back():
    assert spelled(spm(), "é", add_special=False) == ["<0xC3>", "<0xA9>"]
    assert spm().decode(spm().encode("aé\nb")) == "aé\nb"


def test_user_defined_tokens_are_found_in_any_text_but_control_tokens_only_when_parsed():
    assert spelled(spm(), "a<tag>  b</s>", add_special=False) == ["a", "<tag>", "\u2581\u2581", "b", "</s>"]
    plain = spelled(spm(), "<tag></s>", add_special=False, parse_special=False)
    assert plain[0] == "<tag>" and "</s>" not in plain
    assert spm().decode(spm().encode("</s>ab")) == "ab"
    assert spm().decode(spm().encode("</s>ab"), skip_special=False) == "<s></s>ab"


def test_bos_eos_and_space_prefix_follow_the_metadata():
    assert spelled(spm(add_bos_token=False, add_eos_token=True), "ab") == ["ab", "</s>"]
    prefixed = spm(add_space_prefix=True)
    assert spelled(prefixed, "a") == ["<s>", "\u2581a"]
    assert prefixed.decode(prefixed.encode("ab c")) == "ab c"
    assert prefixed.encode("") == [1]


def test_llama3_takes_a_whole_word_of_the_vocabulary_without_its_merges():
    tokens, merges = ["a", "b", "c", "bc", "abc"], ["b c"]
    build = lambda pre: Tokenizer.from_gguf(ggml(model="gpt2", pre=pre, tokens=tokens, merges=merges), "tiny.gguf")
    assert build("llama-bpe").encode("abc") == [4]
    assert build("gpt-2").encode("abc") == [0, 3]


@pytest.mark.parametrize(("field", "changes"), [
    ("model", {"model": "rwkv"}), ("model", {"model": None}), ("scores", {"scores": [0.0]}),
    ("scores", {"scores": None}),
    ("token_type", {"token_type": [1]}), ("tokens", {"tokens": ["a"] * 269}), ("bos_token_id", {"bos_token_id": 269}),
    ("bos_token_id", {"bos_token_id": -1}),
])  # fmt: skip
def test_broken_metadata_is_refused_by_the_name_of_the_field(field, changes):
    with pytest.raises(FormatError) as error:
        spm(**changes)
    assert error.value.field == f"tokenizer.ggml.{field}"


@pytest.mark.parametrize(("field", "fields"), [
    ("pre", {"pre": "nobody", "merges": []}), ("pre", {"merges": []}), ("merges", {"pre": "gpt-2"}),
    ("merges", {"pre": "gpt-2", "merges": ["a z"]}), ("merges", {"pre": "gpt-2", "merges": ["ab"]}),
])  # fmt: skip
def test_broken_merges_are_refused(field, fields):
    with pytest.raises(FormatError) as error:
        Tokenizer.from_gguf(ggml(model="gpt2", tokens=["a", "b", "ab"], **fields), "tiny.gguf")
    assert error.value.field == f"tokenizer.ggml.{field}"


@given(
    st.lists(st.sampled_from(["a", "bc", " ", "  ", "é", "你", "👨‍👩‍👧", "<tag>", "\n", "\ufffd"]), max_size=12).map(
        "".join
    )
)
def test_streamed_text_adds_up_and_never_shows_half_a_character(text):
    for tokenizer in (spm(), pinned("smollm2")[0]):
        ids = tokenizer.encode(text, add_special=False)
        stream = tokenizer.stream()
        pieces = [stream.push(i) for i in ids]
        assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_off_by_the_end_is_flushed_as_replacement():
    tokenizer = spm()
    stream = tokenizer.stream()
    cut = tokenizer.encode("a你", add_special=False)[:-1]
    assert [stream.push(i) for i in cut] == ["a", "", ""]
    assert set(stream.flush()) == {"\ufffd"}


def test_text_and_ids_that_cannot_be_are_refused():
    for text in (b"bytes", None, "\ud800"):
        with pytest.raises(ContractError):
            spm().encode(text)
    for i in (-1, 269, 2**40):
        with pytest.raises(ContractError):
            spm().decode([i])


def test_a_folder_reads_back_what_its_tokenizer_json_says(tmp_path):
    source = spm(add_bos_token=True)
    source.backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded.encode("a<tag>é") == source.encode("a<tag>é")
    assert (loaded.bos_id, loaded.eos_id, loaded.stop_ids) == (1, 2, {0, 2})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<nowhere>"}))
    with pytest.raises(FormatError, match="bos_token"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(FormatError, match="no such file"):
        Tokenizer.from_folder(tmp_path / "absent")
