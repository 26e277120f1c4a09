"""safetensors: every dtype without a copy, shards as one, and broken files, each refused by the field at fault."""

from __future__ import annotations

import json
import tracemalloc

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from safetensors import deserialize
from safetensors.numpy import save_file

from vtlab.models.safetensors import DTYPES, read_safetensors
from vtlab.ops.errors import FormatError

from .broken_safetensors import CORRUPTIONS, X, container, entry
from .fuzz_files import READERS, fuzz


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruption_is_refused_by_its_field(name, tmp_path):
    content, field = CORRUPTIONS[name]
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as caught:
            read_safetensors(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20, "memory spent on a claim that the file cannot keep"
    finally:
        tracemalloc.stop()
    assert caught.value.field == field, str(caught.value)
    assert caught.value.file == str(path)
    assert 0 <= caught.value.offset <= len(content)


def written(path, tensors: dict, metadata: dict | None = None) -> None:
    """A file by hand, which PyPI safetensors must read too: tensor -> (dtype name, array of that dtype)."""
    header, data = ({} if metadata is None else {"__metadata__": metadata}), b""
    for name, (dtype, array) in tensors.items():
        header[name] = entry(dtype, list(array.shape), len(data), len(data) + array.nbytes)
        data += array.tobytes()
    content = container(header, data)
    theirs = {name: (spec["dtype"], spec["shape"], bytes(spec["data"])) for name, spec in deserialize(content)}
    assert theirs == {name: (kind, list(a.shape), a.tobytes()) for name, (kind, a) in tensors.items()}
    path.write_bytes(content)


def test_every_dtype_without_a_copy(tmp_path):
    rng = np.random.Generator(np.random.PCG64(2))
    tensors = {}
    for name, dtype in DTYPES.items():
        raw = rng.integers(0, 2 if name == "BOOL" else 256, 6 * dtype.itemsize, dtype=np.uint8)
        tensors[name] = (name, raw.view(dtype).reshape(2, 3))
    path = tmp_path / "types.safetensors"
    written(path, tensors, {"format": "np"})
    with read_safetensors(path) as file:
        assert file.metadata == {"format": "np"} and set(file) == set(tensors) and len(file) == len(tensors)
        raw = np.frombuffer(_root(file["F32"]), np.uint8)
        for name, (_, array) in tensors.items():
            got = file[name]
            assert got.dtype == DTYPES[name] and got.shape == (2, 3) and got.tobytes() == array.tobytes()
            assert np.shares_memory(got, raw) and not got.flags.writeable


def _root(view):
    while isinstance(view, np.ndarray):
        view = view.base
    return view


_SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
_ENTRIES = st.dictionaries(
    st.text(max_size=9).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(DTYPES)), _SHAPES, st.integers(0, 2**32)),
    max_size=6,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=_ENTRIES, metadata=st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3))
def test_tensors_survive_the_package(entries, metadata, tmp_path):
    path, tensors = tmp_path / "any.safetensors", {}
    for name, (dtype, shape, number) in entries.items():
        rng = np.random.Generator(np.random.PCG64(number))
        nbytes = int(np.prod(shape)) * DTYPES[dtype].itemsize
        raw = rng.integers(0, 2 if dtype == "BOOL" else 256, nbytes, dtype=np.uint8)
        tensors[name] = (dtype, raw.view(DTYPES[dtype]).reshape(shape))
    written(path, tensors, metadata or None)
    with read_safetensors(path) as file:
        assert file.metadata == metadata and set(file) == set(tensors)
        for name, (dtype, array) in tensors.items():
            assert file[name].dtype == DTYPES[dtype] and file[name].shape == array.shape
            assert file[name].tobytes() == array.tobytes()


def test_unaligned_data_is_read_in_place(tmp_path):
    """Nothing in the format aligns a tensor: a byte before a float32 must not shift, copy or refuse it."""
    values = np.arange(1, 5, dtype="<f4")
    for spaces in range(8):
        path = tmp_path / f"{spaces}.safetensors"
        header = json.dumps({"a": entry("U8", [1], 0, 1), "x": entry("F32", [4], 1, 17)}) + " " * spaces
        path.write_bytes(container(header, b"!" + values.tobytes()))
        with read_safetensors(path) as file:
            assert np.array_equal(file["x"] * 2, values * 2)


@pytest.mark.parametrize(("length", "said"), [(0, "a file of 0 bytes"), (7, "a file of 7 bytes"),
                                              (20, "at most 12, all that is left: the file is cut")])  # fmt: skip
def test_a_file_cut_short_in_its_header_says_so(length, said, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(container({"x": X}, bytes(4))[:length])
    with pytest.raises(FormatError, match=said):
        read_safetensors(tmp_path / "x.safetensors")


def test_every_prefix_and_every_longer_file_is_refused(tmp_path):
    whole = container({"x": X, "y": entry("BF16", [2, 1], 4, 8)}, bytes(8))
    path = tmp_path / "prefix.safetensors"
    path.write_bytes(whole)
    read_safetensors(path).close()
    for content in [whole[:length] for length in range(len(whole))] + [whole + b"\0"]:
        path.write_bytes(content)
        with pytest.raises(FormatError):
            read_safetensors(path)


def test_the_packages_own_files(tmp_path):
    tensors = {"a": np.arange(6, dtype=np.float16).reshape(2, 3), "b": np.array(-7), "c": np.array([True, False])}
    save_file(tensors, tmp_path / "own.safetensors", {"made": "there"})
    with read_safetensors(tmp_path / "own.safetensors") as file:
        assert file.metadata == {"made": "there"} and set(file) == set(tensors)
        for name, array in tensors.items():
            assert file[name].dtype == array.dtype and np.array_equal(file[name], array)


INDEX = "model.safetensors.index.json"


def sharded(folder, weight_map: object, shards: dict[str, list[str]]) -> None:
    for file, names in shards.items():
        written(folder / file, {name: ("U8", np.frombuffer(name.encode(), np.uint8)) for name in names})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 2}, "weight_map": weight_map}))


def test_shards_read_as_one(tmp_path):
    shards = {"model-1.safetensors": ["a", "b"], "model-2.safetensors": ["c"]}
    sharded(tmp_path, {name: file for file, names in shards.items() for name in names}, shards)
    for path in (tmp_path, tmp_path / INDEX):
        with read_safetensors(path) as checkpoint:
            assert {name: array.tobytes().decode() for name, array in checkpoint.items()} == {n: n for n in "abc"}
            assert checkpoint.file_of("c").name == "model-2.safetensors"
    (tmp_path / INDEX).unlink()
    assert set(read_safetensors(tmp_path)) == set("abc")


A, B = "a.safetensors", "b.safetensors"
BAD_INDEXES = {
    "no weight_map": (None, {A: ["x"]}, "weight_map"),
    "empty weight_map": ({}, {A: ["x"]}, "weight_map"),
    "file name a number": ({"x": 1}, {A: ["x"]}, "weight_map['x']"),
    "missing file": ({"x": A, "y": B}, {A: ["x"]}, "weight_map['y']"),
    "file name too long": ({"x": "a" * 5000 + ".safetensors"}, {A: ["x"]}, "weight_map['x']"),
    "missing tensor": ({"x": A, "y": A}, {A: ["x"]}, "weight_map['y']"),
    "tensor in the other shard": ({"x": A, "y": A}, {A: ["x"], B: ["y"]}, "weight_map['y']"),
    "tensor that the index leaves out": ({"x": A}, {A: ["x", "z"]}, "weight_map['z']"),
    "tensor in two shards": ({"x": A, "y": B}, {A: ["x"], B: ["x", "y"]}, "x"),
    "NUL in the name": ({"x": "a\0.safetensors"}, {A: ["x"]}, "weight_map['x']"),
    "a list": (["x"], {A: ["x"]}, "weight_map"),
}


@pytest.mark.parametrize("name", BAD_INDEXES)
def test_bad_index_is_refused_by_its_field(name, tmp_path):
    weight_map, shards, field = BAD_INDEXES[name]
    sharded(tmp_path, weight_map, shards)
    with pytest.raises(FormatError) as caught:
        read_safetensors(tmp_path / INDEX)
    assert caught.value.field == field, str(caught.value)


@pytest.mark.parametrize("name", ["../out.safetensors", "{}/out.safetensors", "..\\out.safetensors", "in.bin"])
def test_an_index_reaches_only_safetensors_beside_it(name, tmp_path):
    """Each of these files exists and is sound; its name alone is at fault."""
    folder, name = tmp_path / "model", name.format(tmp_path)
    folder.mkdir()
    for path in (tmp_path / "out.safetensors", folder / "in.bin", folder / "..\\out.safetensors"):
        written(path, {"x": ("U8", np.zeros(1, np.uint8))})
    sharded(folder, {"x": name}, {})
    assert (folder / name).is_file()
    with pytest.raises(FormatError) as caught:
        read_safetensors(folder)
    assert caught.value.field == "weight_map['x']" and "bare name" in caught.value.want


def test_metadata_of_shards_is_joined(tmp_path):
    written(tmp_path / A, {"x": ("U8", np.zeros(1, np.uint8))}, {"format": "first", "a": "1"})
    written(tmp_path / B, {"y": ("U8", np.zeros(1, np.uint8))}, {"format": "second", "b": "2"})
    assert read_safetensors(tmp_path).metadata == {"format": "first", "a": "1", "b": "2"}


def test_folders(tmp_path):
    with pytest.raises(FormatError, match=r"no \.safetensors file"):
        read_safetensors(tmp_path)
    sharded(tmp_path, {"x": A}, {A: ["x"]})
    (tmp_path / ("b." + INDEX)).write_text("{}")
    with pytest.raises(FormatError, match="one index"):
        read_safetensors(tmp_path)
    written(tmp_path / "model.safetensors", {"whole": ("U8", np.zeros(1, np.uint8))})
    assert list(read_safetensors(tmp_path)) == ["whole"]
    with pytest.raises(FileNotFoundError):
        read_safetensors(tmp_path / "absent.safetensors")


def test_index_with_a_key_twice(tmp_path):
    written(tmp_path / A, {"x": ("U8", np.zeros(1, np.uint8))})
    (tmp_path / INDEX).write_text(f'{{"weight_map": {{"x": "{A}", "x": "{A}"}}}}')
    with pytest.raises(FormatError, match="'x' twice"):
        read_safetensors(tmp_path)


def test_a_slice_of_the_fuzzer(tmp_path):
    use, corpus = READERS["safetensors"]
    tally = fuzz(use, corpus(), range(300), tmp_path)
    assert tally.findings == []
    assert tally.read > 0 and tally.refused.total() > 150
