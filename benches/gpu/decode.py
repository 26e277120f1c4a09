"""Decode tokens a second of whole models on a GPU: steps launched op by op beside steps replayed from a graph.

python -m vtlab.benches.gpu.decode [--model FILE|FOLDER] [--dtype bfloat16] [--batch 1 8 32] [--csv FILE]

Without a model, one of Qwen3-0.6B's shapes with random weights: speed does not depend on their values.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from vtlab.models.config import ModelConfig
from vtlab.models.config_hf import read
from vtlab.models.decoder import Decoder
from vtlab.models.engine import Engine
from vtlab.models.linear import Linear
from vtlab.models.loading import load_decoder
from vtlab.models.sampling_params import SamplingParams
from vtlab.models.weights import Layer, Weights

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 8, "attention_bias": False, "head_dim": 128, "intermediate_size": 3072,
    "num_hidden_layers": 28, "vocab_size": 151936, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960, "tie_word_embeddings": True, "rope_theta": 1000000.0, "rope_scaling": None,
    "use_sliding_window": False, "sliding_window": None, "torch_dtype": "bfloat16",
}  # fmt: skip
_PROMPT, _STEPS, _WARM = 128, 64, 4
_BLOCK = 16


def random_decoder(config: ModelConfig) -> Decoder:
    """A bfloat16 model of magnitudes 2^-7 ... 2^-6, so that activations stay finite."""
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> Linear:
        bits = rng.integers(0, 1 << 16, shape, np.uint16)
        return Linear(((bits & 0x807F) | 0x3C00).view(ml_dtypes.bfloat16))

    dtype, layer = ml_dtypes.bfloat16, config.layers[0]
    hidden, inner = config.hidden_size, layer.intermediate_size
    layers = tuple(
        Layer(
            attn_norm=np.ones(hidden, dtype), qkv=matrix(layer.q_size + 2 * layer.kv_size, hidden),
            o=matrix(hidden, layer.q_size), ffn_norm=np.ones(hidden, dtype), gate_up=matrix(2 * inner, hidden),
            down=matrix(hidden, inner), q_norm=np.ones(layer.head_dim, dtype), k_norm=np.ones(layer.head_dim, dtype),
        )
        for _ in config.layers
    )  # fmt: skip
    embed = matrix(config.vocab_size, hidden)
    weights = Weights(embed=embed, norm=np.ones(hidden, dtype), head=embed, layers=layers, rope=config.rope)
    return Decoder(config, weights, 4096)


def measure(decoder: Decoder, batch: int, graphs: bool) -> float:
    """Seconds of one decode step of `batch` requests, the median of many; sampling and scheduling included."""
    blocks = batch * -(-(_PROMPT + _STEPS + _WARM + 2) // _BLOCK)
    engine = Engine(
        decoder, num_blocks=blocks, block_size=_BLOCK, max_num_seqs=batch, max_num_batched_tokens=max(512, batch),
        graphs=graphs,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, decoder.config.vocab_size, (batch, _PROMPT)).tolist()
    params = SamplingParams(max_tokens=_STEPS + _WARM + 1, ignore_eos=True)
    streams = [engine.stream(prompt, params) for prompt in prompts]
    for stream in streams:
        next(stream)
    while any(len(request.generated) < 1 for request in engine.scheduler.running):
        engine.step()
    for _ in range(_WARM):
        engine.step()
    times = []
    while not engine.scheduler.idle:
        full = len(engine.scheduler.running) == batch
        start = time.perf_counter()
        engine.step()
        if full:
            times.append(time.perf_counter() - start)
    for stream in streams:
        stream.close()
    return statistics.median(times)


def rows(decoder: Decoder, batches: list[int]) -> Iterator[dict]:
    """A row of the table for each batch. Weights are read once a step, so their bytes bound it from below."""
    weights = decoder.weights
    kept = [tensor for layer in weights.layers for tensor in vars(layer).values()]
    arrays = [found.weight if isinstance(found, Linear) else found for found in (*kept, weights.norm, weights.head)]
    read_once = sum(array.nbytes for array in arrays)
    for batch in batches:
        eager, replayed = (measure(decoder, batch, graphs) for graphs in (False, True))
        yield {
            "batch": batch, "eager tok/s": round(batch / eager), "graph tok/s": round(batch / replayed),
            "eager ms": round(1e3 * eager, 2), "graph ms": round(1e3 * replayed, 2),
            "weights GB/s": round(read_once / replayed / 1e9),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--csv")
    options = parser.parse_args()
    loaded = load_decoder(options.model, options.dtype, 4096) if options.model else random_decoder(read(QWEN3_06B, ""))
    table = []
    for row in rows(loaded.on(options.device), options.batch):
        table.append(row)
        print("  ".join(f"{name} {value:>7}" for name, value in row.items()), flush=True)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, table[0])
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()
