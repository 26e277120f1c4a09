"""Goldens of the gated delta rule: FLA's Triton kernels as vLLM has them, each chunk stage fed by the one before."""

from __future__ import annotations

import torch
from record import Record, normal
from recurrent_inputs import BF16, F16, F32, SHORT, cache, index, shifted, starts, unit

FLA = "vllm.third_party.flash_linear_attention.ops."


def gates(name: str, tokens: int, heads: int, decay: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """g, a negative logarithm of mean -decay / 2, and beta in (0, 1); both float32."""
    return -decay * torch.rand_like(normal("g" + name, tokens, heads)), normal("b" + name, tokens, heads).sigmoid()


def packed(record: Record, device: str, activations: tuple) -> None:
    """Slots scattered, one null row first and one last; a + dt_bias on both sides of softplus's threshold."""
    from vllm.third_party.flash_linear_attention.ops.fused_recurrent import (
        fused_recurrent_gated_delta_rule_packed_decode as decode,
    )

    combinations = [(1, 2, 32, 32, kind, bias, state) for kind, bias, state in (
        (F32, F32, F32), (BF16, BF16, F32), (BF16, F32, BF16), (F16, F32, F32))]  # fmt: skip
    combinations += [(1, 3, 128, 128, BF16, BF16, F32), (2, 4, 20, 24, F32, F32, F32)]
    for Hk, Hv, Dk, Dv, kind, bias, stored in combinations:
        if kind not in activations:
            continue
        name = f"{SHORT[kind]}_state_{SHORT[stored]}_{Hk}_{Hv}_{Dk}x{Dv}"
        indices = index(0, 3, 1, -1) if Dk < 128 else index(0, 2, 1)
        rows = len(indices)
        mixed = normal("qkv" + name, rows, 2 * Hk * Dk + Hv * Dv, dtype=kind)
        a, b = normal("a" + name, rows, Hv, dtype=kind, scale=15), normal("b" + name, rows, Hv, dtype=kind, scale=2)
        A_log, dt_bias = normal("A" + name, Hv), normal("dt" + name, Hv, dtype=bias)
        state = cache("s" + name, 3 if Dk < 128 else 2, Hv, Dv, Dk, dtype=stored)
        with record.attempt(f"packed {name}"):
            held = state.to(device, copy=True)
            out = torch.full((rows, 1, Hv, Dv), float("nan"), dtype=kind, device=device)
            parts = [t.to(device) for t in (mixed, a, b, A_log, dt_bias)]
            decode(*parts, Dk**-0.5, held, out, indices.to(device), use_qk_l2norm_in_kernel=True)
            record.case("gdn_packed_decode", name, FLA + "fused_recurrent_gated_delta_rule_packed_decode",
                        {"scale": Dk**-0.5},
                        {"mixed_qkv": mixed, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias, "state": state[1:],
                         "state_idx": shifted(indices)}, {"out": out[:, 0], "state": held[1:]})  # fmt: skip


def recurrent(record: Record, device: str, kinds: tuple) -> None:
    """The loop over tokens: decode with one token a slot, and sequences, one of them empty."""
    from vllm.third_party.flash_linear_attention.ops.fused_recurrent import fused_recurrent_gated_delta_rule as rule

    for kind in kinds:
        for op, lengths, Hk, Hv, D in (("gdn_decode", [1, 1, 1], 1, 2, 64), ("gdn_prefill", [5, 0, 9, 1], 2, 4, 32),
                                       ("gdn_prefill", [3], 1, 1, 128)):  # fmt: skip
            name = f"{SHORT[kind]}_{'_'.join(map(str, lengths))}_{Hk}_{Hv}_{D}"
            tokens, count = sum(lengths), len(lengths)
            q, k = unit("q" + name, tokens, Hk, D, dtype=kind), unit("k" + name, tokens, Hk, D, dtype=kind)
            v, (g, beta) = normal("v" + name, tokens, Hv, D, dtype=kind), gates(name, tokens, Hv)
            state = cache("s" + name, count, Hv, D, D)
            with record.attempt(f"{op} {name}"):
                held = state.to(device, copy=True)
                slots = index(*((2, 3, 1) if op == "gdn_decode" else range(1, count + 1)))
                table = slots[:, None].expand(count, max(lengths)).contiguous()
                out, _ = rule(*(t[None].to(device) for t in (q, k, v, g, beta)), D**-0.5, held, True,
                              starts(lengths, device), table.to(device))  # fmt: skip
                given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state[1:]}
                where = {"state_idx": shifted(slots)} if op == "gdn_decode" else {"query_start_loc": starts(lengths)}
                record.case(op, name, FLA + "fused_recurrent_gated_delta_rule", {"scale": D**-0.5},
                            {**given, **where}, {"out": out[0], "state": held[1:]})  # fmt: skip


def chunks(record: Record, device: str, kinds: tuple) -> None:
    """The six stages and the whole; lengths around the chunk of 64, decays that underflow."""
    from vllm.third_party.flash_linear_attention import ops
    from vllm.third_party.flash_linear_attention.ops.chunk_delta_h import chunk_gated_delta_rule_fwd_h
    from vllm.third_party.flash_linear_attention.ops.chunk_o import chunk_fwd_o
    from vllm.third_party.flash_linear_attention.ops.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd
    from vllm.third_party.flash_linear_attention.ops.cumsum import chunk_local_cumsum
    from vllm.third_party.flash_linear_attention.ops.solve_tril import solve_tril
    from vllm.third_party.flash_linear_attention.ops.wy_fast import recompute_w_u_fwd

    for kind in kinds:
        for lengths, Hk, Hv, D, decay in (([70, 5, 64, 1], 1, 2, 64, 1.0), ([17, 65], 1, 1, 128, 1.0),
                                          ([66, 2], 1, 2, 64, 60.0)):  # fmt: skip
            name = f"{SHORT[kind]}_{'_'.join(map(str, lengths))}_{Hk}_{Hv}_{D}" + ("_underflow" if decay > 1 else "")
            tokens, scale = sum(lengths), D**-0.5
            q, k = unit("q" + name, tokens, Hk, D, dtype=kind), unit("k" + name, tokens, Hk, D, dtype=kind)
            v, (g, beta) = normal("v" + name, tokens, Hv, D, dtype=kind), gates(name, tokens, Hv, decay)
            state = normal("s" + name, len(lengths), Hv, D, D, scale=0.5)
            where = {"query_start_loc": starts(lengths)}
            with record.attempt(f"chunks {name}"):
                cu = starts(lengths, device, torch.int64)
                Q, K, V, G, B, S = (t.to(device) for t in (q[None], k[None], v[None], g[None], beta[None], state))
                gc = chunk_local_cumsum(G, chunk_size=64, cu_seqlens=cu)
                record.case("gdn_chunk_cumsum", name, FLA + "chunk_local_cumsum", {}, {"g": g, **where},
                            {"gc": gc[0]})  # fmt: skip
                A = chunk_scaled_dot_kkt_fwd(k=K, beta=B, g=gc, cu_seqlens=cu, output_dtype=F32)
                for start, length in zip(where["query_start_loc"].tolist(), lengths):
                    A[0, start : start + length, :, length:] = 0  # columns past a short sequence: nothing is stored
                record.case("gdn_kkt", name, FLA + "chunk_scaled_dot_kkt_fwd", {},
                            {"k": k, "beta": beta, "gc": gc[0], **where}, {"A": A[0]})  # fmt: skip
                Ai = solve_tril(A=A, cu_seqlens=cu, output_dtype=kind)
                record.case("gdn_solve_tril", name, FLA + "solve_tril", {"out_dtype": str(kind)[6:]},
                            {"A": A[0], **where}, {"Ai": Ai[0]})  # fmt: skip
                w, u = recompute_w_u_fwd(k=K, v=V, beta=B, A=Ai, g_cumsum=gc, cu_seqlens=cu)
                record.case("gdn_recompute_w_u", name, FLA + "recompute_w_u_fwd", {},
                            {"k": k, "v": v, "beta": beta, "gc": gc[0], "Ai": Ai[0], **where},
                            {"w": w[0], "u": u[0]})  # fmt: skip
                h, new, final = chunk_gated_delta_rule_fwd_h(
                    k=K, w=w, u=u, g=gc, initial_state=S, output_final_state=True, cu_seqlens=cu
                )
                record.case("gdn_delta_h", name, FLA + "chunk_gated_delta_rule_fwd_h", {},
                            {"k": k, "w": w[0], "u": u[0], "gc": gc[0], "state": state, **where},
                            {"h": h[0], "v_new": new[0], "state": final})  # fmt: skip
                o = chunk_fwd_o(q=Q, k=K, v=new, h=h, g=gc, scale=scale, cu_seqlens=cu)
                record.case("gdn_chunk_o", name, FLA + "chunk_fwd_o", {"scale": scale},
                            {"q": q, "k": k, "v_new": new[0], "h": h[0], "gc": gc[0], **where},
                            {"out": o[0]})  # fmt: skip
                if kind is not F32:
                    o, final = ops.chunk_gated_delta_rule(Q, K, V, G, B, scale, S, True, cu)
                record.case("gdn_chunk_prefill", name, FLA + "chunk_gated_delta_rule", {"scale": scale},
                            {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state, **where},
                            {"out": o[0], "state": final})  # fmt: skip


def capture(record: Record, device: str, kinds: tuple, activations: tuple) -> None:
    with torch.no_grad():
        for part, choice in ((packed, activations), (recurrent, kinds), (chunks, kinds)):
            with record.attempt(part.__name__):
                part(record, device, choice)
