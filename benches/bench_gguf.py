"""GGUF: opening a file with a vocabulary of 100,000 tokens, and dequantising, beside the `gguf` package."""

from __future__ import annotations

import numpy as np
import pytest

import gguf
from gguf import quants
from vtlab.gguf.dequant import TYPES, dequantize, dequantize_rows
from vtlab.gguf.reader import BlockTensor, read_gguf
from vtlab.ops.blocks import LAYOUTS

ROWS, COLUMNS = 1024, 4096
PEER_DECODES = [name for name in TYPES if name not in ("F32", "Q8_K")]  # F32 is a view in both


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A file of 100,000 tokens with scores and types."""
    path = tmp_path_factory.mktemp("gguf") / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"▁token{i}" for i in range(100_000)])
    writer.add_token_scores([-float(i) for i in range(100_000)])
    writer.add_token_types([1] * 100_000)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks(name: str, rows: int = ROWS) -> BlockTensor:
    layout = LAYOUTS[name]
    rng = np.random.Generator(np.random.PCG64(layout.id))
    raw = rng.integers(0, 256, (rows, layout.row_nbytes(COLUMNS)), dtype=np.uint8)
    return BlockTensor(name, name, (rows, COLUMNS), raw, 0)


@pytest.mark.benchmark(group="open a vocabulary of 100,000 tokens")
@pytest.mark.parametrize("reader", ["vtlab", "gguf"])
def test_open(benchmark, reader, vocabulary):
    if reader == "vtlab":
        file = benchmark(read_gguf, vocabulary)
        assert len(file.metadata["tokenizer.ggml.tokens"]) == 100_000
    else:
        benchmark.pedantic(gguf.GGUFReader, (vocabulary,), rounds=3)


@pytest.mark.parametrize("decoder", ["vtlab", "gguf"])
@pytest.mark.parametrize("name", PEER_DECODES)
def test_dequantize(benchmark, name, decoder):
    tensor = blocks(name)
    benchmark.group = f"dequantize {name}, {ROWS} x {COLUMNS}"
    with np.errstate(all="ignore"):
        if decoder == "vtlab":
            out = benchmark(dequantize, tensor)
        else:
            out = benchmark(quants.dequantize, tensor.data, gguf.GGMLQuantizationType[name])
    if benchmark.stats:
        benchmark.extra_info["GB/s written"] = round(out.nbytes / benchmark.stats["median"] / 1e9, 2)
        benchmark.extra_info["GB/s read"] = round(tensor.data.nbytes / benchmark.stats["median"] / 1e9, 2)


@pytest.mark.benchmark(group="rows of an embedding table")
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_dequantize_rows(benchmark, name):
    table = blocks(name, 32_000)
    rows = np.random.Generator(np.random.PCG64(3)).integers(0, 32_000, 512)
    assert benchmark(dequantize_rows, table, rows).shape == (512, COLUMNS)
