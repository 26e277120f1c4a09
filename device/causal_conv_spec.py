"""The short causal convolution of drafted tokens on a GPU: the launcher of cuda/causal_conv_spec.cu."""

from __future__ import annotations

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .causal_conv import flags_of, update_rows
from .faults import first_fault
from .launch import PROVIDER, results
from .runtime import current
from .slots import check_slots


@providers.provider("causal_conv1d_update_spec", "cuda", PROVIDER)
def causal_conv1d_update_spec(
    x, weight, conv_state, num_accepted_tokens, bias=None, state_idx=None, *, silu=True, rounding="vt", out=None
):
    """oracle.causal_conv_spec.causal_conv1d_update_spec. In a capture, counts outside of 1 ... M are brought there."""
    op, (_, count, width) = "causal_conv1d_update_spec", x.shape
    (target,) = results(op, out, (x, weight, conv_state, num_accepted_tokens, bias, state_idx), (x.shape, x.dtype))
    if first_fault(op, "state_cache", "state_slots_fit", len(x), [num_accepted_tokens, 1, count + 1, 0]) is not None:
        got = current().read(num_accepted_tokens).tolist()
        raise ContractError(op, "num_accepted_tokens", got, f"1 to {count}")
    check_slots(op, state_idx, len(conv_state))
    flags = flags_of(x, weight, silu, rounding)
    update_rows(op, x, count * width, weight, bias, conv_state, state_idx, num_accepted_tokens, flags, target)
    return target
