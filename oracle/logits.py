"""Logits processing before a draw: temperature, penalties, bias, masks, bad words, min-p, top-k and top-p.

The order in which vLLM's V1 sampler applies them: allowed ids, bad words, minimum length, bias, penalties, (greedy
arg-max,) temperature, min-p, top-k and top-p. All take and return float32 logits.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import EXACT, Bound, Flag, Parity, Tensor, Value, refuse
from vtlab.ops.numerics import strided_tree
from vtlab.ops.table import op

_ROW = "KERNEL-SAMPLING"
# One partial sum per 4096 columns: many blocks can share a row of 150,000 logits and still form the same sum.
VOCAB_ORDER = strided_tree(4096)
SOFTMAX_WHY = "the sum's path is V/4096 adds and 12 tree levels; exp is within 1 ulp, its argument rounds once"
_SELECTS = Bound(ulps=0, why="equal, unless a probability lies within its own rounding error of the threshold")
_MASKED = np.float32(-np.inf)
_LOGITS = Tensor("R V", ("float32",))
_OUT = {"logits": Tensor("R V", ("float32",))}


def per_row(dtype, draw):
    """A tensor [R] of one dtype, with a recipe for example values: (rng, R) -> array."""
    return Tensor("R", (dtype,), values=lambda rng, axes: draw(rng, axes["R"]))


def softmax(nx, logits):
    """exp(l - max) / sum(exp(l - max)) of float32 rows, in the compute dtype; a row of -inf gives NaN."""
    value = nx.load(logits)
    weights = nx.exp(nx.sub(value, nx.max(value, keepdims=True)))
    return nx.div(weights, nx.sum(weights, order=VOCAB_ORDER, keepdims=True))


def has_vocabulary(arguments, axes):
    """an empty vocabulary"""
    if axes["V"] == 0:
        raise refuse("logits", "0 columns", "at least one column")


def _indices_in_range(arguments, axes):
    """a row or column index outside the logits, in either direction"""
    for name, size in (("rows", axes["R"]), ("cols", axes["V"])):
        value = arguments[name]
        outside = (value < 0) | (value >= size)
        if outside.any():
            at = int(np.argmax(outside))
            raise refuse(name, f"{int(value[at])} at index {at}", f"0 <= index < {size}")


@op(
    row=_ROW,
    args={
        "logits": _LOGITS,
        "temperature": per_row("float32", lambda rng, n: rng.uniform(0.3, 1.5, n)),
        "all_random": Flag(),
    },
    returns=_OUT,
    rounding=("logits = round(l / t)",),
    parity=Parity("bytes"),
    mirror=Bound("1", why="one division"),
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
    row=_ROW,
    args={
        "logits": _LOGITS,
        "prompt_mask": Tensor("R V", ("int8",), values=lambda rng, a: rng.integers(0, 2, (a["R"], a["V"]))),
        "output_counts": Tensor("R V", ("int32",), values=lambda rng, a: rng.integers(0, 3, (a["R"], a["V"]))),
        "output_mask": Tensor("R V", ("int8",), values=lambda rng, a: rng.integers(0, 2, (a["R"], a["V"]))),
        "frequency_penalties": per_row("float32", lambda rng, n: rng.uniform(-2, 2, n)),
        "presence_penalties": per_row("float32", lambda rng, n: rng.uniform(-2, 2, n)),
        "repetition_penalties": per_row("float32", lambda rng, n: rng.uniform(0.5, 2, n)),
    },
    returns=_OUT,
    rounding=(
        "l = round(l > 0 ? l / repetition : l * repetition) where prompt_mask or output_mask",
        "l = round(l - round(frequency * count))",
        "l = round(l - round(presence * output_mask))",
    ),
    parity=Parity("bytes"),
    mirror=EXACT,
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
    Rounding points: every product, quotient and difference rounds to float32, frequency before presence; truth and
    mirror are the same bytes. (vLLM's CPU code multiplies by 1/rep and may lie 1 ulp away.)
    Errors: ContractError for other shapes or dtypes, V = 0. rep = 0 is allowed and makes infinities.
    Source: vllm/model_executor/layers/utils.py; frequency and presence as in the OpenAI API.
    """

    def rounded(value):
        return nx.load(nx.store(value, np.float32))

    value = nx.load(logits)
    repetition = nx.load(repetition_penalties)[:, None]
    scaled = nx.where(value > 0, nx.div(value, repetition), nx.mul(value, repetition))
    value = rounded(nx.where((prompt_mask != 0) | (output_mask != 0), scaled, value))
    frequency, presence = nx.load(frequency_penalties)[:, None], nx.load(presence_penalties)[:, None]
    value = rounded(nx.sub(value, rounded(nx.mul(frequency, nx.load(output_counts)))))
    present = nx.load((output_mask != 0).astype(np.int8))
    return nx.store(nx.sub(value, rounded(nx.mul(presence, present))), np.float32)


@op(
    row=_ROW,
    args={"logits": _LOGITS, "min_p": per_row("float32", lambda rng, n: rng.uniform(0, 0.3, n))},
    returns=_OUT,
    rounding=("p = softmax(l), rounded to float32", "threshold = round(min_p * max(p))"),
    order=str(VOCAB_ORDER),
    parity=Parity("bytes"),
    mirror=_SELECTS,
    nan="a row with a NaN logit stays as it is: no comparison holds",
    ties="a probability equal to the threshold stays",
    upstream="vllm/v1/sample/logits_processor/builtin.py: MinPLogitsProcessor.apply",
    examples=({"R": 5, "V": 40}, {"R": 2, "V": 1}),
    requires=(has_vocabulary,),
)
def apply_min_p(nx, logits, min_p):
    """l' = -inf where softmax(l) < min_p * max(softmax(l)); rows with min_p <= 0 stay.

    Shapes: logits [R, V] float32; min_p [R] float32.
    Rounding points: the probabilities and the threshold round to float32 before they are compared.
    Errors: ContractError for other shapes or dtypes, V = 0.
    Source: vllm/v1/sample/logits_processor/builtin.py.
    """
    probabilities = nx.store(softmax(nx, logits), np.float32)
    peak = nx.load(probabilities.max(axis=-1))
    threshold = nx.store(nx.mul(nx.load(min_p), peak), np.float32)
    masked = (probabilities < threshold[:, None]) & (min_p > 0)[:, None]
    return np.where(masked, _MASKED, logits)


def _indices(size):
    return lambda rng, axes: rng.integers(0, axes[size], axes["m"])


def _distinct_pairs(axis):
    """Example index lists without repeated pairs: pair i is (i % R, 7 i % V), distinct below lcm(R, V)."""
    step = {"R": 1, "V": 7}[axis]
    return lambda rng, axes: (np.arange(axes["m"]) * step) % axes[axis]


@op(
    row=_ROW,
    args={
        "logits": _LOGITS,
        "rows": Tensor("m", ("int32",), values=_distinct_pairs("R")),
        "cols": Tensor("m", ("int32",), values=_distinct_pairs("V")),
        "bias": Tensor("m", ("float32",)),
    },
    returns=_OUT,
    rounding=("l = round(l + bias), pair by pair in list order",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="propagates",
    ties="a pair that is listed twice adds up, in list order (torch's indexed += keeps only one)",
    upstream="vllm/v1/sample/logits_processor/builtin.py: LogitBiasLogitsProcessor.apply",
    examples=({"R": 3, "V": 20, "m": 9}, {"R": 1, "V": 2, "m": 0}),
    requires=(has_vocabulary, _indices_in_range),
)
def apply_logit_bias(nx, logits, rows, cols, bias):
    """l[rows[i], cols[i]] += bias[i] for every i.

    Shapes: logits [R, V] float32; rows, cols [m] int32; bias [m] float32.
    Rounding points: each addition rounds to float32, so that truth and mirror are the same bytes.
    Errors: ContractError for an index out of range (named), other shapes or dtypes, V = 0.
    Source: vllm/v1/sample/logits_processor/builtin.py.
    """
    out = logits.copy()
    with np.errstate(invalid="ignore", over="ignore"):
        np.add.at(out, (rows, cols), bias)
    return out


@op(
    row=_ROW,
    args={
        "logits": _LOGITS,
        "rows": Tensor("m", ("int32",), values=_indices("R")),
        "cols": Tensor("m", ("int32",), values=_indices("V")),
    },
    returns=_OUT,
    rounding=("none",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="a masked NaN becomes -inf, others stay",
    upstream="vllm/v1/sample/logits_processor/builtin.py: MinTokensLogitsProcessor (the scatter)",
    examples=({"R": 3, "V": 20, "m": 9}, {"R": 2, "V": 3, "m": 0}),
    requires=(has_vocabulary, _indices_in_range),
)
def apply_token_mask(nx, logits, rows, cols):
    """l[rows[i], cols[i]] = -inf for every i.

    Shapes: logits [R, V] float32; rows, cols [m] int32.
    Rounding points: none.
    Errors: ContractError for an index out of range (named), other shapes or dtypes, V = 0.
    Source: vllm/v1/sample/logits_processor/builtin.py.
    """
    out = logits.copy()
    out[rows, cols] = _MASKED
    return out


@op(
    row=_ROW,
    args={
        "logits": _LOGITS,
        "mask": Tensor("R V", ("int8",), values=lambda rng, a: rng.integers(0, 2, (a["R"], a["V"]))),
    },
    returns=_OUT,
    rounding=("none",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="a masked NaN becomes -inf, others stay",
    upstream="vllm/v1/sample/sampler.py: allowed_token_ids_mask",
    examples=({"R": 3, "V": 20}, {"R": 1, "V": 1}),
    requires=(has_vocabulary,),
)
def apply_allowed_token_ids(nx, logits, mask):
    """l' = -inf where mask is not 0: a set mask *excludes*.

    Shapes: logits [R, V] float32; mask [R, V] int8.
    Rounding points: none.
    Errors: ContractError for other shapes or dtypes, V = 0.
    Source: vllm/v1/sample/sampler.py.
    """
    return np.where(mask != 0, _MASKED, logits)


def _lists_fit(*names):
    def check(arguments, axes):
        for name in names:
            value = arguments[name]
            if not isinstance(value, (list, tuple)) or len(value) != axes["R"]:
                got = f"{type(value).__name__} of {len(value) if hasattr(value, '__len__') else '?'}"
                raise refuse(name, got, f"a list with one entry for each of {axes['R']} rows")

    check.__doc__ = f"{' or '.join(names)} without an entry for each row"
    return check


def _ids_in_vocabulary(name, sequences):
    def check(arguments, axes):
        for row, entry in enumerate(arguments[name]):
            for ids in entry if sequences else [entry]:
                if sequences and len(ids) == 0:
                    raise refuse(name, f"an empty sequence in row {row}", "sequences of at least one token id")
                for token in ids:
                    if not 0 <= token < axes["V"]:
                        raise refuse(name, f"token id {token} in row {row}", f"0 <= id < {axes['V']}")

    check.__doc__ = f"a token id outside the vocabulary in {name}" + (", or an empty sequence" if sequences else "")
    return check


@op(
    row=_ROW,
    args={
        "logits": _LOGITS,
        "bad_words": Value("a list per row of banned token id sequences"),
        "past_ids": Value("a list per row of the tokens generated so far"),
    },
    returns=_OUT,
    rounding=("none",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="a masked NaN becomes -inf, others stay",
    upstream="vllm/v1/sample/ops/bad_words.py: apply_bad_words",
    examples=(
        {"R": 2, "V": 9, "bad_words": [[[3], [1, 2, 5]], [[4, 6]]], "past_ids": [[7, 1, 2], [6]]},
        {"R": 1, "V": 4, "bad_words": [[]], "past_ids": [[]]},
    ),
    requires=(
        has_vocabulary, _lists_fit("bad_words", "past_ids"), _ids_in_vocabulary("bad_words", True),
    ),
)  # fmt: skip
def apply_bad_words(nx, logits, bad_words, past_ids):
    """l[r, w[-1]] = -inf for every banned sequence w of row r whose w[:-1] ends the tokens generated so far.

    Shapes: logits [R, V] float32; bad_words and past_ids are lists with an entry for each row.
    Rounding points: none.
    Errors: ContractError for lists that do not fit the rows, empty sequences, ids outside the vocabulary, V = 0.
    Source: vllm/v1/sample/ops/bad_words.py.
    """
    out = logits.copy()
    for row, (sequences, past) in enumerate(zip(bad_words, past_ids)):
        for sequence in sequences:
            prefix = list(sequence[:-1])
            if len(prefix) <= len(past) and list(past[len(past) - len(prefix) :]) == prefix:
                out[row, sequence[-1]] = _MASKED
    return out


@op(
    row=_ROW,
    args={
        "logits": _LOGITS,
        "stop_ids": Value("a list per row of stop token ids"),
        "num_generated": per_row("int32", lambda rng, n: rng.integers(0, 4, n)),
        "min_tokens": per_row("int32", lambda rng, n: rng.integers(0, 4, n)),
    },
    returns=_OUT,
    rounding=("none",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="a masked NaN becomes -inf, others stay",
    upstream="vllm/v1/sample/logits_processor/builtin.py: MinTokensLogitsProcessor",
    examples=(
        {"R": 3, "V": 9, "stop_ids": [[1, 2], [], [8]]},
        {"R": 1, "V": 2, "stop_ids": [[0]]},
    ),
    requires=(has_vocabulary, _lists_fit("stop_ids"), _ids_in_vocabulary("stop_ids", False)),
)
def apply_min_tokens(nx, logits, stop_ids, num_generated, min_tokens):
    """l[r, s] = -inf for every stop id s of row r while num_generated[r] < min_tokens[r].

    Shapes: logits [R, V] float32; stop_ids a list with an entry for each row; num_generated, min_tokens [R] int32.
    Rounding points: none.
    Errors: ContractError for a list that does not fit the rows, ids outside the vocabulary, V = 0.
    Source: vllm/v1/sample/logits_processor/builtin.py.
    """
    out = logits.copy()
    for row in np.flatnonzero(num_generated < min_tokens):
        out[row, list(stop_ids[row])] = _MASKED
    return out


@op(
    row=_ROW,
    args={
        "logits": _LOGITS,
        "k": Tensor("R", ("int32",), optional=True, values=lambda rng, a: rng.integers(0, a["V"] + 2, a["R"])),
        "p": Tensor("R", ("float32",), optional=True, values=lambda rng, a: rng.uniform(0.05, 1, a["R"])),
    },
    returns=_OUT,
    rounding=(
        "the kept logits' probabilities round to float32",
        "their ascending cumulative sum; compared with 1 - p in float32",
    ),
    order="sequential cumulative sum in ascending (value, index) order; the softmax's sum in " + str(VOCAB_ORDER),
    parity=Parity("bytes"),
    mirror=_SELECTS,
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
    the last. So p >= 1 keeps all but logits of probability 0, and p = 0 keeps the largest alone.
    Rounding points: the probabilities round to float32; the cumulative sum is compared unrounded with float32(1 - p).
    Errors: ContractError for other shapes or dtypes, V = 0.
    Source: vllm/v1/sample/ops/topk_topp_sampler.py. vLLM's Triton kernel (CUDA, from 8 rows) trims ties to exactly k.
    """
    vocabulary = logits.shape[1]
    active = None if k is None else (k >= 1) & (k < vocabulary)
    if p is None:
        out = logits.copy()
        for row in () if active is None else np.flatnonzero(active):
            threshold = np.partition(logits[row], vocabulary - k[row])[vocabulary - k[row]]
            out[row, logits[row] < threshold] = _MASKED
        return out
    order = np.argsort(logits, axis=-1, kind="stable")
    ascending = np.take_along_axis(logits, order, axis=-1)
    if active is not None:
        at = np.where(active, vocabulary - k, 0).astype(np.int64)
        threshold = np.take_along_axis(ascending, at[:, None], axis=-1)
        ascending = np.where(active[:, None] & (ascending < threshold), _MASKED, ascending)
    probabilities = nx.load(nx.store(softmax(nx, ascending), np.float32))
    cumulative = np.add.accumulate(probabilities, axis=-1)
    dropped = cumulative <= nx.load(np.float32(1) - p)[:, None]
    dropped[:, -1] = False
    out = np.empty_like(logits)
    np.put_along_axis(out, order, np.where(dropped, _MASKED, ascending), axis=-1)
    return out
