"""Where a model goes wrong: its residual stream beside that of transformers, layer by layer, in float32."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from vtlab.goldens.tiny import write_checkpoint
from vtlab.models.batch import Slice, build
from vtlab.models.decoder import Decoder
from vtlab.models.family import Family
from vtlab.models.loading import load_decoder
from vtlab.models.step import Step
from vtlab.ops.arrays import on
from vtlab.ops.errors import ContractError

from .goldens import hidden_golden, list_goldens

BOUND = 1e-5  # relative L2: a layer rounds some 20 times, by 6e-8 each, and no tiny model has more than 6 layers
_BLOCK = 16


@dataclass(frozen=True)
class Distance:
    """How far one of our states is from transformers': relative L2 over all positions of the prompt.

    state : "embedded", "layers.N" (what leaves layer N), "normed" (what the head gets) or "logits".
    """

    state: str
    rel_l2: float

    @property
    def wrong(self) -> bool:
        return not self.rel_l2 <= BOUND


def first_wrong(distances: list[Distance]) -> str | None:
    """The first state that is off by more than the bound; what made it is wrong. None where all are right."""
    return next((found.state for found in distances if found.wrong), None)


def run_bisect(name: str, *, as_json: bool = False, device: str = "cpu") -> int:
    """Show the distances of a tiny checkpoint and the first wrong state; the exit status, 1 where there is one."""
    distances = bisect_tiny(name, device)
    wrong = first_wrong(distances)
    if as_json:
        found = {"model": name, "bound": BOUND, "states": [vars(one) for one in distances], "first_wrong": wrong}
        json.dump(found, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return int(wrong is not None)
    from .screen import bisect_table, show

    show(bisect_table(name, distances))
    show(f"every state is within {BOUND:g}" if wrong is None else f"first wrong state: {wrong}")
    return int(wrong is not None)


def bisect_tiny(name: str, device: str = "cpu") -> list[Distance]:
    """`bisect` of a tiny checkpoint, made on the spot. Errors: ContractError for a name without hidden states."""
    known = [entry.name for entry in list_goldens() if entry.kind == "hidden"]
    if name not in known:
        raise ContractError("gate", "bisect", name, "one of " + ", ".join(known))
    golden = hidden_golden(name)
    with tempfile.TemporaryDirectory() as folder:
        digest = write_checkpoint(name, folder)
        want = golden["provenance"]["checkpoint_digest"]
        if digest != want:
            raise ContractError("bisect", "checkpoint", f"digest {digest}", f"{want}, the one transformers ran")
        return bisect(golden, load_decoder(folder, "float32", max_positions=256).on(on(device)))


def bisect(golden: Mapping, decoder: Decoder) -> list[Distance]:
    """The distances of every state, in the order of the forward, for a golden of goldens/hidden."""
    ours = states(decoder, golden["ids"])
    theirs = golden["states"]
    missing = theirs.keys() ^ ours.keys()
    if missing:
        raise ContractError("bisect", "golden", f"states {sorted(theirs)}", f"states {sorted(ours)}")
    return [Distance(name, _distance(ours[name], theirs[name])) for name in ours]


def states(decoder: Decoder, ids: list[int]) -> dict[str, np.ndarray]:
    """Every state of one forward over `ids` on the host, in order; the logits of the last position alone."""
    watched, seen = copy.copy(decoder), {}
    watched.family = _Watched(decoder.family, seen)
    blocks = list(range(-(-len(ids) // _BLOCK)))
    batch = build([Slice(ids, 0, blocks, sample=True)], _BLOCK)
    batch = replace(batch, sample_rows=np.arange(len(ids))).on(decoder.arrays)
    logits = watched.forward(batch, decoder.new_caches(len(blocks), _BLOCK))
    return {name: np.asarray(decoder.arrays.fetch(state)) for name, state in (seen | {"logits": logits[-1:]}).items()}


class _Watched:
    """A family whose states are kept as they come."""

    def __init__(self, family: Family, seen: dict[str, object]):
        self._family, self._seen = family, seen

    def embed(self, step: Step):
        found = self._family.embed(step)
        self._seen["embedded"] = _copy(found)
        return found

    def layer(self, step: Step, index: int, hidden, residual):
        found = self._family.layer(step, index, hidden, residual)
        self._seen[f"layers.{index}"] = _copy(self._family.leaving(step, index, *found))
        return found

    def head(self, step: Step, hidden, residual):
        logits = step.logits

        def watched(normed):
            self._seen["normed"] = _copy(normed)
            return logits(normed)

        step.logits = watched
        return self._family.head(step, hidden, residual)


def _copy(state):
    """Forwards may reuse memory."""
    return state.copy()


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    if ours.shape != theirs.shape:
        raise ContractError("bisect", "golden", f"shape {theirs.shape}", f"shape {ours.shape}")
    true = theirs.astype(np.float64)
    return float(np.linalg.norm(ours.astype(np.float64) - true) / np.linalg.norm(true))
