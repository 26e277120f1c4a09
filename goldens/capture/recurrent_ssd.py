"""Goldens of Mamba's scans: selective_scan_fwd, and Mamba-2's chunk scan, each stage fed by the one before."""

from __future__ import annotations

import torch
from record import Record, normal
from recurrent_inputs import BF16, F32, SHORT, index, shifted, starts

OPS = "vllm.model_executor.layers.mamba.ops."


def scan(record: Record, device: str, kinds: tuple) -> None:
    """Mamba-1: sequences over the kernel's own chunk of 2048 tokens too; scattered slots, fresh and continued."""
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_scan_fn

    for kind in kinds:
        for lengths, dim, states, groups, gated, stored in (
            ([5, 63, 1], 8, 16, 2, True, F32), ([40, 2], 12, 16, 1, False, kind), ([2060], 2, 16, 1, True, F32),
        ):  # fmt: skip
            name = f"{SHORT[kind]}_{'_'.join(map(str, lengths))}_{dim}x{states}_G{groups}" + "_z" * gated
            tokens, count = sum(lengths), len(lengths)
            u, delta = normal("u" + name, dim, tokens, dtype=kind), normal("t" + name, dim, tokens, dtype=kind)
            delta[0, :3] = torch.tensor([20.5, 19.5, 30.0])
            A, D, bias = -normal("A" + name, dim, states).exp(), normal("D" + name, dim), normal("d" + name, dim)
            B, C = (normal(part + name, groups, states, tokens, dtype=kind) for part in "BC")
            z = normal("z" + name, dim, tokens, dtype=kind) if gated else None
            state, slots = normal("s" + name, count + 2, dim, states, dtype=stored), index(*range(count + 1, 1, -1))
            fresh = torch.tensor([True, False, True][:count])
            given = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": bias}
            with record.attempt(f"selective_scan {name}"):
                held = state.to(device, copy=True)
                placed = {part: t if t is None else t.to(device, copy=True) for part, t in given.items()}
                out = selective_scan_fn(
                    placed["u"], held, placed["delta"], placed["A"], placed["B"], placed["C"], placed["D"], placed["z"],
                    placed["delta_bias"], True, starts(lengths, device), slots.to(device), fresh.to(device),
                )  # fmt: skip
                record.case("selective_scan", name, OPS + "mamba_ssm.selective_scan_fn", {"delta_softplus": True},
                            {**given, "state": state[1:], "query_start_loc": starts(lengths),
                             "has_initial_state": fresh.to(torch.int8), "state_idx": shifted(slots)},
                            {"out": out, "state": held[1:]})  # fmt: skip


def pieces(lengths: list[int], size: int) -> tuple[list[int], list[int], list[int]]:
    """Chunks that no sequence shares: their starts, each sequence's last chunk, each chunk's sequence."""
    marks, last, owner, at = [0], [], [], 0
    for sequence, length in enumerate(lengths):
        for done in range(0, length, size):
            marks.append(at + min(done + size, length))
            owner.append(sequence)
        last.append(len(owner) - 1)
        at += length
    return marks, last, owner


def chunk_scan(record: Record, device: str, kinds: tuple) -> None:
    """Mamba-2's five stages and the whole."""
    from vllm.model_executor.layers.mamba.ops import ssd_combined as ssd

    for kind in kinds:
        for lengths, heads, dim, states, groups, size, gated, initial in (
            ([20, 5, 40], 4, 32, 16, 2, 16, True, True), ([70], 2, 64, 32, 1, 64, False, False),
        ):  # fmt: skip
            name = (
                f"{SHORT[kind]}_{'_'.join(map(str, lengths))}_{heads}_{dim}x{states}_G{groups}_Q{size}" + "_z" * gated
            )
            tokens = sum(lengths)
            x, dt = normal("x" + name, tokens, heads, dim, dtype=kind), normal("t" + name, tokens, heads, dtype=kind)
            A, D, bias = -normal("A" + name, heads).exp(), normal("D" + name, heads), normal("d" + name, heads)
            B, C = (normal(part + name, tokens, groups, states, dtype=kind) for part in "BC")
            z = normal("z" + name, tokens, heads, dim, dtype=kind) if gated else None
            state = normal("s" + name, len(lengths), heads, dim, states) if initial else None
            marks, last, owner = (torch.tensor(t, dtype=torch.int32) for t in pieces(lengths, size))
            with record.attempt(f"ssd {name}"):
                cut, ends, belongs = marks.to(device), last.to(device), owner.to(device)
                X, T, a, b, c, d, e = (t.to(device) for t in (x, dt, A, B, C, D, bias))
                Z, S = (t if t is None else t.to(device) for t in (z, state))
                dA, dts = ssd._chunk_cumsum_fwd(T, a, size, cut, dt_bias=e, dt_softplus=True)
                record.case("ssd_chunk_cumsum", name, OPS + "ssd_chunk_state._chunk_cumsum_fwd",
                            {"chunk_size": size, "dt_softplus": True},
                            {"dt": dt, "A": A, "dt_bias": bias, "cu_chunk_seqlens": marks},
                            {"dA_cumsum": dA, "dt_out": dts})  # fmt: skip
                local = ssd._chunk_state_fwd(b, X, dts, dA, cut, states_in_fp32=True)
                record.case("ssd_chunk_state", name, OPS + "ssd_chunk_state._chunk_state_fwd", {},
                            {"x": x, "B": B, "dt": dts, "dA_cumsum": dA, "cu_chunk_seqlens": marks},
                            {"states": local})  # fmt: skip
                passed = ssd._state_passing_fwd(
                    local.flatten(2), dA, ends, initial_states=None if S is None else S.flatten(2), out_dtype=F32
                ).unflatten(2, (dim, states))
                record.case("ssd_state_passing", name, OPS + "ssd_state_passing._state_passing_fwd", {},
                            {"states": local, "dA_cumsum": dA, "last_chunk_indices": last, "initial_states": state},
                            {"out": passed})  # fmt: skip
                CB = ssd._bmm_chunk_fwd(c, b, size, cut, output_dtype=F32)
                record.case("ssd_bmm_chunk", name, OPS + "ssd_bmm._bmm_chunk_fwd", {"chunk_size": size},
                            {"C": C, "B": B, "cu_chunk_seqlens": marks}, {"CB": CB})  # fmt: skip
                out = torch.empty_like(X)
                ssd._chunk_scan_fwd(CB, X, dts, dA, c, passed, cut, out, belongs, D=d, z=Z, initial_states=S)
                record.case("ssd_chunk_scan", name, OPS + "ssd_chunk_scan._chunk_scan_fwd", {},
                            {"CB": CB, "x": x, "dt": dts, "dA_cumsum": dA, "C": C, "states": passed, "D": D, "z": z,
                             "initial_states": state, "cu_chunk_seqlens": marks, "seq_idx": owner},
                            {"out": out})  # fmt: skip
                out = torch.empty_like(X)
                final = ssd.mamba_chunk_scan_combined_varlen(
                    X, T, a, b, c, size, starts(lengths, device), cut, ends, belongs, out, D=d, z=Z, dt_bias=e,
                    initial_states=S, dt_softplus=True, state_dtype=F32,
                )  # fmt: skip
                record.case("ssd_chunk_prefill", name, OPS + "ssd_combined.mamba_chunk_scan_combined_varlen",
                            {"chunk_size": size, "dt_softplus": True},
                            {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": bias,
                             "initial_states": state, "query_start_loc": starts(lengths)},
                            {"out": out, "final_states": final})  # fmt: skip


def norm(record: Record, device: str, kinds: tuple) -> None:
    """Mamba-2's gated norm: the kernel for one group, the Python form for several."""
    from vllm.model_executor.layers.mamba.ops.layernorm_gated import rms_norm_gated

    for kind in kinds:
        for rows, width, groups in ((3, 64, 1), (2, 200, 1), (3, 96, 4)):
            name = f"{SHORT[kind]}_{rows}x{width}_G{groups}"
            y, z = normal("y" + name, rows, width, dtype=kind), normal("z" + name, rows, width, dtype=kind)
            weight = (1 + 0.2 * normal("w" + name, width)).to(kind)
            with record.attempt(f"mamba2_rmsnorm_gated {name}"):
                out = rms_norm_gated(
                    y.to(device), weight.to(device), None, z=z.to(device), eps=1e-5, group_size=width // groups,
                    norm_before_gate=False,
                )  # fmt: skip
                record.case("mamba2_rmsnorm_gated", name, OPS + "layernorm_gated.rms_norm_gated",
                            {"eps": 1e-5, "groups": groups, "rounding": "vllm"}, {"y": y, "z": z, "weight": weight},
                            {"out": out})  # fmt: skip
                wide = y.to(device) * torch.nn.functional.silu(z.to(device).float())
                grouped = wide.unflatten(-1, (groups, -1))
                grouped = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + 1e-5)
                record.case("mamba2_rmsnorm_gated", "native_" + name,
                            "mamba_mixer2.py: Mixer2RMSNormGated.forward_native",
                            {"eps": 1e-5, "groups": groups, "rounding": "vllm_native"},
                            {"y": y, "z": z, "weight": weight},
                            {"out": weight.to(device) * grouped.flatten(-2).to(kind)})  # fmt: skip


def capture(record: Record, device: str, kinds: tuple) -> None:
    with torch.no_grad():
        for part in (scan, chunk_scan, norm) if device != "cpu" else (chunk_scan, norm):
            with record.attempt(part.__name__):
                part(record, device, kinds)


KINDS = (BF16, F32)
