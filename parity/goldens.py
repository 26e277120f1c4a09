"""Reads the goldens: op cases as NumPy keyword arguments, token streams, and a quick list of both.

for case in op_cases("norm", "rms_norm"):
    out = oracle.rms_norm(**case.call())
    assert_bytes(out, case.outputs["out"])
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import ml_dtypes
import numpy as np

from vtlab.goldens import share
from vtlab.ops.errors import FormatError

FOLDER = Path(__file__).resolve().parent.parent / "goldens"
_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "BOOL": np.bool_,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
    "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64,
}  # fmt: skip


@dataclass(frozen=True)
class GoldenCase:
    """One call that vLLM made, by the names of vtlab's op, and what came back.

    Attributes
    ----------
    arguments, inputs : the op's keyword arguments: plain values, and arrays. `outputs` : its results by name;
        for an op that works in place, the arrays it changed, by the argument's name.
    function : what was called in vLLM. build : "cpu" or "cuda". provenance : versions, machine, script.
    """

    name: str
    op: str
    function: str
    arguments: Mapping[str, object]
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    provenance: Mapping[str, object] = field(repr=False)
    build: str = "cpu"

    def call(self) -> dict[str, object]:
        """Keyword arguments of the op, arrays copied so that an in-place op leaves the golden alone."""
        return {**self.arguments, **{name: array.copy() for name, array in self.inputs.items()}}

    def __str__(self) -> str:
        return f"{self.op}-{self.name}-{self.build}"


@dataclass(frozen=True)
class GoldenFile:
    """What a golden file holds. `kind` is "ops", "tokens" or "hidden"; `ops` counts its cases by op, `prompts` its
    streams."""

    path: Path
    kind: str
    name: str
    build: str
    provenance: Mapping[str, object] = field(repr=False)
    ops: Mapping[str, int]
    prompts: int
    errors: Mapping[str, str]


def _header(path: Path) -> tuple[dict, int]:
    """(JSON header, offset of the data) of a safetensors file, without its tensors."""
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= size <= path.stat().st_size - 8:
            raise FormatError(path, 0, "header length", size, "a length within the file")
        try:
            return json.loads(file.read(size)), 8 + size
        except ValueError as error:
            raise FormatError(path, 8, "header", error, "JSON") from None


@lru_cache(maxsize=64)
def _metadata(path: Path, stamp: int) -> tuple[dict, dict, int]:
    header, data = _header(path)
    text = header.pop("__metadata__", {}).get("vtlab")
    if text is None:
        raise FormatError(path, 8, "__metadata__", "no key vtlab", "the provenance and the cases")
    return json.loads(text), header, data


def op_cases(family: str, op: str | None = None, build: str | None = None) -> list[GoldenCase]:
    """The cases of a family (goldens/ops/<family>.<build>.safetensors), of one op or build where given."""
    found = []
    for path in sorted((FOLDER / "ops").glob(f"{family}.*.safetensors")):
        about, entries, start = _metadata(path, path.stat().st_mtime_ns)
        where = about["provenance"]["build"]
        if build not in (None, where):
            continue
        wanted = [case for case in about["cases"] if op in (None, case["op"])]
        data = np.memmap(path, np.uint8, "r", offset=start) if wanted else None
        for case in wanted:
            inputs, outputs = (
                {name: _tensor_of(path, about, entries, data, key) for name, key in case[part].items()}
                for part in ("inputs", "outputs")
            )
            found.append(GoldenCase(case["name"], case["op"], case["function"], case["arguments"], inputs, outputs,
                                    about["provenance"], where))  # fmt: skip
    return found


def _tensor_of(path: Path, about: Mapping, entries: Mapping, data: np.ndarray, key: str) -> np.ndarray:
    """A tensor of a case, where it is kept: in the file itself or, as goldens/share.py left it, beside it."""
    if key not in about.get("elsewhere", {}):
        return _tensor(path, entries, data, key)
    name, there, digest = about["elsewhere"][key]
    beside = path.with_name(name)
    _, entries, start = _metadata(beside, beside.stat().st_mtime_ns)
    array = _tensor(beside, entries, np.memmap(beside, np.uint8, "r", offset=start), there)
    if share.digest(entries[there], array.tobytes()) != digest:
        raise FormatError(beside, None, there, "other bytes", f"those that {path.name} was captured with")
    return array


def _tensor(path: Path, entries: Mapping, data: np.ndarray, key: str) -> np.ndarray:
    if key not in entries:
        raise FormatError(path, None, key, "no such tensor", "a tensor of the file")
    entry = entries[key]
    begin, end = entry["data_offsets"]
    array = np.array(data[begin:end]).view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    array.flags.writeable = False
    return array


def token_golden(name: str) -> dict:
    """goldens/tokens/<name>.json: provenance, model, dtype, prompts and their greedy streams."""
    path = FOLDER / "tokens" / f"{name}.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(path, None, "file", error, "JSON") from None
    if missing := {"provenance", "model", "dtype", "prompts", "outputs"} - record.keys():
        raise FormatError(path, None, "file", f"no {', '.join(sorted(missing))}", "a token golden")
    return record


def hidden_golden(name: str) -> dict:
    """goldens/hidden/<name>.safetensors: provenance, model, ids of the prompt, and its states by name (read-only)."""
    path = FOLDER / "hidden" / f"{name}.safetensors"
    about, entries, start = _metadata(path, path.stat().st_mtime_ns)
    data = np.memmap(path, np.uint8, "r", offset=start)
    return {**about, "states": {key: _tensor(path, entries, data, key) for key in entries}}


def list_goldens() -> list[GoldenFile]:
    """Every golden file: the headers of the op files (no tensor is read), the token files whole (they are small)."""
    return [*list_op_goldens(), *_list_tokens(), *_list_hidden()]


def list_op_goldens() -> Iterator[GoldenFile]:
    """The files of op-level goldens."""
    for path in sorted((FOLDER / "ops").glob("*.safetensors")):
        about, _, _ = _metadata(path, path.stat().st_mtime_ns)
        counts: dict[str, int] = {}
        for case in about["cases"]:
            counts[case["op"]] = counts.get(case["op"], 0) + 1
        provenance = about["provenance"]
        yield GoldenFile(
            path, "ops", path.name.split(".")[0], provenance["build"], provenance, counts, 0, about["errors"]
        )


def _list_tokens() -> Iterator[GoldenFile]:
    for path in sorted((FOLDER / "tokens").glob("*.json")):
        record = token_golden(path.stem)
        provenance, count = record["provenance"], len(record["prompts"])
        yield GoldenFile(path, "tokens", path.stem, provenance["build"], provenance, {}, count, {})


def _list_hidden() -> Iterator[GoldenFile]:
    for path in sorted((FOLDER / "hidden").glob("*.safetensors")):
        about, _, _ = _metadata(path, path.stat().st_mtime_ns)
        provenance = about["provenance"]
        yield GoldenFile(path, "hidden", path.stem, provenance["build"], provenance, {}, 1, {})
