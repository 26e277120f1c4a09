"""Goldens of Kimi delta attention: FLA's Triton kernels as vLLM has them, each chunk stage fed by the one before."""

from __future__ import annotations

import torch
from record import Record, normal
from recurrent_inputs import BF16, F32, SHORT, cache, index, shifted, starts, unit

FLA = "vllm.third_party.flash_linear_attention.ops.kda."


def gates(record: Record, device: str, kinds: tuple) -> None:
    """-exp(A_log) * softplus(g1 + dt_bias), alone and summed inside chunks in base 2; the sigmoid-gated norm."""
    from vllm.third_party.flash_linear_attention.ops import kda
    from vllm.third_party.flash_linear_attention.ops.l2norm import l2norm_fwd

    for kind in kinds:
        for heads, dim, biased, beta in ((2, 32, True, 1.0), (3, 64, False, 1.0), (2, 32, True, 2.0)):
            name = f"{SHORT[kind]}_{heads}x{dim}_{'biased' if biased else 'plain'}_{beta:g}"
            g1 = normal("g" + name, 9, heads, dim, dtype=kind, scale=6)
            g1[0, 0, :4] = torch.tensor([20.0, 20.5, -30.0, 40.0])
            A_log, dt_bias = normal("A" + name, heads), normal("d" + name, heads * dim) if biased else None
            given = {"g1": g1, "A_log": A_log, "dt_bias": dt_bias}
            placed = [t if t is None else t.to(device) for t in given.values()]
            with record.attempt(f"kda_decay_gate {name}"):
                g = kda.fused_kda_gate(placed[0].reshape(9, -1), placed[1], dim, placed[2], beta=beta)
                record.case("kda_decay_gate", name, FLA + "fused_kda_gate", {"beta": beta}, given, {"g": g})
        for lengths, heads, dim in (([70, 5, 64, 1], 2, 32), ([129], 1, 64)):
            name = f"{SHORT[kind]}_{'_'.join(map(str, lengths))}_{heads}x{dim}"
            g1 = normal("c" + name, sum(lengths), heads, dim, dtype=kind, scale=3)
            given = {"g1": g1, "A_log": normal("A" + name, heads), "dt_bias": normal("d" + name, heads * dim)}
            with record.attempt(f"kda_decay_gate_chunk_cumsum {name}"):
                g1, A_log, dt_bias = (t.to(device) for t in given.values())
                gc = kda.fused_kda_gate_chunk_cumsum(
                    g1[None], A_log, dt_bias, cu_seqlens=starts(lengths, device, torch.int64)
                )
                record.case("kda_decay_gate_chunk_cumsum", name, FLA + "fused_kda_gate_chunk_cumsum", {},
                            {**given, "query_start_loc": starts(lengths)}, {"gc": gc[0]})  # fmt: skip
        for heads, dim in ((3, 128), (2, 40)):
            name = f"{SHORT[kind]}_{heads}x{dim}"
            x, gate = normal("x" + name, 5, heads, dim, dtype=kind), normal("z" + name, 5, heads, dim, dtype=kind)
            weight = 1 + 0.2 * normal("w" + name, dim)
            with record.attempt(f"rms_norm_gated {name}"):
                out = kda.rms_norm_gated(
                    x.to(device, copy=True), gate.to(device), weight.to(device), None, activation="sigmoid", eps=1e-5
                )
                record.case("rms_norm_gated", "kda_" + name, FLA + "rms_norm_gated",
                            {"eps": 1e-5, "sigmoid_gate": True},
                            {"x": x, "gate": gate, "weight": weight}, {"out": out})  # fmt: skip
            with record.attempt(f"l2norm {name}"):
                record.case("l2norm", "kda_" + name, "vllm…flash_linear_attention.ops.l2norm.l2norm_fwd", {"eps": 1e-6},
                            {"x": x}, {"out": l2norm_fwd(x.to(device))})  # fmt: skip


def inputs(name: str, lengths: list[int], heads: int, dim: int, kind: torch.dtype, decay: float = 1.0) -> dict:
    """q, k, v, the logarithm of the decay of each channel, beta: all of one batch of sequences."""
    tokens = sum(lengths)
    return {
        "q": normal("q" + name, tokens, heads, dim, dtype=kind),
        "k": normal("k" + name, tokens, heads, dim, dtype=kind),
        "v": normal("v" + name, tokens, heads, dim, dtype=kind),
        "g": -decay * normal("g" + name, tokens, heads, dim).abs(),
        "beta": normal("b" + name, tokens, heads).sigmoid(),
    }


def recurrent(record: Record, device: str, kinds: tuple) -> None:
    from vllm.third_party.flash_linear_attention.ops.kda import fused_recurrent_kda

    for kind in kinds:
        for op, lengths, heads, dim in (
            ("kda_decode", [1, 1, 1], 2, 64),
            ("kda_prefill_recurrent", [5, 0, 9, 1], 2, 32),
            ("kda_prefill_recurrent", [3], 1, 128),
        ):
            name = f"{SHORT[kind]}_{'_'.join(map(str, lengths))}_{heads}_{dim}"
            given, state = inputs(name, lengths, heads, dim, kind), cache("s" + name, len(lengths), heads, dim, dim)
            with record.attempt(f"{op} {name}"):
                held = state.to(device, copy=True)
                slots = index(*((2, 3, 1) if op == "kda_decode" else range(1, len(lengths) + 1)))
                table = slots[:, None].expand(len(lengths), max(lengths)).contiguous()
                out, _ = fused_recurrent_kda(
                    *(t[None].to(device) for t in given.values()), dim**-0.5, held,
                    cu_seqlens=starts(lengths, device), ssm_state_indices=table.to(device),
                )  # fmt: skip
                where = {"state_idx": shifted(slots)} if op == "kda_decode" else {"query_start_loc": starts(lengths)}
                record.case(op, name, FLA + "fused_recurrent_kda", {"scale": dim**-0.5},
                            {**given, "state": state[1:], **where}, {"out": out[0], "state": held[1:]})  # fmt: skip


def chunks(record: Record, device: str, kinds: tuple) -> None:
    """The stages and the whole; lengths around the chunk of 64 and its sub-blocks of 16, decays that underflow."""
    from vllm.third_party.flash_linear_attention.ops import kda
    from vllm.third_party.flash_linear_attention.ops.chunk_delta_h import chunk_gated_delta_rule_fwd_h
    from vllm.third_party.flash_linear_attention.ops.solve_tril import solve_tril

    for kind in kinds:
        for lengths, heads, dim, spread in (([70, 5, 16, 1], 2, 64, 1.0), ([17, 65], 1, 128, 1.0),
                                            ([66, 2], 2, 64, 20.0)):  # fmt: skip
            name = f"{SHORT[kind]}_{'_'.join(map(str, lengths))}_{heads}_{dim}" + ("_underflow" if spread > 1 else "")
            tokens, scale = sum(lengths), dim**-0.5
            q, k = (unit(part + name, tokens, heads, dim, dtype=kind) for part in "qk")
            v, beta = normal("v" + name, tokens, heads, dim, dtype=kind), normal("b" + name, tokens, heads).sigmoid()
            g1 = normal("g" + name, tokens, heads, dim, dtype=kind, scale=spread)
            A_log, dt_bias = normal("A" + name, heads, scale=0.5), normal("d" + name, heads * dim)
            state = normal("s" + name, len(lengths), heads, dim, dim, scale=0.5)
            where = {"query_start_loc": starts(lengths)}
            with record.attempt(f"chunks {name}"):
                cu = starts(lengths, device, torch.int64)
                Q, K, V, G1, B, S = (t.to(device) for t in (q[None], k[None], v[None], g1[None], beta[None], state))
                bias = A_log.to(device), dt_bias.to(device)
                gc = kda.fused_kda_gate_chunk_cumsum(G1, *bias, cu_seqlens=cu)
                A, Aqk = kda.chunk_kda_scaled_dot_kkt_fwd(
                    q=Q, k=K, gk=gc, beta=B, scale=scale, cu_seqlens=cu, output_dtype=F32
                )
                record.case("kda_kkt", name, FLA + "chunk_kda_scaled_dot_kkt_fwd", {"scale": scale},
                            {"q": q, "k": k, "gc": gc[0], "beta": beta, **where},
                            {"Akk": A[0], "Aqk": Aqk[0]})  # fmt: skip
                Ai = solve_tril(A=A, cu_seqlens=cu, output_dtype=kind)
                record.case("gdn_solve_tril", name, FLA + "solve_tril", {"out_dtype": str(kind)[6:]},
                            {"A": A[0], **where}, {"Ai": Ai[0]})  # fmt: skip
                w, u, _, kg = kda.recompute_w_u_fwd(k=K, v=V, beta=B, A=Ai, gk=gc, cu_seqlens=cu)
                record.case("kda_recompute_w_u", name, FLA + "recompute_w_u_fwd", {},
                            {"k": k, "v": v, "beta": beta, "gc": gc[0], "Ai": Ai[0], **where},
                            {"w": w[0], "u": u[0], "kg": kg[0]})  # fmt: skip
                h, new, final = chunk_gated_delta_rule_fwd_h(
                    k=kg, w=w, u=u, gk=gc, initial_state=S, output_final_state=True, cu_seqlens=cu, use_exp2=True
                )
                record.case("kda_delta_h", name, "chunk_gated_delta_rule_fwd_h(gk=, use_exp2=True)", {},
                            {"kg": kg[0], "w": w[0], "u": u[0], "gc": gc[0], "state": state, **where},
                            {"h": h[0], "v_new": new[0], "state": final})  # fmt: skip
                o = kda.chunk_gla_fwd_o_gk(
                    q=Q, v=new, g=gc, A=Aqk, h=h, o=torch.empty_like(V), scale=scale, cu_seqlens=cu
                )
                record.case("kda_chunk_o", name, FLA + "chunk_gla_fwd_o_gk", {"scale": scale},
                            {"q": q, "v_new": new[0], "h": h[0], "gc": gc[0], "Aqk": Aqk[0], **where},
                            {"out": o[0]})  # fmt: skip
                o, final = kda.chunk_kda_with_fused_gate(Q, K, V.clone(), G1, B, *bias, scale, S, True, False, cu)
                record.case("kda_chunk_prefill", name, FLA + "chunk_kda_with_fused_gate", {"scale": scale},
                            {"q": q, "k": k, "v": v, "g1": g1, "beta": beta, "A_log": A_log, "dt_bias": dt_bias,
                             "state": state, **where}, {"out": o[0], "state": final})  # fmt: skip


def capture(record: Record, device: str, kinds: tuple) -> None:
    with torch.no_grad():
        for part in (gates, recurrent, chunks):
            with record.attempt(part.__name__):
                part(record, device, kinds)


KINDS = (BF16, F32)
