"""Importing this makes FLA's kernels, as vLLM has them, run in Triton's interpreter; import it first of all."""

from __future__ import annotations

import interpreted  # noqa: F401  isort: skip  before vLLM
import recurrent_tuning  # noqa: F401  isort: skip  before vLLM's kernels
import sys

import vllm.third_party.flash_linear_attention.ops as fla
from vllm.triton_utils import tl

# FLA keeps tl.exp and its like under names of its own, taken before the interpreter puts its versions in their place.
_LATE = {name: (lambda x, name=name: getattr(tl, name)(x)) for name in ("exp", "exp2", "log", "log2")}
for _module in [module for name, module in sys.modules.items() if name.startswith(fla.__name__)]:
    for _name, _function in _LATE.items():
        if hasattr(_module, _name):
            setattr(_module, _name, _function)


class _Index(int):
    """A loop counter that takes the conversions a compiled one would: FLA widens it to 64 bits."""

    def to(self, _dtype) -> _Index:
        return self


def _counters(*bounds) -> list[_Index]:
    return [_Index(i) for i in range(*map(int, bounds))]


sys.modules[f"{fla.__name__}.chunk_delta_h"].range = _counters

# The grid of causal_conv1d_fn resizes a work list that its caller has filled already: nothing is left to be done.
tl.tensor.nelement, tl.tensor.resize_, tl.tensor.fill_ = (lambda _: -1), (lambda list, _: list), (lambda list, _: list)
