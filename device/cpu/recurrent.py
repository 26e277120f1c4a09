"""Recurrences over tokens on a CPU: the float32 mirror itself.

A state is float32 between two calls. The truth carries float64 within one, so its bytes depend on where a sequence is
cut into calls; the mirror's do not, and requests must not notice how their prompts are cut.
"""

from __future__ import annotations

from vtlab.ops import providers
from vtlab.ops.numerics import MIRROR
from vtlab.ops.outputs import oracle_provider
from vtlab.ops.table import lookup

PROVIDER, PRIORITY = "mirror", -500
OPS = (
    "gdn_decode", "gdn_prefill", "kda_decode", "kda_prefill_recurrent", "selective_scan", "selective_state_update",
    "ssd_recurrent",
)  # fmt: skip


def _mirror(op: str):
    return oracle_provider(lambda **arguments: lookup(op).run(MIRROR, arguments), op)


for _op in OPS:
    providers.provider(_op, "cpu", PROVIDER, priority=PRIORITY)(_mirror(_op))
