# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Where two "equal" kernels part
# Three looks at rounding: the double rounding of float64 to bfloat16, the three meanings of RMSNorm in bfloat16, and
# the distance between truth and mirror as a sum grows.

# %%
import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np

from vtlab import oracle
from vtlab.ops.numerics import MIRROR, TRUTH, round_to, sequential, strided_tree

rng = np.random.default_rng(0)

# %% [markdown]
# ## Rounding twice
# A step of bfloat16 near 1 is 2^-7. Just above the midpoint of a step, a cast through float32 loses what decides.

# %%
offset = np.arange(-40, 41) * 2.0**-28
x = 1 + 2.0**-8 + offset
twice = x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(float)
once = round_to(x, ml_dtypes.bfloat16).astype(float)
wrong = twice != once
assert wrong.any() and (offset[wrong] > 0).all()
plt.figure(figsize=(7, 3))
plt.plot(offset, once, drawstyle="steps-mid", label="round_to: once")
plt.plot(offset, twice, ":", drawstyle="steps-mid", label="through float32: twice")
plt.xlabel("distance from the midpoint")
plt.ylabel("bfloat16 result")
plt.legend()
plt.tight_layout()

# %% [markdown]
# ## One name, three functions
# The share of elements in which the variants of `rms_norm` differ, in bfloat16, with a residual.

# %%
hidden = [128, 512, 2048, 5120]
share = []
for width in hidden:
    x, r = (rng.standard_normal((16, width)).astype(ml_dtypes.bfloat16) for _ in range(2))
    w = (1 + 0.1 * rng.standard_normal(width)).astype(ml_dtypes.bfloat16)
    vt, _ = oracle.rms_norm(x, w, residual=r)
    native, _ = oracle.rms_norm(x, w, residual=r, rounding="vllm_native")
    share.append(float(np.mean(vt.view(np.uint16) != native.view(np.uint16))))
assert min(share) > 0.05
plt.figure(figsize=(5, 3))
plt.bar([str(h) for h in hidden], share)
plt.xlabel("hidden size")
plt.ylabel("elements that differ")
plt.title("rms_norm: vt against vLLM's forward_native")
plt.tight_layout()

# %% [markdown]
# ## The order of a sum
# The relative error of a float32 sum of squares against float64, one element after the other and in the tree that the
# kernels declare. The tree's error stays flat: its longest path is `n/256 + 8` additions, not `n`.

# %%
sizes = [2**k for k in range(8, 17)]
errors: dict[str, list[float]] = {"sequential": [], "strided_tree(256)": []}
for n in sizes:
    data = rng.standard_normal((8, n)).astype(np.float32) ** 2
    exact = TRUTH.sum(TRUTH.load(data))
    for name, order in (("sequential", sequential), ("strided_tree(256)", strided_tree(256))):
        errors[name].append(float(np.mean(np.abs(MIRROR.sum(data, order=order) - exact) / exact)))
assert errors["strided_tree(256)"][-1] < errors["sequential"][-1]
plt.figure(figsize=(5, 3))
for name, found in errors.items():
    plt.loglog(sizes, found, marker="o", label=name)
plt.axhline(2.0**-24, color="grey", linewidth=0.8, label="unit roundoff")
plt.xlabel("n")
plt.ylabel("relative error")
plt.legend()
plt.tight_layout()
