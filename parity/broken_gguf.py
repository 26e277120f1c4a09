"""GGUF files made by hand: a builder, a catalogue of broken files with the field at fault, and odd but sound ones."""

from __future__ import annotations

import struct

U32, U64 = (lambda n: struct.pack("<I", n)), (lambda n: struct.pack("<Q", n))
UINT8, BOOL, UINT32, UINT64, STRING, ARRAY = 0, 7, 4, 10, 8, 9
F32, F16, Q4_K = 0, 1, 12


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return U64(len(raw)) + raw


def pair(key: str | bytes, value_type: int, value: bytes) -> bytes:
    return text(key) + U32(value_type) + value


def array(item_type: int, count: int, items: bytes) -> bytes:
    return U32(item_type) + U64(count) + items


def info(name: str | bytes, dims: list[int], ggml_type: int, offset: int) -> bytes:
    return text(name) + U32(len(dims)) + b"".join(map(U64, dims)) + U32(ggml_type) + U64(offset)


def container(pairs=(), infos=(), data=b"", *, version=3, counts=None, alignment=32) -> bytes:
    """A GGUF file out of ready-made parts; `counts` overrides the tensor and pair counts of the header."""
    head = b"GGUF" + U32(version) + b"".join(map(U64, counts or (len(infos), len(pairs))))
    head += b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def nested(depth: int) -> bytes:
    return array(ARRAY, 1, nested(depth - 1)) if depth > 1 else array(UINT8, 0, b"")


ARCH = pair("general.architecture", STRING, text("llama"))
X = info("x", [4], F32, 0)
DATA = bytes(range(32))
KEY, VALUE, TENSOR = "metadata_kv[0].key", "metadata_kv['k'].value", "tensor_infos['x']"


def broken_value(value_type: int, value: bytes) -> bytes:
    return container([pair("k", value_type, value)], [X], DATA)


def broken_info(dims: list[int], ggml_type: int = F32, offset: int = 0, data: bytes = DATA) -> bytes:
    return container([ARCH], [info("x", dims, ggml_type, offset)], data)


def aligned_to(value_type: int, value: bytes) -> bytes:
    return container([pair("general.alignment", value_type, value)], [X], DATA)


ALIGNMENT = "metadata_kv['general.alignment'].value"
CORRUPTIONS: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "magic"),
    "magic cut short": (b"GGU", "magic"),
    "other magic": (b"GGML" + container([ARCH])[4:], "magic"),
    "version 0": (container([ARCH], version=0), "version"),
    "version 1, with 32-bit counts": (container([ARCH], version=1), "version"),
    "version 4": (container([ARCH], version=4), "version"),
    "big endian": (container([ARCH], version=3 << 24), "version"),
    "cut in the counts": (container([ARCH])[:20], "metadata_kv_count"),
    "2^64-1 tensors": (container([ARCH], counts=(2**64 - 1, 1)), "tensor_count"),
    "more tensors than bytes": (container([ARCH], [X], DATA, counts=(9, 1)), "tensor_count"),
    "2^64-1 pairs": (container([ARCH], counts=(0, 2**64 - 1)), "metadata_kv_count"),
    "300,000 pairs in 100 bytes": (container([ARCH], counts=(0, 300_000)), "metadata_kv_count"),
    "one pair too many claimed": (container([ARCH], counts=(0, 2)), "metadata_kv[1].key"),
    "key length 2^64-1": (container([U64(2**64 - 1) + bytes(64)]), f"{KEY}.len"),
    "key of 65536 bytes": (container([pair("k" * 65536, UINT8, b"\0")]), f"{KEY}.len"),
    "empty key": (container([pair("", UINT8, b"\0")]), KEY),
    "NUL in a key": (container([pair("a\0b", UINT8, b"\0")]), KEY),
    "key not UTF-8": (container([pair(b"\xff", UINT8, b"\0")]), f"{KEY}.string"),
    "key twice": (container([ARCH, ARCH]), "metadata_kv[1].key"),
    "value type 13": (broken_value(13, bytes(8)), f"{VALUE}_type"),
    "value cut short": (container([pair("k", UINT64, bytes(4))])[:41], VALUE),
    "bool 2": (broken_value(BOOL, b"\2"), VALUE),
    "bool 2 in an array": (broken_value(ARRAY, array(BOOL, 3, b"\0\1\2")), f"{VALUE}.array[2]"),
    "string past the end": (broken_value(STRING, U64(4096)), f"{VALUE}.string"),
    "string length 2^63": (broken_value(STRING, U64(2**63)), f"{VALUE}.len"),
    "string not UTF-8": (broken_value(STRING, text(b"ab\xc3\x28")), f"{VALUE}.string"),
    "array type 13": (broken_value(ARRAY, array(13, 1, bytes(8))), f"{VALUE}.type"),
    "2^64-1 bytes": (broken_value(ARRAY, array(UINT8, 2**64 - 1, b"")), f"{VALUE}.array"),
    "2^61 u64, 0 bytes modulo 2^64": (broken_value(ARRAY, array(UINT64, 2**61, b"")), f"{VALUE}.array"),
    "300,000 strings in 100 bytes": (broken_value(ARRAY, array(STRING, 300_000, b"")), f"{VALUE}.array[1].len"),
    "2^21+1 strings": (broken_value(ARRAY, array(STRING, 2**21 + 1, b"")), f"{VALUE}.len"),
    "2^16+1 arrays": (broken_value(ARRAY, array(ARRAY, 2**16 + 1, b"")), f"{VALUE}.len"),
    "2^64-1 strings": (broken_value(ARRAY, array(STRING, 2**64 - 1, b"")), f"{VALUE}.len"),
    "string of an array past the end": (broken_value(ARRAY, array(STRING, 1, U64(2**20))), f"{VALUE}.array[0].string"),
    "string of an array 2^64-1 long": (broken_value(ARRAY, array(STRING, 1, U64(2**64 - 1))), f"{VALUE}.array[0].len"),
    "2^21 strings after another": (
        broken_value(ARRAY, array(ARRAY, 2, array(STRING, 1, text("a")) + array(STRING, 2**21, b""))),
        f"{VALUE}.array[1].len",
    ),
    "second string not UTF-8": (
        broken_value(ARRAY, array(STRING, 2, text("ä") + text(b"\x80"))),
        f"{VALUE}.array[1].string",
    ),
    "arrays nested 5 deep": (broken_value(ARRAY, nested(5)), f"{VALUE}.array[0].array[0].array[0].array[0]"),
    "arrays nested 2000 deep": (
        broken_value(ARRAY, array(ARRAY, 1, b"") * 2000),
        f"{VALUE}.array[0].array[0].array[0].array[0]",
    ),
    "alignment 0": (aligned_to(UINT32, U32(0)), ALIGNMENT),
    "alignment 4": (aligned_to(UINT32, U32(4)), ALIGNMENT),
    "alignment 13": (aligned_to(UINT32, U32(13)), ALIGNMENT),
    "alignment 2^17": (aligned_to(UINT32, U32(1 << 17)), ALIGNMENT),
    "alignment as UINT64": (aligned_to(UINT64, U64(32)), ALIGNMENT),
    "alignment as a string": (aligned_to(STRING, text("32")), ALIGNMENT),
    "alignment as an array": (aligned_to(ARRAY, array(UINT32, 1, U32(32))), ALIGNMENT),
    "architecture a number": (
        container([pair("general.architecture", UINT32, U32(1))]),
        "metadata_kv['general.architecture'].value_type",
    ),
    "tensor name of 65 bytes": (container([], [info("n" * 65, [4], F32, 0)], DATA), "tensor_infos[0].name.len"),
    "tensor name length 2^64-1": (
        container([], [U64(2**64 - 1) + bytes(64)], counts=(1, 0)),
        "tensor_infos[0].name.len",
    ),
    "tensor name empty": (container([], [info("", [4], F32, 0)], DATA), "tensor_infos[0].name"),
    "NUL in a tensor name": (container([], [info("a\0", [4], F32, 0)], DATA), "tensor_infos[0].name"),
    "tensor name not UTF-8": (container([], [info(b"\xfe", [4], F32, 0)], DATA), "tensor_infos[0].name.string"),
    "tensor twice": (container([], [X, info("x", [4], F32, 32)], DATA * 2), "tensor_infos[1].name"),
    "5 dimensions": (broken_info([1] * 5), f"{TENSOR}.n_dimensions"),
    "2^32-1 dimensions": (container([], [text("x") + U32(2**32 - 1) + bytes(64)]), f"{TENSOR}.n_dimensions"),
    "cut in the dimensions": (broken_info([4])[:86], f"{TENSOR}.dimensions[0]"),
    "dimension 0": (broken_info([4, 0]), f"{TENSOR}.dimensions"),
    "dimension 2^64-1": (broken_info([2**64 - 1]), f"{TENSOR}.dimensions"),
    "product wraps to 4": (broken_info([4194305, 4194305, 211106198978564]), f"{TENSOR}.dimensions"),
    "bytes wrap to 0": (broken_info([2**62]), f"{TENSOR}.dimensions"),
    "ggml type 4, withdrawn": (broken_info([32], 4), f"{TENSOR}.type"),
    "ggml type 42": (broken_info([32], 42), f"{TENSOR}.type"),
    "ggml type 2^32-1": (broken_info([32], 2**32 - 1), f"{TENSOR}.type"),
    "row no multiple of the block": (broken_info([128, 2], Q4_K, 0, bytes(160)), f"{TENSOR}.dimensions[0]"),
    "offset not aligned": (broken_info([4], offset=4), f"{TENSOR}.offset"),
    "first tensor behind a hole": (broken_info([4], offset=32, data=bytes(64)), f"{TENSOR}.offset"),
    "offset 2^64-32": (broken_info([4], offset=2**64 - 32), f"{TENSOR}.offset"),
    "two tensors in one place": (
        container([], [X, info("y", [4], F32, 0)], DATA),
        "tensor_infos['y'].offset",
    ),
    "tensors overlap": (
        container([], [info("x", [12], F32, 0), info("y", [4], F32, 32)], bytes(96)),
        "tensor_infos['y'].offset",
    ),
    "hole between tensors": (
        container([], [X, info("y", [4], F32, 64)], bytes(96)),
        "tensor_infos['y'].offset",
    ),
    "data cut by a byte": (container([], [X], bytes(15)), f"{TENSOR}.dimensions"),
    "no data at all": (container([], [X]), f"{TENSOR}.dimensions"),
    "32 bytes too many": (container([], [X], bytes(64)), "tensor_data"),
    "data without tensors": (container([ARCH], data=bytes(32)), "tensor_data"),
}

SOUND = {
    "version 2": container([ARCH], [X], DATA, version=2),
    "padding cut": container([ARCH], [X], DATA[:16]),
    "padding cut in the middle": container([ARCH], [X], DATA[:20]),
    "no tensor, no padding": container([ARCH], alignment=1),
    "nothing but counts": container(),
    "tensors listed backwards": container([], [info("y", [4], F32, 32), X], DATA * 2),
    "scalar": container([], [info("x", [], F32, 0)], DATA[:4]),
    "alignment 64": container(
        [pair("general.alignment", UINT32, U32(64))],
        [X, info("y", [4], F32, 64)],
        bytes(64) + DATA,
        alignment=64,
    ),
    "name of 64 bytes": container([], [info("n" * 64, [4], F32, 0)], DATA),
    "arrays nested 4 deep": broken_value(ARRAY, nested(4)),
}
