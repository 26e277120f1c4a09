"""Quantised checkpoints: what tools write of them, and the linears that they become."""

from .linears import Quantised, check_dtype, default_weights
from .matrix import Matrix, QuantLinear, Scheme
from .settings import Quantization, read
from .stored import Part, Site, Stored

__all__ = [
    "Matrix",
    "Part",
    "QuantLinear",
    "Quantised",
    "Quantization",
    "Scheme",
    "Site",
    "Stored",
    "check_dtype",
    "default_weights",
    "read",
]
