"""safetensors files made by hand: a builder and a catalogue of broken files with the field at fault."""

from __future__ import annotations

import json


def container(header: dict | str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file out of a header (an object, or its text) and data; `length` overrides the header length."""
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text.encode() if isinstance(text, str) else text
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(dtype: object, shape: object, begin: object, end: object) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


X = entry("U8", [4], 0, 4)
XTEXT = json.dumps(X)


def one(dtype: object, shape: object, begin: object = 0, end: object = 4, data: bytes = bytes(4)) -> bytes:
    return container({"x": entry(dtype, shape, begin, end)}, data)


def two(first: dict, second: dict, nbytes: int) -> bytes:
    return container({"x": first, "y": second}, bytes(nbytes))


SHAPE, OFFSETS = "'x'.shape", "'x'.data_offsets"
CORRUPTIONS: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "header length"),
    "seven bytes": (bytes(7), "header length"),
    "header longer than the file": (container({"x": X}, bytes(4), length=4096), "header length"),
    "header of 2^64-1 bytes": (container({"x": X}, bytes(4), length=2**64 - 1), "header length"),
    "header of 0 bytes": (container(b"", bytes(8)), "header"),
    "header cut by a byte": (container({"x": X}, bytes(4), length=len(json.dumps({"x": X})) - 1), "header"),
    "header with a byte of data": (container({"x": X}, b"!" * 4, length=len(json.dumps({"x": X})) + 1), "header"),
    "space before the brace": (container(" " + json.dumps({"x": X}), bytes(4)), "header"),
    "byte order mark": (container(b"\xef\xbb\xbf{}"), "header"),
    "an array": (container("[]"), "header"),
    "no JSON": (container("{x}"), "header"),
    "not UTF-8": (container(b'{"\xff": 0}'), "header"),
    "lone surrogate": (container('{"\\ud800": ' + XTEXT + "}", bytes(4)), "header"),
    "NaN": (container('{"x": NaN}'), "header"),
    "nested 100,000 deep": (container('{"x":' + "[" * 100_000), "header"),
    "number of 5,000 digits": (container('{"x": ' + "9" * 5000 + "}"), "header"),
    "2^20 commas": (container('{"x": [' + "0," * (2**20 + 1) + "0]}"), "header"),
    "tensor twice": (container('{"x": ' + XTEXT + ', "x": ' + XTEXT + "}", bytes(4)), "header"),
    "dtype twice": (
        container('{"x": {"dtype": "I8", "dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}', bytes(4)),
        "header",
    ),
    "metadata a list": (container({"__metadata__": [], "x": X}, bytes(4)), "__metadata__"),
    "metadata value a number": (container({"__metadata__": {"step": 1}, "x": X}, bytes(4)), "__metadata__"),
    "entry a number": (container({"x": 4}, bytes(4)), "'x'"),
    "entry without a shape": (container({"x": {"dtype": "U8", "data_offsets": [0, 4]}}, bytes(4)), "'x'"),
    "entry with a stranger": (container({"x": {**X, "strides": [1]}}, bytes(4)), "'x'"),
    "unknown dtype": (one("F128", [1]), "'x'.dtype"),
    "packed 4-bit dtype": (one("F4", [8]), "'x'.dtype"),
    "dtype a list": (one(["U8"], [4]), "'x'.dtype"),
    "shape a number": (one("U8", 4), SHAPE),
    "negative dimension": (one("U8", [-4]), SHAPE),
    "two negative dimensions": (one("U8", [-2, -2]), SHAPE),
    "dimension 4.0": (one("U8", [4.0]), SHAPE),
    "dimension true": (one("U8", [True, 4]), SHAPE),
    "dimension null": (one("U8", [None]), SHAPE),
    "65 axes": (one("U8", [1] * 64 + [4]), SHAPE),
    "product wraps to 4": (one("U8", [4194305, 4194305, 211106198978564]), SHAPE),
    "bytes wrap to 0": (one("F64", [2**61], 0, 0, b""), SHAPE),
    "zero hides 2^80": (one("U8", [2**40, 0, 2**40], 0, 0, b""), SHAPE),
    "shape and bytes disagree": (one("U16", [4]), OFFSETS),
    "begin behind end": (one("U8", [4], 4, 0), OFFSETS),
    "negative begin": (one("U8", [4], -4, 0), OFFSETS),
    "offsets as floats": (one("U8", [4], 0.0, 4.0), OFFSETS),
    "end 2^64+4": (one("U8", [4], 2**64, 2**64 + 4), OFFSETS),
    "three offsets": (container({"x": {**X, "data_offsets": [0, 4, 8]}}, bytes(8)), OFFSETS),
    "hole at the front": (one("U8", [4], 4, 8, bytes(8)), OFFSETS),
    "hole between": (two(X, entry("U8", [4], 8, 12), 12), "'y'.data_offsets"),
    "overlap": (two(X, entry("U8", [4], 2, 6), 6), "'y'.data_offsets"),
    "same bytes twice": (two(X, X, 4), "'y'.data_offsets"),
    "data cut by a byte": (one("U8", [4], data=bytes(3)), "data"),
    "trailing byte": (one("U8", [4], data=bytes(5)), "data"),
    "data without tensors": (container({}, bytes(1)), "data"),
    "bool 2": (one("BOOL", [4], data=b"\0\1\2\1"), "'x'"),
}
