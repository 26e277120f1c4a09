"""Goldens of the short convolution and of state updates of one token: vLLM's Triton kernels, and its CPU functions."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from record import Record, normal
from recurrent_inputs import BF16, F16, F32, SHORT, index, shifted, starts

OPS = "vllm.model_executor.layers.mamba.ops."
SHAPES = ((2, True, True), (3, False, True), (4, True, False), (4, False, True))


def programs(lengths: list[int]) -> SimpleNamespace:
    """The work list of causal_conv1d_fn, made ahead as vLLM's metadata does: blocks of 8 tokens of each sequence."""
    blocks = [(n, block) for n, length in enumerate(lengths) for block in range(-(-length // 8))]
    owners, offsets = (torch.tensor(column, dtype=torch.int32) for column in zip(*blocks))
    lists = {"tot": len(blocks), "mlist": owners, "mlist_len": len(blocks), "offsetlist": offsets,
             "batch_ptr": None, "token_chunk_offset_ptr": None}  # fmt: skip
    return SimpleNamespace(nums_dict={8: lists}, batch_ptr=owners, token_chunk_offset_ptr=offsets)


def conv_fwd(record: Record, device: str, kinds: tuple) -> None:
    """Sequences shorter than the filter, an empty one, fresh and continued ones, scattered slots."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn

    lengths, channels = [1, 2, 0, 11, 3, 20], 24
    for kind in kinds:
        for width, biased, silu in SHAPES:
            name = f"{SHORT[kind]}_K{width}_{'bias' if biased else 'plain'}_{'silu' if silu else 'linear'}"
            x, weight = (
                normal("x" + name, sum(lengths), channels, dtype=kind),
                normal("w" + name, channels, width, dtype=kind),
            )
            bias = normal("b" + name, channels, dtype=kind) if biased else None
            state = normal("s" + name, len(lengths) + 2, channels, width - 1, dtype=kind)
            fresh = torch.tensor([True, False, True, True, False, True])
            slots = index(3, 1, 6, 2, 7, 5)
            with record.attempt(f"causal_conv1d_fwd {name}"):
                held = state.to(device, copy=True)
                out = causal_conv1d_fn(
                    x.to(device).t(), weight.to(device), None if bias is None else bias.to(device), held,
                    starts(lengths, device), slots.to(device), fresh.to(device), "silu" if silu else None,
                    metadata=programs(lengths) if device == "cpu" else None,
                )  # fmt: skip
                record.case("causal_conv1d_fwd", name, OPS + "causal_conv1d.causal_conv1d_fn",
                            {"silu": silu, "rounding": "vllm"},
                            {"x": x, "weight": weight, "bias": bias, "conv_state": state[1:],
                             "query_start_loc": starts(lengths), "has_initial_state": fresh.to(torch.int8),
                             "state_idx": shifted(slots)}, {"out": out.t(), "conv_state": held[1:]})  # fmt: skip


def conv_spec(record: Record, device: str, kinds: tuple) -> None:
    """Drafted tokens, some of the last ones accepted."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    channels = 12
    for kind in kinds:
        for width, drafts in ((4, 3), (2, 2), (3, 1)):
            name = f"{SHORT[kind]}_K{width}_M{drafts}"
            x, weight = (
                normal("x" + name, 3, drafts, channels, dtype=kind),
                normal("w" + name, channels, width, dtype=kind),
            )
            state, slots = normal("s" + name, 5, channels, width + drafts - 2, dtype=kind), index(4, 1, 2)
            accepted = torch.tensor([drafts, 1, (drafts + 1) // 2], dtype=torch.int32)
            with record.attempt(f"causal_conv1d_update_spec {name}"):
                held = state.to(device, copy=True)
                out = causal_conv1d_update(
                    x.transpose(1, 2).to(device, copy=True), held, weight.to(device), None, "silu", slots.to(device),
                    num_accepted_tokens=accepted.to(device),
                )  # fmt: skip
                record.case("causal_conv1d_update_spec", name, OPS + "causal_conv1d.causal_conv1d_update",
                            {"rounding": "vllm"},
                            {"x": x, "weight": weight, "conv_state": state[1:], "num_accepted_tokens": accepted,
                             "state_idx": shifted(slots)},
                            {"out": out.transpose(1, 2), "conv_state": held[1:]})  # fmt: skip


def conv_native(record: Record) -> None:
    """What the CPU build uses itself without AMX: torch's convolution, rounded, and then SiLU, rounded again."""
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d as native

    lengths, channels = [1, 2, 11, 3], 24
    for kind in (F32, BF16):
        for width, biased, silu in SHAPES:
            name = f"native_{SHORT[kind]}_K{width}_{'bias' if biased else 'plain'}_{'silu' if silu else 'linear'}"
            x, weight = (
                normal("x" + name, sum(lengths), channels, dtype=kind),
                normal("w" + name, channels, width, dtype=kind),
            )
            bias = normal("b" + name, channels, dtype=kind) if biased else None
            state, slots = normal("s" + name, 5, channels, width - 1, dtype=kind), index(3, 1, 4, 0)
            fresh, call = torch.tensor([True, False, True, False]), {"silu": silu, "rounding": "vllm_native"}
            given = {"weight": weight, "bias": bias, "conv_state": state, "state_idx": slots}
            with record.attempt(name):
                held = state.clone()
                out = native.causal_conv1d_torch(
                    x.t(), weight, bias, held, starts(lengths), slots, fresh, "silu" if silu else None
                )
                record.case("causal_conv1d_fwd", name, OPS + "cpu.causal_conv1d.causal_conv1d_torch", call,
                            {"x": x, **given, "query_start_loc": starts(lengths),
                             "has_initial_state": fresh.to(torch.int8)},
                            {"out": out.t(), "conv_state": held})  # fmt: skip
                rows, held = state[slots.long()].clone(), state.clone()
                out = native.causal_conv1d_update_torch(x[:4, :, None], rows, weight, bias, "silu" if silu else None)
                held[slots.long()] = rows
                record.case("causal_conv1d_update", name, OPS + "cpu.causal_conv1d.causal_conv1d_update_torch", call,
                            {"x": x[:4], **given}, {"out": out[..., 0], "conv_state": held})  # fmt: skip


def conv_update(record: Record, device: str, kinds: tuple) -> None:
    """One token a row, a null row among them: vLLM leaves its x in place, the golden has vtlab's zeros."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    channels = 40
    for kind in kinds:
        for width, biased, silu in (*SHAPES, (5, True, True)):
            name = f"{SHORT[kind]}_K{width}_{'bias' if biased else 'plain'}_{'silu' if silu else 'linear'}"
            x, weight = normal("x" + name, 4, channels, dtype=kind), normal("w" + name, channels, width, dtype=kind)
            bias = normal("b" + name, channels, dtype=kind) if biased else None
            state, slots = normal("s" + name, 6, channels, width - 1, dtype=kind), index(4, 0, 1, 5)
            with record.attempt(f"causal_conv1d_update {name}"):
                held = state.to(device, copy=True)
                out = causal_conv1d_update(
                    x.to(device, copy=True), held, weight.to(device), None if bias is None else bias.to(device),
                    "silu" if silu else None, slots.to(device),
                )  # fmt: skip
                out[1] = 0
                record.case("causal_conv1d_update", name, OPS + "causal_conv1d.causal_conv1d_update",
                            {"silu": silu, "rounding": "vllm"},
                            {"x": x, "weight": weight, "bias": bias, "conv_state": state[1:],
                             "state_idx": shifted(slots)}, {"out": out, "conv_state": held[1:]})  # fmt: skip


def state_update(record: Record, device: str, kinds: tuple) -> None:
    """Mamba's step, groups and all options; null rows compute from a zero state and store nothing."""
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

    for kind in kinds:
        for heads, dim, states, groups, gated, softplus, stored in (
            (1, 24, 16, 1, True, True, F32), (4, 16, 32, 2, False, True, kind), (2, 8, 20, 1, True, False, F16),
        ):  # fmt: skip
            name = f"{SHORT[kind]}_state_{SHORT[stored]}_{heads}_{dim}x{states}_G{groups}" + "_z" * gated
            x, dt = normal("x" + name, 4, heads, dim, dtype=kind), normal("t" + name, 4, heads, dim, dtype=kind)
            dt[0, 0, :3] = torch.tensor([20.5, 19.5, 30.0])
            if not softplus:
                dt = dt.abs()
            A = -normal("A" + name, heads, dim, states).exp()
            B, C = normal("B" + name, 4, groups, states, dtype=kind), normal("C" + name, 4, groups, states, dtype=kind)
            D, bias = normal("D" + name, heads, dim), normal("d" + name, heads, dim, scale=0.3).abs()
            z = normal("z" + name, 4, heads, dim, dtype=kind) if gated else None
            state, slots = normal("s" + name, 6, heads, dim, states, dtype=stored), index(4, 0, 1, 5)
            given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": bias}
            with record.attempt(f"selective_state_update {name}"):
                held, out = state.to(device, copy=True), torch.empty_like(x, device=device)
                selective_state_update(
                    held, *(t.to(device) for t in given.values()), z if z is None else z.to(device), softplus,
                    slots.to(device), out=out,
                )  # fmt: skip
                given |= {"z": z, "state": state[1:], "state_idx": shifted(slots)}
                record.case("selective_state_update", name, OPS + "mamba_ssm.selective_state_update",
                            {"dt_softplus": softplus}, given,
                            {"out": out, "state": held[1:]})  # fmt: skip


def linear_attention(record: Record, device: str, kinds: tuple) -> None:
    """MiniMax's lightning attention: a token against the cache, and whole sequences."""
    from vllm.model_executor.layers.lightning_attn import lightning_attention, linear_decode_forward_triton

    for kind in kinds:
        for heads, dim in ((2, 32), (3, 64)):
            name = f"{SHORT[kind]}_{heads}x{dim}"
            q, k, v = (normal(part + name, 3, heads, dim, dtype=kind) for part in "qkv")
            slope, state = torch.tensor([0.05, 1.0, 4.0][:heads]), normal("s" + name, 4, heads, dim, dim)
            slots = index(2, 0, 3)
            with record.attempt(f"linear_attention_decode {name}"):
                held = state.to(device, copy=True)
                out = linear_decode_forward_triton(
                    *(t[:, :, None].to(device) for t in (q, k, v)), held, slope.to(device), slots.to(device)
                )
                record.case("linear_attention_decode", name, "vllm…lightning_attn.linear_decode_forward_triton", {},
                            {"q": q, "k": k, "v": v, "kv_state": state, "slope": slope, "state_idx": slots},
                            {"out": out, "kv_state": held})  # fmt: skip
        for tokens, heads, dim in ((5, 2, 64), (300, 1, 64)) if kind is F32 else ():
            name = f"{SHORT[kind]}_{tokens}_{heads}x{dim}"
            q, k, v = (normal(part + name, tokens, heads, dim, dtype=kind, scale=0.3) for part in "qkv")
            slope, state = torch.tensor([0.05, 0.7][:heads]), normal("s" + name, 1, heads, dim, dim)
            with record.attempt(f"linear_attention_prefill {name}"):
                out, history = lightning_attention(
                    *(t.transpose(0, 1)[None].to(device) for t in (q, k, v)), slope.to(device),
                    kv_history=state.to(device),
                )  # fmt: skip
                record.case("linear_attention_prefill", name, "vllm…lightning_attn.lightning_attention",
                            {"rounding": "vllm"},
                            {"q": q, "k": k, "v": v, "kv_state": state, "slope": slope,
                             "query_start_loc": starts([tokens])},
                            {"out": out[0].transpose(0, 1).reshape(tokens, -1),
                             "kv_state": history[:, :, -1]})  # fmt: skip


def capture(record: Record, device: str, kinds: tuple) -> None:
    with torch.no_grad():
        for part in (conv_fwd, conv_update, conv_spec, state_update, linear_attention):
            with record.attempt(part.__name__):
                part(record, device, kinds)


KINDS = (BF16, F32)
