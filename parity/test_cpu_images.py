"""Kernels linked from the objects that Numba left: the same code, and nothing from an object that is another."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from vtlab import ops
from vtlab.device.cpu import images, launch

pytestmark = pytest.mark.skipif(not images.available(), reason="images are for Linux on x86-64")
LOGITS = np.float32([[1, 5, 2, 9, 0], [7, 1, 1, 1, 1]])


@pytest.fixture(scope="module")
def image() -> bytes:
    ops.greedy_argmax(LOGITS)
    found = images._folder() / "logits.argmax.o"
    if not found.exists():  # kept by Numba before there were images, or in a folder that cannot be written
        pytest.skip("no cache folder")
    return found.read_bytes()[32:]


def argmax(kernel, logits: np.ndarray) -> list[int]:
    out = np.full(len(logits), -1, np.int64)
    kernel(0, len(logits), logits, out, logits.shape[1])
    return out.tolist()


def test_an_image_is_the_kernel(image):
    assert argmax(images.linked(image, "argmax"), LOGITS) == [3, 0]
    with pytest.raises(TypeError):
        images.linked(image, "argmax")(0, 1)


def changed(image: bytes, at: int, *values: int) -> bytes:
    return image[:at] + bytes(values) + image[at + len(values) :]


def relocation(image: bytes) -> int:
    """Where the first absolute relocation lies."""
    sections, _ = images._read(image)
    return next(s[4] for s in sections if s[1] == 4 and struct.unpack_from("<Q", image, s[4] + 8)[0] & 0xFFFFFFFF == 1)


@pytest.mark.parametrize("what", [
    lambda image: b"", lambda image: changed(image, 0, 0),
    lambda image: changed(image, 18, 0xB7),  # AArch64
    lambda image: changed(image, relocation(image) + 8, 2),  # relative to the place, 32 bits
    lambda image: image.replace(b"PyArg_UnpackTuple", b"PyArg_UnpackTupl_"),
    lambda image: image.replace(b"_ZN7cpython", b"_ZN7nowhere"),
    lambda image: image.replace(b"_ZN08NumbaEnv", b"_ZN08NumbaEnw"),
])  # fmt: skip
def test_another_object_is_refused(image, what):
    with pytest.raises(images.Unlinkable):
        images.linked(what(image), "argmax")


def test_a_damaged_image_costs_only_numba(image, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "_folder", lambda: tmp_path)
    images.keep("logits", "argmax", image)
    assert argmax(images.load("logits", "argmax"), LOGITS) == [3, 0]
    kept = tmp_path / "logits.argmax.o"
    kept.write_bytes(changed(kept.read_bytes(), len(image) // 2, 0xCC))
    assert images.load("logits", "argmax") is None
    assert argmax(launch.Kernels("logits").argmax, LOGITS) == [3, 0]


def test_constants_come_back_as_they_were(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "_folder", lambda: tmp_path)
    for name, value in (("COUNT", 7), ("TYPES", ("Q4_0", "Q8_0"))):
        images.keep("some", name, value)
        assert images.load("some", name) == value
    assert images.load("some", "OTHER") is None
