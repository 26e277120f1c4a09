"""Models over `ops`: checkpoints to tokens, in one decoder for three families and one paged engine.

>>> engine = load("model.gguf")
>>> engine.generate(["The capital of France is"], SamplingParams(max_tokens=8))
"""

from .engine import Engine
from .loading import load, load_decoder, load_tokenizer
from .request import Output, TokenLogprobs
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer

__all__ = [
    "Engine",
    "Output",
    "SamplingParams",
    "TokenLogprobs",
    "Tokenizer",
    "load",
    "load_decoder",
    "load_tokenizer",
]
