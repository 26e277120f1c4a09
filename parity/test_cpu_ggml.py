"""Kernels of GGML blocks on the CPU: instruction sets, shapes around tiles, reads that stay within a matrix."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from vtlab import ops, oracle
from vtlab.device.cpu.tier import tier

from .compare import assert_bytes
from .scalar import draw
from .test_ggml import blocks

LOWER = {"avx512": ["portable"], "avx2": ["portable"]}.get(tier(), [])
KINDS = ("Q5_0", "Q6_K")  # one of each way to sum: bytes by fours, int16 by pairs, bytes by pairs
CODE = """import sys
from vtlab.parity.test_cpu_ggml import results
sys.stdout.buffer.write(results())"""


def results() -> bytes:
    """One row, which meets weights by itself, and six, which meet unpacked ones of the types with blocks of 256; four
    of them do of those with blocks of 32."""
    found = [
        ops.matmul_bt_quant(draw((rows, 512), "float32", rows), blocks(kind, 18, 512, 21), quant_type=kind)
        for kind in KINDS
        for rows in (1, 6)
    ]
    return b"".join(out.tobytes() for out in found)


@pytest.mark.parametrize("name", LOWER)
def test_tiers_give_the_same_bytes(name):
    """The others run in `python -m vtlab.parity.cpu_tiers matmul_bt_quant` under VTLAB_CPU_TIER."""
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, check=True, timeout=280,
                         env={**os.environ, "VTLAB_CPU_TIER": name})  # fmt: skip
    assert run.stdout == results()


@pytest.mark.skipif(sys.platform != "linux", reason="pages are closed by mprotect")
@pytest.mark.parametrize("kind", [*KINDS, "Q3_K", "Q4_K"])
def test_nothing_behind_the_weights_is_read(kind):
    """The matrix ends where a page begins that may not be touched; whoever does ends the process."""
    b = blocks(kind, 16, 512, 22)
    size = -(-b.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    held = pages[size - b.nbytes : size].reshape(b.shape)
    held[...] = b
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(pages.ctypes.data + size), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    for rows in (1, 4):
        x = draw((rows, 512), "float32", 23)
        got = ops.matmul_bt_quant(x, held, quant_type=kind)
        assert_bytes(got, oracle.matmul_bt_quant.mirror(x, b, quant_type=kind))


@pytest.mark.parametrize("columns", [1, 15, 17, 31])
def test_columns_that_fill_no_tile(columns):
    x, b = draw((5, 64), "float32", 24), blocks("Q5_0", columns, 64, 25)
    out = np.full((5, columns), np.nan, np.float32)
    assert ops.matmul_bt_quant(x, b, quant_type="Q5_0", out=out) is out
    assert_bytes(out, oracle.matmul_bt_quant.mirror(x, b, quant_type="Q5_0"))


def test_rows_of_a_packed_tensor():
    wide, table = draw((3, 192), "bfloat16", 26), blocks("Q5_0", 40, 128, 27)
    got = ops.matmul_bt_quant(wide[:, 64:128], table[::2, :44], quant_type="Q5_0", out_dtype="bfloat16")
    want = oracle.matmul_bt_quant.mirror(wide[:, 64:128], table[::2, :44], quant_type="Q5_0", out_dtype="bfloat16")
    assert_bytes(got, want)
