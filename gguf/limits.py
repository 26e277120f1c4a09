"""What a GGUF header may claim. Real files stay far below; beyond, a header is an attack or an accident.

The format's own limits are the dimensions, the name and key lengths and the alignment rule; the rest bounds the
time and memory that a header can make a reader spend (2^21 strings parse in about half a second).
"""

HEADER_BYTES = 1 << 27  # metadata and tensor infos together: 128 MiB; a vocabulary of 262,144 tokens takes 6 MiB
METADATA_PAIRS = 1 << 16
TENSORS = 1 << 17
KEY_BYTES = (1 << 16) - 1  # GGUF specification
NAME_BYTES = 64  # GGUF specification, ggml's GGML_MAX_NAME
STRING_BYTES = 1 << 26  # tokenizer.huggingface.json of the largest vocabularies takes 33 MB
ARRAY_STRINGS = 1 << 21  # strings in arrays, over the whole file; arrays of numbers are bounded by their bytes
NESTED_ARRAYS = 1 << 16  # arrays in arrays, over the whole file
ARRAY_DEPTH = 4
DIMENSIONS = 4  # ggml's GGML_MAX_DIMS
ALIGNMENTS = tuple(1 << n for n in range(3, 17))  # specification: a multiple of 8; ggml: a power of two
DEFAULT_ALIGNMENT = 32
