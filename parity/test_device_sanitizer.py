"""compute-sanitizer over the small cases, each tool in a process of its own; the verdicts enter the GPU's record."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from .device_record import TOOLS

_ROOM = {"synccheck": ("--num-cuda-barriers", "16384")}
"""Barriers in shared memory that a tool has room for: 40 of each block are more than it expects."""


@pytest.fixture(scope="module")
def sanitizers(request):
    """All tools at once: each slows the process down, none needs the whole GPU."""
    if request.config.getoption("--device") != "cuda":
        pytest.skip("needs a GPU: --device cuda")
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    command = [sys.executable, "-m", "vtlab.parity.device_run", *(request.config.getoption("--family") or ())]
    return {
        tool: subprocess.Popen(
            ["compute-sanitizer", "--tool", tool, *_ROOM.get(tool, ()), *command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for tool in TOOLS
    }  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_finds_nothing(tool, sanitizers, sanitizer_verdicts):
    printed, _ = sanitizers[tool].communicate()
    assert re.search(r"^[1-9]\d* cases$", printed, re.MULTILINE), printed[-3000:]
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", printed)
    assert found and found[1] == "0", printed[-3000:]
    sanitizer_verdicts[tool] = "0 errors"
