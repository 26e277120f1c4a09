"""Importing this lets vLLM's Triton kernels run on the CPU; import it before anything of vLLM.

The interpreter is exact for integers and float32; it rounds float8 half up and multiplies bfloat16 wrongly,
so no golden of those comes from it. vLLM switches Triton off where it sees no driver, unless no device is
visible, and takes the name of its own distribution for proof of a CPU build without a Triton backend.
"""

from __future__ import annotations

import importlib.metadata
import os

import numpy as np


def enable() -> None:
    """Make vllm.triton_utils.HAS_TRITON true, with every kernel run by Triton's interpreter."""
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise RuntimeError("want vLLM's CPU build")
    true_version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.26.0" if name == "vllm" else true_version(name)
    try:
        from vllm import triton_utils
    finally:
        importlib.metadata.version = true_version
    if not triton_utils.HAS_TRITON:
        raise RuntimeError("Triton could not be enabled: is it installed?")
    _give_log1p(triton_utils)


def _give_log1p(triton_utils) -> None:
    """The interpreter has no device library: give it NumPy's float32 log1p."""
    from triton.runtime.interpreter import TensorHandle

    def log1p(x):
        return triton_utils.tl.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)

    triton_utils.tldevice.log1p = log1p


enable()
