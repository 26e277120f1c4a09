"""GGUF: files that must be read, byte for byte, and broken ones, each refused by the field at fault."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import gguf
from vtlab.gguf import limits
from vtlab.gguf.reader import read_gguf
from vtlab.ops.blocks import LAYOUTS
from vtlab.ops.errors import FormatError

from . import fuzz_files
from .broken_gguf import (
    ARCH,
    ARRAY,
    CORRUPTIONS,
    DATA,
    F16,
    SOUND,
    STRING,
    X,
    array,
    container,
    info,
    pair,
    text,
)
from .fuzz_files import READERS, fuzz
from .mutate_files import mutate


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruption_is_refused_by_its_field(name, tmp_path):
    content, field = CORRUPTIONS[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as caught:
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20, "memory spent on a claim that the file cannot keep"
    finally:
        tracemalloc.stop()
    assert caught.value.field == field, str(caught.value)
    assert caught.value.file == str(path)
    assert 0 <= caught.value.offset <= len(content)


@pytest.mark.parametrize("name", SOUND)
def test_unusual_but_sound_files_are_read(name, tmp_path):
    path = tmp_path / "sound.gguf"
    path.write_bytes(SOUND[name])
    with read_gguf(path) as file:
        for tensor in file.tensors.values():
            count = int(np.prod(tensor.shape))
            assert tensor.data.tobytes() == SOUND[name][tensor.offset : tensor.offset + 4 * count]
        if name == "arrays nested 4 deep":
            (((inner,),),) = file.metadata["k"]
            assert inner.dtype == np.uint8 and inner.size == 0


def written(path, metadata: dict, tensors: dict, alignment: int = 32) -> None:
    """A file by PyPI gguf's writer: metadata key -> (value, GGUFValueType[, item type]), tensor -> (bytes, type)."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for key, (value, *types) in metadata.items():
        writer.add_key_value(key, value, *types)
    for name, (data, ggml_type) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[ggml_type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_every_type_survives_the_writer_without_a_copy(tmp_path):
    rng = np.random.Generator(np.random.PCG64(1))
    tensors = {}
    for name, layout in LAYOUTS.items():
        if name != "Q8_1":  # an activation type; gguf 0.19 gives its block a size that ggml left in 2023
            blocks = rng.integers(0, 256, (3, 2, 2 * layout.nbytes), dtype=np.uint8)
            tensors[name] = (blocks if layout.elements > 1 else blocks.view(layout.block), name)
    path = tmp_path / "types.gguf"
    written(path, {}, {name: (data.view(np.uint8), kind) for name, (data, kind) in tensors.items()}, alignment=64)
    with read_gguf(path) as file:
        assert file.arch == "llama" and file.alignment == 64 and list(file.tensors) == list(tensors)
        first = file.tensors["F32"]
        raw = np.frombuffer(_root(first.data), np.uint8)
        for name, tensor in file.tensors.items():
            assert tensor.type == name and tensor.shape == (3, 2, 2 * LAYOUTS[name].elements)
            assert tensor.data.tobytes() == tensors[name][0].tobytes()
            assert np.shares_memory(tensor.data, raw) and not tensor.data.flags.writeable
            assert tensor.data.ctypes.data - raw.ctypes.data == tensor.offset


def _root(view: np.ndarray):
    while isinstance(view, np.ndarray):
        view = view.base
    return view


def test_layouts_are_ggmls():
    theirs = {kind.name: (kind.value, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    ours = {layout.name: (layout.id, layout.elements, layout.nbytes) for layout in LAYOUTS.values()}
    assert ours.pop("Q8_1") == (9, 32, 36)  # f16 d, f16 s, 32 codes: ggml's block_q8_1
    theirs.pop("Q8_1")
    assert ours.items() <= theirs.items()


_TYPE = gguf.GGUFValueType
_INTEGERS = {_TYPE.UINT8: (0, 8), _TYPE.INT8: (-1, 7), _TYPE.UINT16: (0, 16), _TYPE.INT16: (-1, 15)}
_INTEGERS |= {_TYPE.UINT32: (0, 32), _TYPE.INT32: (-1, 31), _TYPE.UINT64: (0, 64), _TYPE.INT64: (-1, 63)}
_VALUES = {kind: st.integers(low * 2**bits, 2**bits - 1) for kind, (low, bits) in _INTEGERS.items()}
_VALUES |= {_TYPE.FLOAT32: st.floats(width=32, allow_nan=False), _TYPE.FLOAT64: st.floats(allow_nan=False)}
_VALUES |= {_TYPE.BOOL: st.booleans(), _TYPE.STRING: st.text(max_size=20)}
_PAIRS = st.one_of([st.tuples(value, st.just(kind)) for kind, value in _VALUES.items()]) | st.one_of(
    [st.tuples(st.lists(v, min_size=1, max_size=9), st.just(_TYPE.ARRAY), st.just(k)) for k, v in _VALUES.items()]
)
_ANY_METADATA = st.dictionaries(st.text("abc._", min_size=1, max_size=9), _PAIRS, max_size=8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metadata=_ANY_METADATA, sizes=st.lists(st.integers(1, 40), max_size=4))
def test_metadata_and_tensors_survive_the_writer(metadata, sizes, tmp_path):
    path = tmp_path / "any.gguf"
    tensors = {f"t{i}": (np.arange(n, dtype=np.uint8), "I8") for i, n in enumerate(sizes)}
    written(path, metadata, tensors)
    with read_gguf(path) as file:
        assert set(file.metadata) == {"general.architecture", *metadata}
        for key, (value, *_) in metadata.items():
            got = file.metadata[key]
            got = got.tolist() if isinstance(got, np.ndarray) else got
            assert got == value and type(got) is type(value)
            assert not isinstance(value, list) or type(got[0]) is type(value[0])
        assert [(t.shape, t.data.tobytes()) for t in file.tensors.values()] == [((n,), bytes(range(n))) for n in sizes]


def test_every_prefix_is_refused(tmp_path):
    whole = container(
        [ARCH, pair("k", ARRAY, array(STRING, 2, text("a") + text("b")))],
        [X, info("y", [2, 3], F16, 32)],
        DATA + bytes(12),
    )
    path = tmp_path / "prefix.gguf"
    path.write_bytes(whole)
    read_gguf(path).close()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            read_gguf(path)


def test_a_vocabulary_is_read_in_order(tmp_path):
    tokens = [f"▁{i}" for i in range(50_000)]
    items = b"".join(text(token) for token in tokens)
    scores = np.arange(50_000, dtype="<f4")
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(
        container(
            [pair("t", ARRAY, array(STRING, 50_000, items)), pair("s", ARRAY, array(6, 50_000, scores.tobytes()))]
        )
    )
    with read_gguf(path) as file:
        assert file.metadata["t"] == tokens
        assert np.array_equal(file.metadata["s"], scores) and file.metadata["s"].dtype == np.float32


def test_header_cap(tmp_path, monkeypatch):
    """A header may be no longer than its cap, however long the file is."""
    path = tmp_path / "long.gguf"
    path.write_bytes(container([ARCH, pair("k", STRING, text("v" * 100))], [X], DATA))
    read_gguf(path).close()
    monkeypatch.setattr(limits, "HEADER_BYTES", 128)
    with pytest.raises(FormatError, match="a header of at most 128 bytes"):
        read_gguf(path)


def test_missing_architecture_and_wrong_paths(tmp_path):
    path = tmp_path / "bare.gguf"
    path.write_bytes(container())
    with pytest.raises(FormatError, match=r"general\.architecture"):
        _ = read_gguf(path).arch
    with pytest.raises(FormatError, match="a directory"):
        read_gguf(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_gguf(tmp_path / "absent.gguf")


def test_views_outlive_the_file(tmp_path):
    path = tmp_path / "kept.gguf"
    path.write_bytes(container([ARCH], [X], DATA))
    with read_gguf(path) as file:
        kept = file.tensors["x"].data
    assert file.tensors == {} and kept.tobytes() == DATA[:16]


def test_a_slice_of_the_fuzzer(tmp_path):
    use, corpus = READERS["gguf"]
    tally = fuzz(use, corpus(), range(300), tmp_path)
    assert tally.findings == []
    assert tally.read > 0 and tally.refused.total() > 150


def test_the_fuzzer_finds_what_is_wrong(tmp_path, monkeypatch):
    """A reader that fails in another way, takes long or takes much is found out."""
    wrongs = iter([lambda: {}["no such key"], lambda: time.sleep(0.6), lambda: bytes(2 << 20), lambda: None])
    corpus = [b"whole"]

    def use(path):
        if path.read_bytes() not in corpus:
            next(wrongs)()

    monkeypatch.setattr(fuzz_files, "MOST_SECONDS", 0.5)
    monkeypatch.setattr(fuzz_files, "MOST_BYTES", 1 << 20)
    numbers = itertools.islice((n for n in range(100) if mutate(Random(n), corpus) not in corpus), 4)
    tally = fuzz(use, corpus, numbers, tmp_path)
    key_error, seconds, nbytes = (finding.split(": ")[1] for finding in tally.findings)
    assert key_error == "KeyError" and seconds.endswith(" s") and nbytes == "2 MiB"
