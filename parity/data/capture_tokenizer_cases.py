"""Token ids of varied texts by independent tokenizers, for parity/test_tokenizer.py.

    python capture_tokenizer_cases.py transformers FOLDER_WITH_TOKENIZER_JSON > gemma3_tokens.json
    python capture_tokenizer_cases.py transformers-bpe FOLDER_WITH_TOKENIZER_JSON > qwen3_tokens.json
    python capture_tokenizer_cases.py llama.cpp MODEL.gguf > smollm2_tokens.json

The last two also write the part of the vocabulary that these texts can reach (any token that occurs in them, and
the merges between such tokens), so that the cases run without the model file. Runs outside vtlab's environment:
the first two need transformers, the last llama-cpp-python and gguf.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from pathlib import Path


def texts() -> list[str]:
    return json.loads((Path(__file__).parent / "tokenizer_texts.json").read_text())


def by_transformers(folder: str) -> dict:
    import transformers
    from tokenizers import __version__ as tokenizers_version

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    maker = f"transformers {transformers.__version__}, tokenizers {tokenizers_version}, {type(tokenizer).__name__}"
    cases = [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in texts()]
    return {"provenance": {"maker": maker, "call": "tokenizer(text)['input_ids']"}, "cases": cases}


def by_transformers_bpe(folder: str) -> dict:
    data = json.loads((Path(folder) / "tokenizer.json").read_text())
    added = {token["content"]: token for token in data["added_tokens"]}
    ids = data["model"]["vocab"] | {text: token["id"] for text, token in added.items()}
    tokens = sorted(ids, key=ids.get)
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            3 if added.get(text, {}).get("special") else 4 if text in added else 1 for text in tokens
        ],
        "tokenizer.ggml.merges": [
            " ".join(merge) if isinstance(merge, list) else merge for merge in data["model"]["merges"]
        ],
    }
    assert list(range(len(tokens))) == sorted(ids.values())
    return {**by_transformers(folder), "vocabulary": reachable(fields)}


def by_llama_cpp(file: str) -> dict:
    import llama_cpp

    from gguf import GGUFReader

    model = llama_cpp.Llama(file, vocab_only=True, verbose=False)
    cases = []
    for text in texts():
        read, plain = (model.tokenize(text.encode(), add_bos=True, special=flag) for flag in (True, False))
        cases.append({"text": text, "ids": read} | ({"plain_ids": plain} if plain != read else {}))
    fields = {
        key: field.contents() for key, field in GGUFReader(file).fields.items() if key.startswith("tokenizer.ggml")
    }
    maker = f"llama-cpp-python {llama_cpp.__version__}"
    call = "ids: tokenize(text, add_bos=True, special=True), plain_ids: special=False"
    return {"provenance": {"maker": maker, "call": call}, "vocabulary": reachable(fields), "cases": cases}


def reachable(fields: dict) -> dict:
    """The tokens that occur in some text, with their ids, and the merges that make them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    forms = [form for text in texts() for form in (text, unicodedata.normalize("NFC", text))]
    spelled = "\n".join("".join(letters[byte] for byte in text.encode()) for text in forms)
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    kept = {token: i for i, token in enumerate(tokens) if types[i] != 1 or token in spelled}
    merges = [merge for merge in fields["tokenizer.ggml.merges"] if merge.replace(" ", "") in kept]
    rest = {key: value for key, value in fields.items() if not isinstance(value, list)}
    special = {i: types[i] for i in kept.values() if types[i] != 1}
    return {"metadata": rest, "size": len(tokens), "tokens": kept, "types": special, "merges": merges}


if __name__ == "__main__":
    maker = {"transformers": by_transformers, "transformers-bpe": by_transformers_bpe, "llama.cpp": by_llama_cpp}[
        sys.argv[1]
    ]
    json.dump(maker(sys.argv[2]), sys.stdout, ensure_ascii=True, separators=(",", ":"))
