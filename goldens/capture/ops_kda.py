"""Kimi delta attention goldens in float32 from vLLM's CPU build: FLA's Triton kernels, interpreted.

python goldens/capture/ops_kda.py --out goldens/ops
"""

from __future__ import annotations

import recurrent_interpreted  # noqa: F401  isort: skip  first of all
import recurrent_kda
import torch
from record import run

if __name__ == "__main__":
    run("kda", __file__, lambda record: recurrent_kda.capture(record, "cpu", (torch.float32,)))
