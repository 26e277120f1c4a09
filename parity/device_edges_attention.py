"""Edge shapes of attention: every kernel, tiles and chunks cut short, ragged batches, windows, options."""

from __future__ import annotations

import numpy as np

_PER_REQUEST = np.array([True, False, True])


def _paged(new, lens, heads, D, q, kv=None, BS=16, spare_rows=0, room=0, **options) -> dict:
    """A batch: `new` rows over `lens` keys a request, (query, key) heads, pages of BS; `room` for more in the table."""
    used = [-(-length // BS) for length in lens]
    return {"T": sum(new) + spare_rows, "Hq": heads[0], "Hk": heads[1], "D": D, "NB": sum(used) + 1, "BS": BS,
            "R": len(new), "MB": max(used) + 1 + room, "q": q, "k_cache": kv or q, "lens": lens, "new": new,
            "scale": 0.125, **options}  # fmt: skip


_DECODE = [  # every kernel of attention_decode
    *(_paged((1, 1), (140, 3), (G, 1), D, "bfloat16", return_lse=True)
      for G, D in ((1, 128), (2, 64), (4, 128), (8, 128), (1, 256), (4, 256), (8, 136), (4, 512))),
    *(_paged((1, 1), (140, 3), (G, 1), D, "bfloat16", room=1040, return_lse=True)
      for G, D in ((2, 128), (4, 128), (4, 256))),  # so much may come that query heads share a block
    *(_paged((1, 1), (140, 3), (G, 1), D, kind) for kind in ("float16", "float32")
      for G, D in ((4, 128), (4, 256), (4, 512))),
]  # fmt: skip
_PREFILL = [  # every kernel of attention_prefill
    _paged((34,), (150,), (2, 1), D, kind, return_lse=True)
    for kind in ("bfloat16", "float16", "float32") for D in (72, 136, 264)
]  # fmt: skip
_MIXED = [
    _paged((1, 33, 0, 1, 5), (300, 40, 9, 129, 5), (6, 2), 64, "bfloat16", spare_rows=3, return_lse=True),
    _paged((1, 40, 1), (5, 40, 260), (4, 1), 32, "float32", "bfloat16", BS=7, window=(130, 0), return_lse=True),
    _paged((3, 40, 1), (5, 30, 200), (2, 2), 24, "float16", causal=_PER_REQUEST & False, window=(20, 3)),
    _paged((3, 40, 1), (5, 45, 200), (2, 2), 24, "bfloat16", causal=_PER_REQUEST, sinks="float32",
           lse_includes_sink=False, return_lse=True),
    _paged((2, 3), (2, 9), (66, 1), 8, "bfloat16", BS=64, spare_rows=28, alibi_slopes="float32"),
    _paged((33,), (33,), (1, 1), 16, "bfloat16", BS=64, softcap=20.0, alibi_slopes="float32"),
    _paged((2, 0, 1), (128, 0, 256), (3, 1), 40, "bfloat16", BS=128, p_round="bfloat16", return_lse=True),
    _paged((1, 1, 1), (1, 513, 128), (12, 1), 64, "bfloat16", BS=1, softcap=30.0, sinks="float32",
           alibi_slopes="float32", return_lse=True),
    _paged((2, 5), (1, 3), (2, 1), 8, "float32", BS=4, causal=False, window=(1, 1), sinks="float32", return_lse=True),
    _paged((1,), (17000,), (1, 1), 8, "float16", BS=256, return_lse=True),
    _paged((1,), (2000,), (4, 1), 5, "bfloat16", window=(1000, 7), p_round="float16"),
    _paged((0, 0), (4, 0), (2, 1), 8, "float32", BS=4, return_lse=True),
]  # fmt: skip

EDGES: dict[str, list[dict]] = {
    "paged_attention": [*_DECODE, *_PREFILL, *_MIXED],
    "attention": [
        {"T": 40, "S": 140, "Hq": 4, "Hk": 2, "D": 128, "q": "bfloat16", "return_lse": True},
        {"T": 70, "S": 70, "Hq": 3, "Hk": 3, "D": 33, "q": "float32", "window": (9, 2), "sinks": "float32"},
        {"T": 1, "S": 400, "Hq": 8, "Hk": 1, "D": 96, "q": "float16", "return_lse": True},
        {"T": 36, "S": 3, "Hq": 2, "Hk": 1, "D": 16, "q": "bfloat16", "causal": False, "window": (5, 5),
         "alibi_slopes": "float32", "return_lse": True},
        {"T": 0, "S": 5, "Hq": 2, "Hk": 1, "D": 8}, {"T": 4, "S": 0, "Hq": 2, "Hk": 1, "D": 8, "causal": False},
    ],
    "merge_attn_states": [
        *({"T": 9, "H": 3, "D": 128, "prefix_out": kind, "edge": edge, "output_scale": scale}
          for kind, edge, scale in (("bfloat16", np.inf, None), ("float16", -np.inf, 0.3), ("float32", 1.0, 0.02))),
        {"T": 9, "H": 3, "D": 72, "prefix_out": "float32", "prefill_tokens_with_context": 5, "empty": "zeros"},
        {"T": 300, "H": 2, "D": 256, "prefix_out": "bfloat16", "prefill_tokens_with_context": 0},
        {"T": 5, "H": 3, "D": 7, "prefix_out": "bfloat16", "output_scale": 2.0, "edge": -np.inf, "empty": "zeros"},
        {"T": 2, "H": 1, "D": 1, "prefix_out": "float16"},
    ],
}  # fmt: skip
