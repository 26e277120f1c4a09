"""Sampling goldens from vLLM's CPU build: the V1 sampler's stages, and the V2 Gumbel sampler, interpreted.

    python goldens/capture/ops_sampling.py --out goldens/ops

Only what is deterministic: vLLM's random draws come from torch's generators.
"""

from __future__ import annotations

import interpreted  # noqa: F401  before vLLM
import torch
from ops_cuda_sampling import gumbel, logits_of, penalty_masks
from record import Record, generator, normal, run
from vllm.model_executor.layers.utils import apply_penalties
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.sample.sampler import Sampler

SHAPES = ((1, 1), (2, 17), (4, 1000))


def bare(kind: type, **state: object) -> object:
    """A logits processor with its per-batch state set, past the bookkeeping that makes it from requests."""
    processor = kind.__new__(kind)
    processor.__dict__.update(state)
    return processor


def truncation(record: Record) -> None:
    for rows, vocab in ((4, 17), (4, 1000), (4, 5000)):
        for part in ("k", "p", "kp"):
            name = f"b{rows}_v{vocab}_{part}"
            logits = logits_of(f"b{rows}_v{vocab}", rows, vocab)
            logits[3, 2] = -torch.inf
            k = torch.tensor([1, 5, min(50, vocab), vocab], dtype=torch.int32) if "k" in part else None
            p = torch.tensor([0.1, 0.9, 0.5, 1.0]) if "p" in part else None
            copies = (None if t is None else t.clone() for t in (k, p))
            out = apply_top_k_top_p_pytorch(logits.clone(), *copies, allow_cpu_sync=True)
            record.case("apply_top_k_top_p", name, "topk_topp_sampler.apply_top_k_top_p_pytorch", {},
                        {"logits": logits, "k": k, "p": p}, {"logits": out})  # fmt: skip
    ties, k = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0, 2.0]] * 3), torch.tensor([2, 1, 4], dtype=torch.int32)
    out = apply_top_k_top_p_pytorch(ties.clone(), k.clone(), None, allow_cpu_sync=True)
    record.case("apply_top_k_top_p", "ties_k", "topk_topp_sampler.apply_top_k_top_p_pytorch", {},
                {"logits": ties, "k": k}, {"logits": out})  # fmt: skip


def scaling(record: Record) -> None:
    for rows, vocab in SHAPES:
        logits = normal(f"scale{vocab}", rows, vocab, scale=3.0)
        temperature = torch.tensor([0.7, 0.0, 1e-6, 1.3])[:rows]
        for every in (False, True):
            if every and rows > 1:
                continue
            out = Sampler.apply_temperature(logits.clone(), temperature, every)
            record.case("apply_temperature", f"v{vocab}{'_all_random' if every else ''}", "Sampler.apply_temperature",
                        {"all_random": every}, {"logits": logits, "temperature": temperature},
                        {"logits": out})  # fmt: skip
        min_p = torch.tensor([0.1, 0.0, 1.0, 0.02])[:rows]
        out = bare(MinPLogitsProcessor, min_p_count=rows, min_p=min_p[:, None].clone()).apply(logits.clone())
        record.case("apply_min_p", f"v{vocab}", "MinPLogitsProcessor.apply", {},
                    {"logits": logits, "min_p": min_p}, {"logits": out})  # fmt: skip
    for rows, vocab in ((3, 50), (5, 1000)):
        name = f"b{rows}_v{vocab}"
        logits = normal("pen" + name, rows, vocab, scale=3.0)
        prompt = torch.randint(0, vocab + 1, (rows, 12), generator=generator("prompt" + name))
        output = torch.randint(0, min(vocab, 20), (rows, 9), generator=generator("output" + name))
        output[0, 4:] = vocab  # padding
        freq, pres = normal("f" + name, rows, scale=0.5), normal("p" + name, rows, scale=0.5)
        rep = torch.tensor([1.0, 0.5, 2.0, 1.3, 1.1][:rows])
        out = apply_penalties(logits.clone(), prompt, output, pres, freq, rep)
        record.case("apply_penalties", name, "vllm.model_executor.layers.utils.apply_penalties", {},
                    {"logits": logits, **penalty_masks(prompt, output, vocab), "frequency_penalties": freq,
                     "presence_penalties": pres, "repetition_penalties": rep}, {"logits": out})  # fmt: skip


def masks(record: Record) -> None:
    logits = normal("masks", 3, 17, scale=3.0)
    rows, cols = torch.tensor([0, 2, 2], dtype=torch.int32), torch.tensor([3, 0, 16], dtype=torch.int32)
    bias, place = torch.tensor([100.0, -100.0, 0.1]), (rows.long(), cols.long())
    out = bare(LogitBiasLogitsProcessor, biases={0: {}}, logits_slice=place, bias_tensor=bias).apply(logits.clone())
    record.case("apply_logit_bias", "v17", "LogitBiasLogitsProcessor.apply", {},
                {"logits": logits, "rows": rows, "cols": cols, "bias": bias}, {"logits": out})  # fmt: skip
    stop = bare(MinTokensLogitsProcessor, min_toks={0: ()}, logits_slice=place, neg_inf_tensor=torch.tensor(-torch.inf))
    record.case("apply_token_mask", "v17", "MinTokensLogitsProcessor.apply", {},
                {"logits": logits, "rows": rows, "cols": cols}, {"logits": stop.apply(logits.clone())})  # fmt: skip
    mask = (torch.rand(3, 17, generator=generator("allowed")) < 0.5).to(torch.int8)
    record.case("apply_allowed_token_ids", "v17", "Sampler.apply_logits_processors: masked_fill_(mask, -inf)", {},
                {"logits": logits, "mask": mask}, {"logits": logits.masked_fill(mask.bool(), -torch.inf)})  # fmt: skip
    words = [[[3], [1, 2, 5], [9, 9]], [[4, 6], [7]], [[1, 2, 3, 4]]]
    past = [[7, 1, 2], [6], [3, 4]]
    out = logits.clone()
    apply_bad_words(out, dict(enumerate(words)), past)
    record.case("apply_bad_words", "v17", "vllm.v1.sample.ops.bad_words.apply_bad_words",
                {"bad_words": words, "past_ids": past}, {"logits": logits}, {"logits": out})  # fmt: skip


def distributions(record: Record) -> None:
    for rows, vocab in SHAPES:
        logits = normal(f"lp{vocab}", rows, vocab, scale=3.0)
        if vocab > 1:
            logits[0, 3], logits[1, 4] = -torch.inf, logits[1, 2]
        record.case("compute_probs", f"v{vocab}", "logits.softmax(dim=-1, dtype=torch.float32)", {},
                    {"logits": logits}, {"probs": logits.softmax(dim=-1, dtype=torch.float32)})  # fmt: skip
        logprobs = Sampler.compute_logprobs(logits)
        record.case("compute_logprobs", f"v{vocab}", "Sampler.compute_logprobs", {},
                    {"logits": logits}, {"logprobs": logprobs})  # fmt: skip
        ids, n = torch.tensor([0, 2, 11, 5])[:rows], min(4, vocab)
        found = Sampler.gather_logprobs(logprobs, n, ids)
        record.case("gather_logprobs", f"v{vocab}", "Sampler.gather_logprobs", {"num_logprobs": n},
                    {"logprobs": logprobs, "ids": ids},
                    {"indices": found[0], "values": found[1], "ranks": found[2]})  # fmt: skip
        record.case("greedy_argmax", f"v{vocab}", "Sampler.greedy_sample", {}, {"logits": logits},
                    {"ids": Sampler.greedy_sample(logits)})  # fmt: skip


def sampling(record: Record) -> None:
    for part in (truncation, scaling, masks, distributions):
        with record.attempt(part.__name__):
            part(record)
    gumbel(record, "cpu")


if __name__ == "__main__":
    run("sampling", __file__, sampling)
