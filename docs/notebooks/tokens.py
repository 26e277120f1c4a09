# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A token through the oracle
# Gemma-3-270m from its real GGUF file, every op evaluated by its definition: what the model believes after a prompt,
# which choices vLLM found close, and how near our log-probabilities are to vLLM's. Needs the `demo` extra.

# %%
import matplotlib.pyplot as plt
import numpy as np

from vtlab.models.demo import demo_path
from vtlab.models.loading import load_decoder, load_tokenizer
from vtlab.parity.goldens import token_golden
from vtlab.parity.tokens import logprobs

golden = token_golden("gemma3_270m_q4_k_m_float32")
tokenizer = load_tokenizer(demo_path())
decoder = load_decoder(demo_path(), "float32", max_positions=256)

# %% [markdown]
# ## The next token
# The ten most likely continuations of the first prompt.

# %%
prompt, output = golden["prompts"][0], golden["outputs"][0]
ours = logprobs(decoder, prompt["ids"], output["tokens"])
best = np.argsort(-ours[0], kind="stable")[:10]
assert best[0] == output["tokens"][0]
plt.figure(figsize=(6, 3))
plt.barh([repr(tokenizer.decode([int(t)])) for t in best[::-1]], np.exp(ours[0][best[::-1]]))
plt.xlabel("probability")
plt.title(prompt["text"])
plt.tight_layout()

# %% [markdown]
# ## Beside vLLM
# Every log-probability that vLLM reported for this stream, against ours; and the gap between vLLM's two best tokens,
# below which an error could change the stream.

# %%
ids = np.array([[token for token, _ in step] for step in output["logprobs"]])
theirs = np.array([[value for _, value in step] for step in output["logprobs"]])
error = np.abs(np.take_along_axis(ours, ids, axis=-1) - theirs)
gap = theirs[:, 0] - theirs[:, 1]
assert error.max() < gap.min() / 2
plt.figure(figsize=(6, 3))
plt.semilogy(gap, label="gap between vLLM's two best")
plt.semilogy(error.max(axis=1), label="largest difference, ours to vLLM's")
plt.xlabel("token")
plt.ylabel("nats")
plt.legend()
plt.tight_layout()
