"""Sampling goldens from vLLM's CUDA build: truncation, penalties, log-probabilities, the Gumbel sampler.

Imported by ops_cuda.py. Logits are float32 and free of ties: below a batch of 8 vLLM sorts and keeps every tie,
from 8 on its Triton kernel keeps exactly k.
"""

from __future__ import annotations

import torch
from record import Record, generator, normal


def logits_of(name: str, rows: int, vocab: int) -> torch.Tensor:
    """Distinct values in each row, spread like real logits."""
    values = normal(name, rows, vocab, scale=3.0)
    for row in values:
        while row.unique().numel() < vocab:
            row += 1e-3 * torch.randn(vocab, generator=generator(name + "again"))
    return values


def penalty_masks(prompt: torch.Tensor, output: torch.Tensor, vocab: int) -> dict[str, torch.Tensor]:
    """Token lists padded with `vocab` -> the masks and counts that vtlab's op takes."""

    def counts(ids: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(ids.shape[0], vocab + 1, dtype=torch.int32)
        return table.scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.int32))[:, :vocab].contiguous()

    seen = counts(output)
    return {
        "prompt_mask": (counts(prompt) > 0).to(torch.int8),
        "output_counts": seen,
        "output_mask": (seen > 0).to(torch.int8),
    }


def sampling(record: Record) -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    for rows in (4, 8):
        for vocab in (17, 1000, 5000):
            for part in ("k", "p", "kp"):
                name = f"b{rows}_v{vocab}_{part}"
                logits = logits_of(f"b{rows}_v{vocab}", rows, vocab)
                k = (
                    torch.tensor([1, 5, min(50, vocab), vocab] * (rows // 4), dtype=torch.int32)
                    if "k" in part
                    else None
                )
                p = torch.tensor([0.1, 0.9, 0.5, 1.0] * (rows // 4)) if "p" in part else None
                with record.attempt(f"top {name}"):
                    out = apply_top_k_top_p(logits.cuda(), *(None if t is None else t.cuda() for t in (k, p)))
                    record.case("apply_top_k_top_p", name, "vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_top_p", {},
                                {"logits": logits, "k": k, "p": p}, {"logits": out})  # fmt: skip
    for rows, vocab in ((3, 50), (5, 1000)):
        name = f"b{rows}_v{vocab}"
        logits = normal("pen" + name, rows, vocab, scale=3.0)
        prompt = torch.randint(0, vocab + 1, (rows, 12), generator=generator("prompt" + name))
        output = torch.randint(0, min(vocab, 20), (rows, 9), generator=generator("output" + name))
        output[0, 4:] = vocab
        freq, pres = normal("f" + name, rows, scale=0.5), normal("p" + name, rows, scale=0.5)
        rep = torch.tensor([1.0, 0.5, 2.0, 1.3, 1.1][:rows])
        with record.attempt(f"penalties {name}"):
            from vllm.model_executor.layers.utils import apply_penalties

            out = apply_penalties(logits.cuda(), prompt.cuda(), output.cuda(), pres.cuda(), freq.cuda(), rep.cuda())
            record.case("apply_penalties", name, "vllm.model_executor.layers.utils.apply_penalties", {},
                        {"logits": logits, **penalty_masks(prompt, output, vocab),
                         "frequency_penalties": freq, "presence_penalties": pres,
                         "repetition_penalties": rep},
                        {"logits": out})  # fmt: skip
    for rows, vocab in ((2, 17), (3, 5000)):
        logits = normal(f"lp{vocab}", rows, vocab, scale=3.0)
        logits[0, 3] = -torch.inf
        with record.attempt(f"logprobs {vocab}"):
            from vllm.v1.sample.sampler import Sampler

            logprobs = Sampler.compute_logprobs(logits.cuda())
            record.case("compute_logprobs", f"v{vocab}", "Sampler.compute_logprobs", {},
                        {"logits": logits}, {"logprobs": logprobs})  # fmt: skip
            ids = torch.tensor([5, 0, 11][:rows])
            found = Sampler.gather_logprobs(logprobs, 4, ids.cuda())
            record.case("gather_logprobs", f"v{vocab}", "Sampler.gather_logprobs", {"num_logprobs": 4},
                        {"logprobs": logprobs, "ids": ids},
                        {"indices": found[0], "values": found[1], "ranks": found[2]})  # fmt: skip
    gumbel(record, "cuda")


def gumbel(record: Record, device: str) -> None:
    """The V2 worker's Gumbel sampler: Philox noise by (seed, position, token), greedy where temperature is 0."""
    for vocab, fp64, scaled in ((100, False, True), (3000, False, True), (3000, True, True), (3000, False, False)):
        name = f"v{vocab}_{'fp64' if fp64 else 'fp32'}_{'scaled' if scaled else 'raw'}"
        logits = normal(f"gum{vocab}", 6, vocab, scale=2.0)
        rows, pos = torch.tensor([0, 1, 2, 2, 3, 4], dtype=torch.int32), torch.tensor([0, 1, 7, 8, 4095, 123456])
        temperature = torch.tensor([1.0, 0.0, 0.7, 1.3, 1.0])
        seeds = torch.tensor([0, 1, -5, 2**40 + 3, 2**31])
        with record.attempt(f"gumbel {name}"):
            from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

            put = [t.to(device) for t in (logits, rows, temperature, seeds, pos)]
            ids = gumbel_sample(*put, apply_temperature=scaled, use_fp64=fp64)
            record.case("gumbel_sample", name, "vllm.v1.worker.gpu.sample.gumbel.gumbel_sample",
                        {"apply_temperature": scaled, "fp64": fp64},
                        {"logits": logits, "req_idx": rows, "temperature": temperature, "seed": seeds, "pos": pos},
                        {"ids": ids})  # fmt: skip
