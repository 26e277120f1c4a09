"""State-space goldens in float32 from vLLM's CPU build: its Triton kernels, interpreted, and its own CPU convolutions.

    python goldens/capture/ops_ssm.py --out goldens/ops

selective_scan_fwd is CUDA and has no CPU form.
"""

from __future__ import annotations

import recurrent_interpreted  # noqa: F401  isort: skip  first of all
import recurrent_conv
import recurrent_ssd
import torch
from record import Record, run


def ssm(record: Record) -> None:
    with torch.no_grad():
        recurrent_conv.conv_native(record)
    for family in (recurrent_conv, recurrent_ssd):
        family.capture(record, "cpu", (torch.float32,))


if __name__ == "__main__":
    run("ssm", __file__, ssm)
