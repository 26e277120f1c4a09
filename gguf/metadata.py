"""The metadata values of GGUF: numbers, booleans, strings, and arrays of them."""

from __future__ import annotations

import struct

import numpy as np

from . import limits
from .cursor import Cursor

UINT32, BOOL, STRING, ARRAY = 4, 7, 8, 9

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_FORMS = {value_type: struct.Struct("<" + code) for value_type, code in _NUMBERS.items()}
_DTYPES = {value_type: np.dtype("<" + code) for value_type, code in _NUMBERS.items()}
_KNOWN = "a value type from 0 (UINT8) to 12 (FLOAT64)"


def read_value(cursor: Cursor, value_type: int, field: str) -> object:
    """The value at the cursor: int, float, bool or str; for an array a NumPy array of its number type, or a list."""
    if value_type == STRING:
        return cursor.string(field, limits.STRING_BYTES)
    if value_type == ARRAY:
        return _read_array(cursor, field, depth=1)
    if value_type not in _FORMS:
        raise cursor.error(f"{field}_type", value_type, _KNOWN, cursor.position - 4)
    value = cursor.number(_FORMS[value_type], field)
    if value_type == BOOL:
        if value > 1:
            raise cursor.error(field, value, "a bool of 0 or 1", cursor.position - 1)
        return bool(value)
    return value


def _read_array(cursor: Cursor, field: str, depth: int) -> np.ndarray | list:
    if depth > limits.ARRAY_DEPTH:
        raise cursor.error(field, f"arrays nested {depth} deep", f"at most {limits.ARRAY_DEPTH} deep")
    item_type = cursor.u32(f"{field}.type")
    if item_type not in _FORMS and item_type not in (STRING, ARRAY):
        raise cursor.error(f"{field}.type", item_type, _KNOWN, cursor.position - 4)
    count = cursor.u64(f"{field}.len")
    if item_type in _FORMS:
        return _numbers(cursor, item_type, count, field)
    if item_type == STRING:
        return cursor.strings(count, field)
    cursor.arrays_left -= count
    if cursor.arrays_left < 0:
        want = f"at most {limits.NESTED_ARRAYS} arrays in arrays in the file"
        raise cursor.error(f"{field}.len", count, want, cursor.position - 8)
    return [_read_array(cursor, f"{field}.array[{index}]", depth + 1) for index in range(count)]


def _numbers(cursor: Cursor, item_type: int, count: int, field: str) -> np.ndarray:
    start = cursor.position
    array = cursor.numbers(_DTYPES[item_type], count, f"{field}.array")
    if item_type != BOOL:
        return array
    if count and array.max() > 1:
        index = int(np.argmax(array > 1))
        raise cursor.error(f"{field}.array[{index}]", array[index], "a bool of 0 or 1", start + index)
    return array.view(np.bool_)
