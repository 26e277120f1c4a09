"""Recurrent states between their cache and compact float32 rows: gathered before a prefill, scattered after it."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Parity, Tensor, refuse
from vtlab.ops.table import op

from .causal_conv import ROW
from .sequences import distinct, flags, written

_F32 = ("float32",)
_WHERE = Tensor("N", ("int32",), values=distinct("N"))
_CACHE = Tensor("* W", values=lambda rng, axes: rng.standard_normal((axes["slots"], 2, axes["W"])))
_ONCE = Bound(ulps=0, why="at most one rounding, of the same number in both arithmetics")


def _slots_hold(shared: bool):
    def check(arguments, axes):
        chosen, slots = arguments["state_idx"], arguments["cache"].shape[0] if arguments["cache"].ndim > 1 else 0
        if arguments["cache"].ndim < 2:
            raise refuse("cache", f"shape {arguments['cache'].shape}", "slots first")
        if isinstance(chosen, np.ndarray) and chosen.size:
            if int(chosen.min()) < 0 or int(chosen.max()) >= slots:
                raise refuse("state_idx", chosen.tolist(), f"slots from 0 to {slots - 1}")
            if not shared and np.unique(chosen).size != chosen.size:
                raise refuse("state_idx", chosen.tolist(), "no slot twice")

    check.__doc__ = "a slot outside of the cache" + ("" if shared else ", or one that two rows write")
    return check


@op(
    row=ROW,
    args={
        "cache": _CACHE,
        "state_idx": _WHERE,
        "has_initial_state": Tensor("N", ("int8", "int32"), optional=True, values=flags("N")),
    },
    returns={"working": Tensor("... W", _F32)},
    rounding=("none: float32 holds every cache dtype",),
    parity=Parity("bytes", why="a copy"),
    mirror=_ONCE,
    nan="kept",
    upstream="vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py: ssm_state[indices], zeroed where fresh",
    examples=(
        {"slots": 5, "W": 4, "N": 3, "cache": "bfloat16", "has_initial_state": "int8"},
        {"slots": 3, "W": 1, "N": 2},
        {"slots": 2, "W": 3, "N": 0, "cache": "float16"},
    ),
    requires=(_slots_hold(shared=True),),
)  # fmt: skip
def gdn_state_gather(nx, cache, state_idx, has_initial_state=None):
    """working_n = cache[state_idx_n], or zeros where has_initial_state_n is 0.

    Shapes: cache [slots, ...] in any float dtype; state_idx int32 [N]; has_initial_state int8 or int32 [N] or None;
    working float32 [N, ...].
    Rounding points: none.
    Errors: ContractError for a slot outside of the cache.
    Source: vLLM's qwen_gdn_linear_attn.py.
    """
    working = nx.store(nx.load(cache[state_idx]), np.float32)
    if has_initial_state is not None:
        working[has_initial_state == 0] = 0
    return working


def _working_fits(arguments, axes):
    """working has a row for each index, of the cache's form"""
    want = (axes["N"], *arguments["cache"].shape[1:])
    if tuple(arguments["working"].shape) != want:
        raise refuse("working", f"shape {tuple(arguments['working'].shape)}", want)


@op(
    row=ROW,
    args={
        "cache": _CACHE,
        "working": Tensor("* W", _F32, values=lambda rng, axes: rng.standard_normal((axes["N"], 2, axes["W"]))),
        "state_idx": _WHERE,
    },
    returns={},
    rounding=("cache = round(working) to the cache's dtype",),
    parity=Parity("bytes"),
    mirror=_ONCE,
    nan="kept",
    mutates=("cache",),
    upstream="vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py: ssm_state[indices] = last_recurrent_state",
    examples=(
        {"slots": 5, "W": 4, "N": 3, "cache": "bfloat16"},
        {"slots": 3, "W": 1, "N": 2},
    ),
    requires=(_slots_hold(shared=False), _working_fits, written("cache")),
)
def gdn_state_scatter(nx, cache, working, state_idx):
    """cache[state_idx_n] = round(working_n); every other slot stays.

    Shapes: cache [slots, ...] in any float dtype, updated in place; working float32 [N, ...]; state_idx int32 [N].
    Returns nothing.
    Rounding points: one, to the cache's dtype; float32 keeps its bits.
    Errors: ContractError for a slot outside of the cache or twice, a working of another form.
    Source: vLLM's qwen_gdn_linear_attn.py.
    """
    cache[state_idx] = nx.store(nx.load(working), cache.dtype)
