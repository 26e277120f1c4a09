"""Single tokens of a row moved or forbidden before a draw: bias, masks, allowed ids, bad words, minimum length."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import EXACT, Parity, Tensor, Value, refuse
from vtlab.ops.table import op

from .logits import LOGITS, MASKED, OUT, ROUNDED, ROW, has_vocabulary, per_row


def _indices_in_range(arguments, axes):
    """a row or column index outside the logits (device arrays: found by the kernel, with `out` not at all)"""
    for name, size in (("rows", axes["R"]), ("cols", axes["V"])):
        value = arguments[name]
        if not isinstance(value, np.ndarray):
            continue
        outside = (value < 0) | (value >= size)
        if outside.any():
            at = int(np.argmax(outside))
            raise refuse(name, f"{int(value[at])} at index {at}", f"0 <= index < {size}")


def _indices(size):
    return lambda rng, axes: rng.integers(0, axes[size], axes["m"])


def _distinct_pairs(axis):
    """Example index lists without repeated pairs: pair i is (i % R, 7 i % V), distinct below lcm(R, V)."""
    step = {"R": 1, "V": 7}[axis]
    return lambda rng, axes: (np.arange(axes["m"]) * step) % axes[axis]


@op(
    row=ROW,
    args={
        "logits": LOGITS,
        "rows": Tensor("m", ("int32",), values=_distinct_pairs("R")),
        "cols": Tensor("m", ("int32",), values=_distinct_pairs("V")),
        "bias": Tensor("m", ("float32",)),
    },
    returns=OUT,
    rounding=("l = round(l + bias), pair by pair in list order",),
    parity=Parity("bytes"),
    mirror=ROUNDED,
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
    row=ROW,
    args={
        "logits": LOGITS,
        "rows": Tensor("m", ("int32",), values=_indices("R")),
        "cols": Tensor("m", ("int32",), values=_indices("V")),
    },
    returns=OUT,
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
    out[rows, cols] = MASKED
    return out


@op(
    row=ROW,
    args={
        "logits": LOGITS,
        "mask": Tensor("R V", ("int8",), values=lambda rng, a: rng.integers(0, 2, (a["R"], a["V"]))),
    },
    returns=OUT,
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
    return np.where(mask != 0, MASKED, logits)


def _lists_fit(*names):
    def check(arguments, axes):
        for name in names:
            value = arguments[name]
            if not isinstance(value, (list, tuple)) or len(value) != axes["R"]:
                got = f"{type(value).__name__} of {len(value) if hasattr(value, '__len__') else '?'}"
                raise refuse(name, got, f"a list with one entry for each of {axes['R']} rows")

    check.__doc__ = f"{' or '.join(names)} without an entry for each row"
    return check


def _check_ids(name, row, ids, vocabulary):
    """Refuse what is no collection of integers in [0, vocabulary)."""
    if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
        raise refuse(name, f"{ids!r} in row {row}", "token ids")
    for token in ids:
        if isinstance(token, (bool, np.bool_)) or not hasattr(token, "__index__") or not 0 <= token < vocabulary:
            raise refuse(name, f"token id {token!r} in row {row}", f"integers, 0 <= id < {vocabulary}")


def _bad_words_in_vocabulary(arguments, axes):
    """a bad word that is empty, or with anything but token ids of the vocabulary"""
    for row, words in enumerate(arguments["bad_words"]):
        if not isinstance(words, (list, tuple)):
            raise refuse("bad_words", f"{type(words).__name__} in row {row}", "a list of token id lists")
        for word in words:
            if not isinstance(word, (list, tuple)) or not word:
                raise refuse("bad_words", f"{word!r} in row {row}", "lists of at least one token id")
            _check_ids("bad_words", row, word, axes["V"])


def _past_is_listed(arguments, axes):
    """past ids that are no list"""
    for row, past in enumerate(arguments["past_ids"]):
        if not isinstance(past, (list, tuple)):
            raise refuse("past_ids", f"{type(past).__name__} in row {row}", "a list of token ids")


def _stop_ids_in_vocabulary(arguments, axes):
    """a stop id outside the vocabulary"""
    for row, ids in enumerate(arguments["stop_ids"]):
        _check_ids("stop_ids", row, ids, axes["V"])


@op(
    row=ROW,
    args={
        "logits": LOGITS,
        "bad_words": Value("a list per row of banned token id sequences"),
        "past_ids": Value("a list per row of the tokens generated so far"),
    },
    returns=OUT,
    rounding=("none",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="a masked NaN becomes -inf, others stay",
    upstream="vllm/v1/sample/ops/bad_words.py: apply_bad_words",
    examples=(
        {"R": 2, "V": 9, "bad_words": [[[3], [1, 2, 5]], [[4, 6]]], "past_ids": [[7, 1, 2], [6]]},
        {"R": 1, "V": 4, "bad_words": [[]], "past_ids": [[]]},
    ),
    requires=(has_vocabulary, _lists_fit("bad_words", "past_ids"), _bad_words_in_vocabulary, _past_is_listed),
)
def apply_bad_words(nx, logits, bad_words, past_ids):
    """l[r, w[-1]] = -inf for every banned sequence w of row r whose w[:-1] ends the tokens generated so far.

    Shapes: logits [R, V] float32; bad_words and past_ids are lists with an entry for each row.
    Rounding points: none.
    Errors: ContractError for lists that do not fit the rows, empty sequences, ids outside the vocabulary, V = 0.
    Source: vllm/v1/sample/ops/bad_words.py.
    """
    out = logits.copy()
    for row, (words, past) in enumerate(zip(bad_words, past_ids)):
        for *prefix, last in words:
            if len(prefix) <= len(past) and list(past[len(past) - len(prefix) :]) == prefix:
                out[row, last] = MASKED
    return out


@op(
    row=ROW,
    args={
        "logits": LOGITS,
        "stop_ids": Value("a list per row of stop token ids"),
        "num_generated": per_row("int32", lambda rng, n: rng.integers(0, 4, n)),
        "min_tokens": per_row("int32", lambda rng, n: rng.integers(0, 4, n)),
    },
    returns=OUT,
    rounding=("none",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="a masked NaN becomes -inf, others stay",
    upstream="vllm/v1/sample/logits_processor/builtin.py: MinTokensLogitsProcessor",
    examples=(
        {"R": 3, "V": 9, "stop_ids": [[1, 2], [], [8]]},
        {"R": 1, "V": 2, "stop_ids": [[0]]},
    ),
    requires=(has_vocabulary, _lists_fit("stop_ids"), _stop_ids_in_vocabulary),
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
        out[row, list(stop_ids[row])] = MASKED
    return out
