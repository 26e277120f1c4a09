"""Keeps a tensor that two builds' captures have in common once: in the CPU build's file.

    python goldens/share.py goldens/ops/gdn.cuda.safetensors          # leaves out what gdn.cpu.safetensors holds
    python goldens/share.py --whole goldens/ops/gdn.cuda.safetensors  # takes it back in, before gdn.cpu is made again

A file's metadata say under "elsewhere" which tensors of its cases are where: {key: [file beside it, key there,
digest]}. The digest is of the tensor's dtype, shape and bytes as they were captured, and every reader checks it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
from pathlib import Path

_LEAST = 1024
"""Bytes from which leaving a tensor out saves more than saying where it is."""


def digest(entry: dict, data: bytes) -> str:
    """SHA-256 of a tensor: dtype, shape, bytes."""
    return hashlib.sha256(f"{entry['dtype']} {entry['shape']} ".encode() + data).hexdigest()


def read(path: Path) -> tuple[dict, dict[str, tuple[dict, bytes]]]:
    """(what vtlab's metadata say, {key: (its entry, its bytes)} in the order of the file)."""
    blob = path.read_bytes()
    (size,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + size])
    about = json.loads(header.pop("__metadata__")["vtlab"])
    tensors = {}
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        tensors[key] = entry, blob[8 + size + begin : 8 + size + end]
    return about, tensors


def write(path: Path, about: dict, tensors: dict[str, tuple[dict, bytes]]) -> None:
    """A safetensors file of these, wider dtypes first as its alignment wants."""
    width = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
    header, at = {"__metadata__": {"vtlab": json.dumps(about)}}, 0
    order = sorted(tensors, key=lambda key: (-width.get(tensors[key][0]["dtype"], 1), key))
    for key in order:
        entry, data = tensors[key]
        header[key] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors[key][1] for key in order))


def whole(path: Path) -> None:
    """Take back what is elsewhere."""
    about, tensors = read(path)
    for key, (name, there, want) in about.pop("elsewhere", {}).items():
        entry, data = read(path.with_name(name))[1][there]
        if digest(entry, data) != want:
            raise SystemExit(f"{path}: {key} is no longer {there} of {name}: capture it again")
        tensors[key] = entry, data
    write(path, about, tensors)


def share(path: Path) -> None:
    """Leave out what the CPU build's file of the same family holds."""
    whole(path)
    about, tensors = read(path)
    beside = path.with_name(f"{path.name.split('.')[0]}.cpu.safetensors")
    held = {digest(*tensor): key for key, tensor in read(beside)[1].items()}
    elsewhere = {key: [beside.name, held[of], of] for key, tensor in tensors.items()
                 if len(tensor[1]) >= _LEAST and (of := digest(*tensor)) in held}  # fmt: skip
    write(path, {**about, "elsewhere": elsewhere}, {key: t for key, t in tensors.items() if key not in elsewhere})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--whole", action="store_true", help="take back in what is elsewhere")
    arguments = parser.parse_args()
    for path in arguments.files:
        before = path.stat().st_size
        (whole if arguments.whole else share)(path)
        print(f"{path}: {before / 1e6:.2f} MB, now {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
