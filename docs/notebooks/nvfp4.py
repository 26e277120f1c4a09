# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # What NVFP4 does to a tensor
# A number becomes four bits. Sixteen neighbours share a scale of eight bits, all of them one of 32: 4.5 bits a number.
# Four looks: the codes, the scales, where the scales lie in memory, and what is lost.

# %%
import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np

from vtlab import oracle
from vtlab.ops import nvfp4

rng = np.random.default_rng(0)
E2M1 = ml_dtypes.float4_e2m1fn
E4M3 = ml_dtypes.float8_e4m3fn


def quantise(x, **more):
    """(codes, scales, the factor for all, the values that they stand for)."""
    factor = np.float32([448 * 6 / np.abs(x).max()])
    packed, scales = oracle.scaled_fp4_quant(x, factor, is_sf_swizzled_layout=False, **more)
    back = oracle.dequantize_nvfp4(packed, scales, 1 / factor, out_dtype="float32", is_sf_swizzled_layout=False)
    return nvfp4.unpack(packed), scales, factor, back


def error(x, back):
    return float(np.linalg.norm(back - x) / np.linalg.norm(x))


# %% [markdown]
# ## Codes
# Sign, two bits of exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6. The largest of a block lands on 6, and what
# the others round to is a step that is wide near it and narrow near 0. Between two codes the even one takes the tie.

# %%
grid = np.arange(8, dtype=np.uint8).view(E2M1).astype(np.float32)
assert grid.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
line = np.linspace(-6, 6, 2400, dtype=np.float32).reshape(-1, 8)
block = np.concatenate([line, np.full((len(line), 8), 6, np.float32)], 1)  # a 6 in every block: its scale is 1
_, scales, factor, back = quantise(block)
assert (scales.view(E4M3).astype(np.float32) / factor == 1).all()
plt.figure(figsize=(7, 3))
plt.plot(line.reshape(-1), back[:, :8].reshape(-1), label="what comes back")
plt.plot(line.reshape(-1), (back[:, :8] - line).reshape(-1), label="error")
plt.xlabel("value in a block whose largest is 6")
plt.legend()
plt.tight_layout()

# %% [markdown]
# A tensor of weights, three of its columns a hundred times larger than the rest. Left: the values. Right: the codes. A
# block that holds an outlier has codes of 0 for nearly everything else.

# %%
weights = rng.standard_normal((48, 96)).astype(np.float32)
weights[:, [10, 41, 77]] *= 100
codes, scales, factor, back = quantise(weights)
figure, axes = plt.subplots(1, 2, figsize=(9, 3))
axes[0].imshow(np.clip(weights, -3, 3), cmap="coolwarm", aspect="auto")
axes[0].set_title("values, cut at 3")
shown = axes[1].imshow(codes.view(E2M1).astype(np.float32), cmap="coolwarm", aspect="auto")
axes[1].set_title("codes")
figure.colorbar(shown, ax=axes[1])
plt.tight_layout()
lost = (codes & 7 == 0).reshape(48, 6, 16).mean(axis=(0, 2))
outliers = {10 // 16, 41 // 16, 77 // 16}
assert all((lost[b] > 0.5) == (b in outliers) for b in range(6))
print("share of zeros by block:", *(f"{share:.0%}" for share in lost))

# %% [markdown]
# ## Scales
# A block's scale is its largest value over 6, times a factor that spreads the scales of a whole tensor over e4m3, whose
# largest number is 448, and rounded to it: three bits of mantissa. So the largest value of a block comes back off by up
# to 1/16, and a scale that is 2^19 below the largest is 0, and its block with it.

# %%
wide = (2.0 ** np.linspace(-24, 0, 400)).astype(np.float32)[:, None] * np.ones(16, np.float32)
_, scales, factor, back = quantise(wide)
stored = scales.view(E4M3).astype(np.float32)[:, 0] / factor
ideal = wide[:, 0] / 6
kept = stored > 0
relative = stored[kept] / ideal[kept] - 1
normal = scales[kept, 0] >= 8  # codes from 8 on are e4m3's normal numbers
assert np.abs(relative[normal]).max() <= 1 / 16 and (~kept)[wide[:, 0] < 2.0**-18.9].all()
figure, axes = plt.subplots(1, 2, figsize=(9, 3))
axes[0].loglog(ideal, ideal, ":", label="largest / 6")
axes[0].loglog(ideal[kept], stored[kept], drawstyle="steps-mid", label="as e4m3")
axes[0].set_xlabel("scale")
axes[0].legend()
axes[1].semilogx(ideal[kept], relative)
axes[1].set_xlabel("scale")
axes[1].set_ylabel("relative error of the scale")
plt.tight_layout()

# %% [markdown]
# ## Where scales lie
# Matrix units read scales in tiles of 128 rows by 4 blocks, 512 bytes: row r of a tile is at 16 (r mod 32) + 4 (r div
# 32), so that 32 lanes find the scales of four of their rows in 16 bytes each. The picture shows, for 256 rows of 8
# scales, at which byte each of them is.

# %%
place = np.arange(256 * 8, dtype=np.int64).reshape(256, 8)
order = nvfp4.tile(place).reshape(-1)  # order[byte] = the scale that lies there
byte = np.empty_like(order)
byte[order] = np.arange(order.size)
byte = byte.reshape(256, 8)
r, c = np.indices(byte.shape)
formula = ((r // 128 * 2 + c // 4) * 32 + r % 32) * 16 + r % 128 // 32 * 4 + c % 4
assert (byte == formula).all()
some = rng.integers(0, 256, (130, 5), dtype=np.uint8)
assert (nvfp4.untile(oracle.swizzle_blockscale(some), 130, 5) == some).all()
figure, axes = plt.subplots(1, 2, figsize=(9, 4))
axes[0].imshow(place, cmap="viridis", aspect="auto")
axes[0].set_title("byte of a scale, rows one after the other")
shown = axes[1].imshow(byte, cmap="viridis", aspect="auto")
axes[1].set_title("in tiles")
for axis in axes:
    axis.set_xlabel("block of the row")
    axis.set_ylabel("row")
figure.colorbar(shown, ax=axes[1])
plt.tight_layout()

# %% [markdown]
# ## What is lost
# The relative error of normally distributed numbers, beside MXFP4 (blocks of 32, scales that are powers of two) and
# FP8 with a scale for each row. Then with outliers of growing size, one in a hundred numbers, and the error of the
# others alone: the smaller the block, the fewer have an outlier beside them. FP8 has exponents enough not to notice.


# %%
def mxfp4(x):
    packed, scales = oracle.mxfp4_quant(x)
    values = nvfp4.unpack(packed).view(E2M1).astype(np.float32)
    return np.ldexp(values, scales.repeat(32, -1).astype(np.int32) - 127)


def fp8(x):
    found, scale = oracle.dynamic_per_token_scaled_fp8_quant(x)
    return found.view(E4M3).astype(np.float32) * scale


formats = {"NVFP4": lambda x: quantise(x)[3], "MXFP4": mxfp4, "FP8 by row": fp8}
plain = rng.standard_normal((64, 1024)).astype(np.float32)
found = {name: error(plain, back(plain)) for name, back in formats.items()}
assert found["FP8 by row"] < found["NVFP4"] < found["MXFP4"]
print({name: round(value, 4) for name, value in found.items()})
sizes = [1, 3, 10, 30, 100]
where = rng.random(plain.shape) < 0.01
plt.figure(figsize=(6, 3))
for name, back in formats.items():
    errors = []
    for size in sizes:
        x = np.where(where, size * plain, plain).astype(np.float32)
        small = ~where
        errors.append(error(x[small], back(x)[small]))
    plt.loglog(sizes, errors, marker="o", label=name)
plt.xlabel("size of one number in a hundred")
plt.ylabel("relative error of the others")
plt.legend()
plt.tight_layout()

# %% [markdown]
# The error of a product is that of its operands: both quantised, as on a chip with units for four bits, or the weights
# alone. The product itself adds next to nothing, as scaled codes and their products are exact in float32.

# %%
x = rng.standard_normal((32, 1024)).astype(ml_dtypes.bfloat16)
w = (rng.standard_normal((128, 1024)) / 32).astype(ml_dtypes.bfloat16)
exact = x.astype(np.float64) @ w.astype(np.float64).T
gx, gw = (np.float32([448 * 6 / np.abs(a.astype(np.float32)).max()]) for a in (x, w))
(xq, xs), (wq, ws) = oracle.scaled_fp4_quant(x, gx), oracle.scaled_fp4_quant(w, gw)
both = oracle.cutlass_scaled_fp4_mm(xq, wq, xs, ws, 1 / (gx * gw), out_dtype="float32")
alone = oracle.matmul_nvfp4(x, wq, ws, 1 / gw, out_dtype="float32")
loss = {"weights and activations": error(exact, both), "weights": error(exact, alone)}
xb, wb = (oracle.dequantize_nvfp4(q, s, 1 / g, out_dtype="float32").astype(np.float64)
          for q, s, g in ((xq, xs, gx), (wq, ws, gw)))  # fmt: skip
loss["weights and activations, from the dequantised operands"] = error(exact, xb @ wb.T)
assert abs(loss["weights and activations"] - error(exact, xb @ wb.T)) < 1e-4
assert loss["weights"] < loss["weights and activations"] < 2 * loss["weights"]
plt.figure(figsize=(7, 2))
plt.barh(list(loss), list(loss.values()))
plt.xlabel("relative error of the product")
plt.tight_layout()
