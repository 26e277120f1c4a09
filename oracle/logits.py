"""Logits processing before a draw: penalties, temperature, min-p, top-k and top-p.

The order in which vLLM's V1 sampler applies them: allowed ids, bad words, minimum length, bias (`token_masks`),
penalties, (greedy arg-max,) temperature, min-p, top-k and top-p. All take and return float32 logits.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Flag, Parity, Tensor, refuse
from vtlab.ops.numerics import MIRROR
from vtlab.ops.table import op

from . import fixed_point

ROW = "KERNEL-SAMPLING"
ROUNDED = Bound(ulps=0, why="every operation rounds: a float64 result of float32 operands, rounded, is the float32 one")
_SELECTS = "equal, unless a {0} lies within its error, {1} roundings, of the threshold"
MASKED = np.float32(-np.inf)
LOGITS = Tensor("R V", ("float32",))
OUT = {"logits": Tensor("R V", ("float32",))}


def per_row(dtype, draw):
    """A tensor [R] of one dtype, with a recipe for example values: (rng, R) -> array."""
    return Tensor("R", (dtype,), values=lambda rng, axes: draw(rng, axes["R"]))


def softmax(nx, logits):
    """exp(l - max) / sum(exp(l - max)) of float32 rows, in the compute dtype; a row of -inf gives NaN."""
    value = nx.load(logits)
    weights = nx.exp(nx.sub(value, nx.max(value, keepdims=True)))
    return nx.div(weights, fixed_point.total(nx, weights))


def has_vocabulary(arguments, axes):
    """an empty vocabulary"""
    if axes["V"] == 0:
        raise refuse(next(iter(arguments)), "0 columns", "at least one column")


@op(
    row=ROW,
    rows="R",
    args={
        "logits": LOGITS,
        "temperature": per_row("float32", lambda rng, n: rng.uniform(0.3, 1.5, n)),
        "all_random": Flag(),
    },
    returns=OUT,
    rounding=("logits = round(l / t)",),
    parity=Parity("bytes"),
    mirror=ROUNDED,
    nan="propagates",
    upstream="vllm/v1/sample/sampler.py: Sampler.apply_temperature",
    examples=({"R": 3, "V": 17}, {"R": 2, "V": 5, "temperature": "float32", "all_random": True}),
    requires=(has_vocabulary,),
)
def apply_temperature(nx, logits, temperature, *, all_random=False):
    """logits / t, with t = 1 where temperature < 1e-5, unless all_random.

    Shapes: logits [R, V] float32; temperature [R] float32.
    Rounding points: the quotient, once. A temperature below 1e-5 marks a greedy row, whose logits stay as they are.
    Errors: ContractError for other shapes or dtypes, V = 0. Negative temperatures are not refused here.
    Source: vllm/v1/sample/sampler.py.
    """
    divisor = temperature if all_random else np.where(temperature < np.float32(1e-5), np.float32(1), temperature)
    return nx.store(nx.div(nx.load(logits), nx.load(divisor)[:, None]), np.float32)


@op(
    row=ROW,
    rows="R",
    args={
        "logits": LOGITS,
        "prompt_mask": Tensor("R V", ("int8",), values=lambda rng, a: rng.integers(0, 2, (a["R"], a["V"]))),
        "output_counts": Tensor("R V", ("int32",), values=lambda rng, a: rng.integers(0, 3, (a["R"], a["V"]))),
        "output_mask": Tensor("R V", ("int8",), values=lambda rng, a: rng.integers(0, 2, (a["R"], a["V"]))),
        "frequency_penalties": per_row("float32", lambda rng, n: rng.uniform(-2, 2, n)),
        "presence_penalties": per_row("float32", lambda rng, n: rng.uniform(-2, 2, n)),
        "repetition_penalties": per_row("float32", lambda rng, n: rng.uniform(0.5, 2, n)),
    },
    returns=OUT,
    rounding=(
        "l = round(l > 0 ? l / repetition : l * repetition) where prompt_mask or output_mask",
        "l = round(l - round(frequency * count))",
        "l = round(l - round(presence * output_mask))",
    ),
    parity=Parity("bytes"),
    mirror=ROUNDED,
    nan="propagates; a NaN logit takes the product",
    upstream="vllm/model_executor/layers/utils.py: apply_penalties",
    examples=({"R": 4, "V": 33}, {"R": 1, "V": 1}),
    requires=(has_vocabulary,),
)
def apply_penalties(
    nx,
    logits,
    prompt_mask,
    output_counts,
    output_mask,
    frequency_penalties,
    presence_penalties,
    repetition_penalties,
):
    """l' = (l > 0 ? l / rep : l * rep where seen) - freq * count - pres * output_mask.

    Shapes: logits [R, V] float32; prompt_mask, output_mask [R, V] int8 (0 or 1); output_counts [R, V] int32; the
    penalties [R] float32. Seen means in the prompt or in the output.
    Rounding points: counts, products, quotients and differences round to float32, frequency before presence; truth and
    mirror are the same bytes. (So does vLLM on CUDA; its CPU code multiplies by 1/rep, up to 2 ulps away.)
    Errors: ContractError for other shapes or dtypes, V = 0. rep = 0 is allowed: inf for l > 0, else a zero or NaN.
    Source: vllm/model_executor/layers/utils.py; frequency and presence as in the OpenAI API.
    """
    # Every operation rounds, so that float32 itself is the definition: float64 in between would change no byte.
    with np.errstate(all="ignore"):
        repetition = repetition_penalties[:, None]
        scaled = np.where(logits > 0, logits / repetition, logits * repetition)
        value = np.where((prompt_mask != 0) | (output_mask != 0), scaled, logits)
        value -= frequency_penalties[:, None] * output_counts.astype(np.float32)
        value -= presence_penalties[:, None] * (output_mask != 0)
    return value


@op(
    row=ROW,
    rows="R",
    args={"logits": LOGITS, "min_p": per_row("float32", lambda rng, n: rng.uniform(0, 0.3, n))},
    returns=OUT,
    rounding=("p = softmax(l), rounded to float32", "threshold = round(min_p * max(p))"),
    order=fixed_point.ORDER,
    parity=Parity("bytes"),
    mirror=Bound(ulps=0, why=_SELECTS.format("probability", "V/2^18 + 8")),
    nan="a row with a NaN logit stays as it is: no comparison holds",
    ties="a probability equal to the threshold stays",
    upstream="vllm/v1/sample/logits_processor/builtin.py: MinPLogitsProcessor.apply",
    examples=({"R": 5, "V": 40}, {"R": 2, "V": 1}),
    requires=(has_vocabulary,),
)
def apply_min_p(nx, logits, min_p):
    """l' = -inf where softmax(l) < min_p * max(softmax(l)); nothing is below that where min_p <= 0.

    Shapes: logits [R, V] float32; min_p [R] float32.
    Rounding points: the probabilities and the threshold round to float32 before they are compared.
    Errors: ContractError for other shapes or dtypes, V = 0.
    Source: vllm/v1/sample/logits_processor/builtin.py.
    """
    probabilities = nx.store(softmax(nx, logits), np.float32)
    peak = nx.load(probabilities.max(axis=-1))
    threshold = nx.store(nx.mul(nx.load(min_p), peak), np.float32)
    return np.where(probabilities < threshold[:, None], MASKED, logits)


def ordered_codes(values: np.ndarray) -> np.ndarray:
    """Float32 as int32 that ascend with the value: -0 is +0, and every NaN is the same, above +inf."""
    code = np.where(np.isnan(values), np.float32(np.nan), values + np.float32(0)).view(np.int32)
    return np.where(code < 0, code ^ np.int32(0x7FFFFFFF), code)


def ascending_order(values: np.ndarray) -> np.ndarray:
    """Columns of each row in ascending (value, column) order, NaN last: int64 [R, V].

    Sorts one integer for each column, the value's code above the column: no two are equal, so any sort is stable.
    """
    key = (ordered_codes(values).astype(np.int64) << np.int64(32)) | np.arange(values.shape[1], dtype=np.int64)
    key.sort(axis=-1)
    return key & np.int64(0xFFFFFFFF)


@op(
    row=ROW,
    rows="R",
    args={
        "logits": LOGITS,
        "k": Tensor("R", ("int32",), optional=True, values=lambda rng, a: rng.integers(0, a["V"] + 2, a["R"])),
        "p": Tensor("R", ("float32",), optional=True, values=lambda rng, a: rng.uniform(0.05, 1, a["R"])),
    },
    returns=OUT,
    rounding=(
        "the kept logits' probabilities round to float32",
        "their ascending cumulative sums round to float32 (mirror: the sums of the weights, and their quotient)",
        "1 - p rounds to float32",
    ),
    order=f"truth: ascending (value, index). Mirror: {fixed_point.ORDER}; the sum up to a column over the whole sum",
    parity=Parity("bytes"),
    mirror=Bound(ulps=0, why=_SELECTS.format("cumulative sum", "V + 20")),
    nan="sorts above every number; with p, a row with a NaN keeps all that top-k left",
    ties="top-k keeps every logit equal to the k-th largest; top-p drops equal logits of lower index first",
    upstream="vllm/v1/sample/ops/topk_topp_sampler.py: apply_top_k_top_p_pytorch, apply_top_k_only",
    examples=(
        {"R": 4, "V": 50, "k": "int32"},
        {"R": 4, "V": 50, "p": "float32"},
        {"R": 4, "V": 50, "k": "int32", "p": "float32"},
        {"R": 1, "V": 1, "k": "int32", "p": "float32"},
        {"R": 2, "V": 7},
    ),
    requires=(has_vocabulary,),
)
def apply_top_k_top_p(nx, logits, k=None, p=None):
    """l' = l on a row's k largest and, among those, on the fewest largest whose probabilities reach p; else -inf.

    Shapes: logits [R, V] float32; k [R] int32 or None; p [R] float32 or None. k < 1 or k >= V keeps all.
    top-p: with s ascending and c the cumulative sum of softmax(s), position i is dropped where c[i] <= 1 - p, but never
    the last. So p >= 1 keeps all but logits of probability 0, and p = 0 keeps the last of the largest alone.
    Rounding points: probabilities, cumulative sums and 1 - p round to float32 before they are compared.
    Errors: ContractError for other shapes or dtypes, V = 0.
    Source: vllm/v1/sample/ops/topk_topp_sampler.py. vLLM's Triton kernel (CUDA, from 8 rows) trims ties to exactly k.
    """
    vocabulary = logits.shape[1]
    kept = logits.copy()
    for row in () if k is None else np.flatnonzero((k >= 1) & (k < vocabulary)):
        threshold = np.partition(logits[row], vocabulary - k[row])[vocabulary - k[row]]
        kept[row, logits[row] < threshold] = MASKED
    if p is None:
        return kept
    order = ascending_order(kept)
    ascending = np.take_along_axis(kept, order, axis=-1)
    if nx is MIRROR:
        cumulative = fixed_point.running_shares(nx.exp(nx.sub(ascending, nx.max(ascending, keepdims=True))))
    else:
        probabilities = nx.load(nx.store(softmax(nx, ascending), np.float32))
        cumulative = nx.store(np.add.accumulate(probabilities, axis=-1), np.float32)
    dropped = cumulative <= (np.float32(1) - p)[:, None]
    dropped[:, -1] = False
    np.put_along_axis(kept, order, np.where(dropped, MASKED, ascending), axis=-1)
    return kept
