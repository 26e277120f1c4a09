# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A gated delta rule, by hand
# One head of Qwen3.5's recurrent layers three times over: as a loop, as a system of equations for a chunk of tokens,
# and in the WY form that turns the chunk into matrix products. Each is held against the op of its name.

# %%
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np

from vtlab import oracle

rng = np.random.default_rng(0)
T, D, C = 48, 16, 16  # tokens, width of keys and values, tokens of a chunk
F32 = np.float32

# %% [markdown]
# ## A memory that corrects itself
# The state $S$ maps keys to values. A token fades it by $e^{g}$, looks its key up, and writes a share $\beta$ of what
# is missing: $S \leftarrow e^{g} S$, then $S \leftarrow S + \beta\,(v - S k)\,k^\top$; what it reads is $o = S q$.
# With $\beta = 1$ and keys of length 1 the value just written reads back exactly. A sum of $v k^\top$ would not do
# that.


# %%
def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


q, k = unit(rng.standard_normal((T, D))), unit(rng.standard_normal((T, D)))
v = rng.standard_normal((T, D))
g, beta = -rng.exponential(0.05, T), rng.uniform(0.3, 1.0, T)
q, k, v, g, beta = (part.astype(F32).astype(float) for part in (q, k, v, g, beta))


def loop(S, tokens, wrote=None):
    """The outputs of the tokens, and the state after them."""
    out = []
    for t in tokens:
        S = np.exp(g[t]) * S
        change = beta[t] * (v[t] - S @ k[t])
        S = S + np.outer(change, k[t])
        out.append(S @ q[t])
        if wrote is not None:
            wrote.append((change, S))
    return np.array(out), S


wrote: list = []
o_loop, S_loop = loop(np.zeros((D, D)), range(T), wrote)

heads = lambda x: np.ascontiguousarray(x[:, None], F32)
starts, state = np.int32([0, T]), np.zeros((1, 1, D, D), F32)
op = oracle.gdn_prefill(heads(q), heads(k), heads(v), heads(g), heads(beta), state, starts, scale=1.0)
assert np.abs(op[:, 0] - o_loop).max() < 1e-6 and np.abs(state[0, 0] - S_loop).max() < 1e-6

# %% [markdown]
# How well each key still reads its value later on: a row is a time, a column the token that wrote. What is dark was
# overwritten by keys close to it, or faded; a token writes the share $\beta$ of its error, so some are weak from the
# start.

# %%
recall = np.array([[1 - np.linalg.norm(S @ k[i] - v[i]) / np.linalg.norm(v[i]) if i <= t else np.nan for i in range(T)]
                   for t, (_, S) in enumerate(wrote)])  # fmt: skip
plt.figure(figsize=(5, 4))
plt.imshow(recall, vmin=0, vmax=1, cmap="viridis")
plt.colorbar(label="1 - |S k - v| / |v|")
plt.xlabel("token that wrote")
plt.ylabel("time")
plt.tight_layout()

# %% [markdown]
# ## A chunk is a system of equations
# Let $u_i$ be what token $i$ of a chunk writes beside its key, and $G_i = g_1 + \dots + g_i$. The state it looks into
# is the one before the chunk and the writes since then, all faded:
#
# $$u_i = \beta_i\Big(v_i - e^{G_i} S k_i - \sum_{j<i} e^{G_i - G_j} (k_j \cdot k_i)\, u_j\Big)$$
#
# or $(I + A)\,U = \beta\,(V - e^{G} K S^\top)$ with $A$ below the diagonal alone: all tokens are solved for at once.

# %%
first = slice(0, C)
G = np.cumsum(g[first])
fade = np.exp(np.minimum(G[:, None] - G[None], 0))
A = np.tril(beta[first, None] * (k[first] @ k[first].T) * fade, -1)
U = np.linalg.solve(np.eye(C) + A, beta[first, None] * v[first])  # S is zero before the first chunk
assert np.abs(U - [change for change, _ in wrote[:C]]).max() < 1e-12

gc = oracle.gdn_chunk_cumsum(heads(g), starts, chunk_size=C)
A_op = oracle.gdn_kkt(heads(k), heads(beta), gc, starts, chunk_size=C)
inverse = oracle.gdn_solve_tril(A_op, starts)
assert np.abs(A_op[first, 0] - A).max() < 1e-6
assert np.abs(inverse[first, 0] - np.linalg.inv(np.eye(C) + A)).max() < 1e-5

figure, axes = plt.subplots(1, 2, figsize=(8, 3.4))
for axis, matrix, title in zip(
    axes, (A, inverse[first, 0]), ("A: whom a token meets", "its inverse: and whom those had met")
):
    shown = axis.imshow(matrix, vmin=-0.6, vmax=0.6, cmap="RdBu")
    axis.set_title(title)
figure.colorbar(shown, ax=axes)

# %% [markdown]
# ## The WY form
# The inverse $T = (I + A)^{-1}$ does not know the state before the chunk. So the writes come apart into what they
# would be from nothing and what the state takes off: $U = u - w S^\top$ with $u = T\,\beta V$ and $w =
# T\,\beta\,e^{G} K$. Only the state goes from chunk to chunk; all else is a matrix product:
#
# $$O = e^{G} Q S^\top + \big(Q K^\top \odot e^{G_i - G_j}\big)_{j \le i}\, U, \qquad
# S' = e^{G_C} S + U^\top \big(e^{G_C - G} K\big)$$


# %%
def in_chunks(S, size):
    out = []
    for begin in range(0, T, size):
        at = slice(begin, min(begin + size, T))
        K, Q, b, G = k[at], q[at], beta[at, None], np.cumsum(g[at])
        fade = np.exp(np.minimum(G[:, None] - G[None], 0))
        inverse = np.linalg.inv(np.eye(len(K)) + np.tril(b * (K @ K.T) * fade, -1))
        u, w = inverse @ (b * v[at]), inverse @ (b * np.exp(G)[:, None] * K)
        U = u - w @ S.T
        out.append(np.exp(G)[:, None] * (Q @ S.T) + np.tril(Q @ K.T * fade) @ U)
        S = np.exp(G[-1]) * S + U.T @ (np.exp(G[-1] - G)[:, None] * K)
    return np.concatenate(out), S


for size in (1, 7, 16, T):
    o, S = in_chunks(np.zeros((D, D)), size)
    assert np.abs(o - o_loop).max() < 1e-12 and np.abs(S - S_loop).max() < 1e-12
w, u = oracle.gdn_recompute_w_u(heads(k), heads(v), heads(beta), gc, inverse, starts)
assert np.abs(u[first, 0] - U).max() < 1e-5

# %% [markdown]
# ## Equal, but not to the byte
# Both forms are the same function. In float32 they round in another order, and the chunked one in an order that
# depends on where its chunks begin: a prompt that is cut elsewhere gives other bytes. The loop does not, so models
# here take the loop, and a kernel on tensor cores takes the chunks.

# %%
vectors = [heads(part) for part in (q, k, v, g, beta)]


def mirrored(run, cuts, **more):
    """The float32 mirror of an op over the sequence in pieces."""
    state, out = np.zeros((1, 1, D, D), F32), []
    for begin, end in pairwise(cuts):
        parts = [part[begin:end] for part in vectors]
        out.append(run.mirror(*parts, state, np.int32([0, end - begin]), scale=1.0, **more)[:, 0])
    return np.concatenate(out)


whole, cut = (mirrored(oracle.gdn_prefill, cuts) for cuts in ([0, T], [0, 5, 21, 22, T]))
assert whole.tobytes() == cut.tobytes()
chunked, moved = (mirrored(oracle.gdn_chunk_prefill, cuts, chunk_size=C) for cuts in ([0, T], [0, 5, T]))
assert chunked.tobytes() != moved.tobytes()
plt.figure(figsize=(7, 3))
for name, found in (("loop", whole), ("chunks of 16", chunked), ("chunks of 16 from token 5 on", moved)):
    plt.semilogy(np.abs(found - o_loop).max(axis=1) + 1e-10, marker=".", label=name)
plt.axhline(2.0**-24, color="grey", linewidth=0.8)
plt.xlabel("token")
plt.ylabel("|float32 - float64|")
plt.legend()
plt.tight_layout()
