"""The arithmetic of the oracles: float64 `TRUTH`, float32 `MIRROR`, correct rounding, declared orders."""

from .arithmetic import MIRROR, PLAIN, TRUTH, Arithmetic, widen
from .fma import fma_f32
from .orders import Order, block_butterfly, chunked, pairwise, sequential, split, strided_tree, warp_butterfly
from .rounding import STORAGE_DTYPES, round_to
from .threads import parallel
from .truth_matmul import SUM_BLOCK

__all__ = [
    "MIRROR",
    "PLAIN",
    "STORAGE_DTYPES",
    "SUM_BLOCK",
    "TRUTH",
    "Arithmetic",
    "Order",
    "block_butterfly",
    "chunked",
    "fma_f32",
    "pairwise",
    "parallel",
    "round_to",
    "sequential",
    "split",
    "strided_tree",
    "warp_butterfly",
    "widen",
]
