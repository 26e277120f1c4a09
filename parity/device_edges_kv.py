"""Edge shapes of the paged cache's kernels: units of every size, blocks of threads, chains of copies, stale tables."""

from __future__ import annotations

import numpy as np


def _pairs(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, np.int64).reshape(-1, 2)


def _ring(count: int, blocks: int) -> np.ndarray:
    """Copies of which each reads what the one before it wrote."""
    return np.stack([np.arange(count), np.arange(1, count + 1)], axis=1) % blocks


def _requests(*lengths: int) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


def _owners(*lengths: int, spare: int = 0) -> np.ndarray:
    """Each token's request; spare entries name none."""
    return np.concatenate([np.repeat(np.arange(len(lengths)), lengths), np.full(spare, 99)]).astype(np.int32)


_PAGES = np.random.Generator(np.random.PCG64(11))
_TABLE = _PAGES.integers(0, 9, (4, 40)).astype(np.int32)
_STALE = np.int32([[8, 1, -5, 77], [2, 2, 3, 4], [0, 1 << 30, -1, -1]])

EDGES: dict[str, list[dict]] = {
    "reshape_and_cache": [
        *({"T": 6, "H": H, "D": D, "NB": 3, "BS": 4, "S": 6, "key": kind, "key_cache": kind}
          for H, D, kind in ((1, 1, "bfloat16"), (3, 6, "float16"), (2, 4, "bfloat16"), (2, 128, "bfloat16"),
                             (3, 72, "float32"), (1, 5, "float32"), (2, 3, "float32"))),
        *({"T": 300, "H": H, "D": D, "NB": NB, "BS": BS, "S": S, "key": "bfloat16", "key_cache": "bfloat16"}
          for H, D, NB, BS, S in ((2, 64, 40, 8, 290), (1, 1200, 200, 3, 300))),
        {"T": 2, "H": 0, "D": 8, "NB": 1, "BS": 2, "S": 2}, {"T": 2, "H": 1, "D": 8, "NB": 0, "BS": 2, "S": 0},
    ],
    "reshape_and_cache_xpacked": [
        {"T": 6, "H": 2, "D": 24, "Dx": 3, "x": 8, "NB": 3, "BS": 4, "S": 5, "key": "float16"},
        {"T": 70, "H": 3, "D": 80, "Dx": 10, "x": 8, "NB": 9, "BS": 16, "S": 70, "key": "bfloat16"},
        {"T": 40, "H": 2, "D": 64, "Dx": 16, "x": 4, "NB": 6, "BS": 8, "S": 40},
        {"T": 1, "H": 1, "D": 8, "Dx": 1, "x": 8, "NB": 1, "BS": 1, "S": 1, "key": "bfloat16"},
        {"T": 2, "H": 1, "D": 0, "Dx": 0, "x": 8, "NB": 1, "BS": 4, "S": 2, "key": "bfloat16"},
    ],
    "concat_and_cache_mla": [
        *({"T": 6, "R": R, "P": P, "NB": 3, "BS": 4, "S": 6, "kv_c": kind}
          for R, P, kind in ((1, 2, "bfloat16"), (2, 6, "bfloat16"), (4, 8, "float16"), (512, 64, "float32"),
                             (6, 1, "float32"), (8, 24, "bfloat16"))),
        {"T": 300, "R": 512, "P": 64, "NB": 20, "BS": 16, "S": 299, "kv_c": "bfloat16"},
        {"T": 3, "R": 2048, "P": 512, "NB": 1, "BS": 4, "S": 3, "kv_c": "float32"},
    ],
    "copy_blocks": [
        *({"shape": (6, *shape), "blocks": 6, "n": 2, "cache": kind}
          for shape, kind in (((3,), "uint8"), ((3,), "bfloat16"), ((5, 1), "int32"), ((3, 1), "int64"),
                              ((2, 16, 8), "uint8"), ((), "float32"), ((0, 4), "float32"), ((3,), "int8"))),
        {"shape": (9, 2, 16, 4, 64), "blocks": 9, "n": 4, "cache": "bfloat16"},
        {"shape": (6, 40), "cache": "float16", "block_mapping": _pairs((0, 1), (1, 2), (2, 0), (5, 5), (3, 4))},
        {"shape": (6, 40), "cache": "float32", "block_mapping": _pairs((0, 1), (3, 1), (1, 1))},
        {"shape": (50, 24), "cache": "bfloat16", "block_mapping": _ring(1030, 50)},
        {"shape": (2100, 2), "blocks": 2100, "n": 1050, "cache": "float16"},
        {"shape": (3, 4), "blocks": 3, "n": 0, "cache": "float32"},
    ],
    "swap_blocks": [
        *({"shape": (6, size), "blocks": 6, "n": 3, "block_size_bytes": size, "src": "uint8"}
          for size in (1, 2, 12, 40, 48, 6000)),
        {"shape": (70,), "src": "int8", "block_size_bytes": 10,
         "block_mapping": _pairs((0, 1), (2, 1), (3, 3), (1, 1))},
        {"shape": (20, 3), "src": "float32", "block_size_bytes": 24, "block_mapping": _pairs((9, 0))},
    ],
    "swap_blocks_batch": [
        {"shape": (400,), "src": "int8", "dst": "uint8", **dict(zip(("src_offsets", "dst_offsets", "sizes"), lists))}
        for lists in (
            np.int64([[0, 100, 7, 350], [5, 205, 112, 301], [50, 90, 80, 50]]),
            np.int64([[0, 100, 7], [5, 20, 30], [50, 300, 80]]),
            np.int64([[1, 96, 36], [17, 208, 300], [70, 64, 99]]),
            np.int64([[400, 0, 13], [400, 0, 13], [0, 0, 0]]),
            np.int64([[3], [5], [395]]),
            np.int64([[0, 96, 48, 144], [48, 48, 96, 0], [48, 48, 48, 48]]),
            np.int64([[0, 40, 80], [40, 60, 20], [40, 40, 40]]),
            np.int64([[0, 16, 64], [16, 32, 48], [160, 64, 320]]),
            np.zeros((3, 0), np.int64),
        )
    ] + [
        {"shape": (40_000,), "src": "float32", "src_offsets": np.int64([0, 70_004]),
         "dst_offsets": np.int64([32, 90_000]), "sizes": np.int64([50_000, 60_000])},
    ],
    "cp_gather_cache": [
        *({"pages": (9, 4, *entry), "rows": (90, *entry), "B": 4, "MB": 40, "block_table": _TABLE, "src": kind,
           "cu_seq_lens": _requests(31, 0, 2, 50), "seq_starts": np.int32([4, 0, 148, 8])}
          for entry, kind in (((3,), "uint8"), ((), "bfloat16"), ((5,), "int32"), ((3,), "int64"), ((2, 8), "bfloat16"),
                              ((576,), "bfloat16"))),
        {"pages": (9, 2, 3), "rows": (5, 3), "block_table": _STALE, "cu_seq_lens": _requests(4, 1, 0),
         "src": "float16"},
        {"pages": (9, 16, 24), "rows": (2100, 24), "block_table": _TABLE, "cu_seq_lens": _requests(640, 300, 640, 500),
         "src": "bfloat16"},
        {"pages": (2, 2, 8), "rows": (3, 8), "block_table": _TABLE[:1], "cu_seq_lens": _requests(0)},
        {"pages": (2, 2, 0), "rows": (3, 0), "block_table": _TABLE[:1] % 2, "cu_seq_lens": _requests(3)},
        {"pages": (2, 0, 8), "rows": (0, 8), "block_table": _TABLE[:0], "cu_seq_lens": _requests()},
    ],
    "gather_mla_cache": [
        *({"rows": 90, "D": D, "NB": 9, "BS": 4, "N": 85, "dst": kind, "block_table": _TABLE,
           "cu_seq_lens": _requests(31, 0, 2, 50), "token_to_seq": _owners(31, 0, 2, 52, spare=3),
           "seq_starts": np.int32([4, 0, 148, 8])}
          for D, kind in ((3, "bfloat16"), (6, "float16"), (2, "float32"), (12, "bfloat16"), (576, "bfloat16"))),
        {"rows": 2100, "D": 8, "NB": 9, "BS": 16, "N": 2080, "block_table": _TABLE, "dst": "bfloat16",
         "cu_seq_lens": _requests(640, 300, 640, 500), "token_to_seq": _owners(640, 300, 640, 500)},
        {"rows": 6, "D": 16, "NB": 9, "BS": 2, "N": 5, "block_table": _STALE, "dst": "bfloat16",
         "cu_seq_lens": _requests(4, 1, 0), "token_to_seq": _owners(4, 1)},
    ],
}  # fmt: skip
"""Axes as in `Contract.examples`, by op."""
