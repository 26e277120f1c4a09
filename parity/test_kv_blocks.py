"""Block moves and gathers against loops over bytes objects."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError

from .compare import assert_bytes
from .goldens import op_cases
from .harness import case, checks, mutations
from .test_kv_cache import bits

QUICK = settings(max_examples=40, deadline=None, derandomize=True)
PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8)


def mapping(pairs):
    return np.array(pairs, np.int64).reshape(-1, 2)


@checks("copy_blocks")
@QUICK
@given(PAIRS, st.sampled_from(["bfloat16", "float32", "uint8"]))
def test_copy_blocks_copies_in_order(pairs, kind):
    cache = bits((6, 2, 3), kind, 1)
    blocks = [cache[b].tobytes() for b in range(6)]
    for source, target in pairs:
        blocks[target] = blocks[source]
    assert oracle.copy_blocks(cache, mapping(pairs)) is None
    assert [cache[b].tobytes() for b in range(6)] == blocks


@checks("copy_blocks")
def test_copy_blocks_moves_keys_and_values_of_strided_pages():
    whole = bits((5, 2, 2, 1, 4), "bfloat16", 2)
    before = whole.copy()
    oracle.copy_blocks(whole[:, 1], mapping([(0, 4), (3, 1)]))
    assert_bytes(whole[:, 0], before[:, 0])
    assert_bytes(whole[[4, 1], 1], before[[0, 3], 1])
    assert_bytes(whole[[0, 2, 3], 1], before[[0, 2, 3], 1])


@checks("swap_blocks")
@QUICK
@given(PAIRS, st.sampled_from([1, 5, 24]), st.booleans())
def test_swap_blocks_copies_in_order(pairs, size, same):
    source = bits((6 * size + 3,), "uint8", 3)
    target = source if same else bits((7 * size,), "uint8", 4)
    read, write = bytearray(source.tobytes()), bytearray(target.tobytes())
    read = write if same else read
    for s, d in pairs:
        write[d * size : (d + 1) * size] = bytes(read[s * size : (s + 1) * size])
    assert oracle.swap_blocks(source, target, size, mapping(pairs)) is None
    assert target.tobytes() == bytes(write)


@checks("swap_blocks")
def test_swap_blocks_between_caches_of_other_shapes():
    source, target = bits((4, 2, 8), "float32", 5), bits((3, 32), "bfloat16", 6)
    old = target.copy()
    oracle.swap_blocks(source, target, 64, mapping([(3, 0), (1, 2)]))
    assert target[0].tobytes() == source[3].tobytes() and target[2].tobytes() == source[1].tobytes()
    assert_bytes(target[1], old[1])


@checks("swap_blocks_batch")
@QUICK
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 12)), max_size=7), st.booleans())
def test_swap_blocks_batch_copies_in_order(triples, same):
    source = bits((8,), "float32", 7)
    target = source if same else bits((16,), "bfloat16", 8)
    write = bytearray(target.tobytes())
    read = write if same else bytearray(source.tobytes())
    for s, d, n in triples:
        write[d : d + n] = bytes(read[s : s + n])
    columns = [np.array(column, np.int64) for column in zip(*triples)] or [np.zeros(0, np.int64)] * 3
    assert oracle.swap_blocks_batch(source, target, *columns) is None
    assert target.tobytes() == bytes(write)


GATHERS = [
    case(table=[[4, 0, 1], [1, 1, 9], [9, 9, 9], [2, 3, 4]], lengths=[5, 3, 0, 6]),
    case(table=[[4, 0, 1], [1, 3, 9], [9, 9, 9], [2, 3, 4]], lengths=[1, 2, 0, 4], starts=[4, 2, 0, 2]),
    case(table=[[-1, 0]], lengths=[2], starts=[2]),
    case(table=[[7]], lengths=[0]),
]


@checks("cp_gather_cache", cases=GATHERS)
def test_gather_against_loop(case):
    """Permuted, shared and stale pages, a request without tokens, and a chunk that begins in the middle."""
    src, dst = bits((5, 2, 3), "bfloat16", 1), bits((sum(case.lengths) + 2, 3), "bfloat16", 2)
    bounds = np.cumsum([0, *case.lengths]).astype(np.int32)
    want, row = dst.copy(), 0
    for request, length in enumerate(case.lengths):
        for j in range(length):
            position = j + (case.starts[request] if "starts" in case else 0)
            want[row] = src[case.table[request][position // 2]][position % 2]
            row += 1
    starts = np.int32(case.starts) if "starts" in case else None
    assert oracle.cp_gather_cache(src, dst, np.int32(case.table), bounds, seq_starts=starts) is None
    assert_bytes(dst.view(np.uint16), want.view(np.uint16))


@checks("cp_gather_cache")
def test_gather_reads_back_a_paged_write():
    key = bits((7, 2, 4), "bfloat16", 3)
    pages = bits((4, 2, 2, 2, 4), "bfloat16", 4)
    table = np.int32([[3, 1], [0, 2]])
    positions, request = np.int64([0, 1, 2, 0, 1, 2, 3]), np.int64([0, 0, 0, 1, 1, 1, 1])
    where = table[request, positions // 2].astype(np.int64) * 2 + positions % 2
    oracle.reshape_and_cache(key, key, pages[:, 0], pages[:, 1], where)
    out = bits((7, 2, 4), "bfloat16", 5)
    oracle.cp_gather_cache(pages[:, 1], out, table, np.int32([0, 3, 7]))
    assert_bytes(out, key)


@checks("cp_gather_cache")
def test_gather_against_the_cuda_op():
    goldens = op_cases("kv_cache", "cp_gather_cache", "cuda")
    assert goldens
    for golden in goldens:
        arguments = golden.call()
        oracle.cp_gather_cache(**arguments)
        assert_bytes(arguments["dst"], golden.outputs["dst"], golden.name)


def _frozen(*shape):
    array = np.zeros(shape, np.float32)
    array.flags.writeable = False
    return array


SHARED = np.zeros(16, np.float32)
OFFSETS = {"src_offsets": np.int64([0]), "dst_offsets": np.int64([0]), "sizes": np.int64([8])}
DEFAULTS = {
    "copy_blocks": {"cache": np.zeros((3, 4), np.float32), "block_mapping": mapping([(0, 1)])},
    "swap_blocks": {"src": np.ones(16, np.float32), "dst": np.zeros(8, np.float32), "block_size_bytes": 16,
                    "block_mapping": mapping([(0, 1)])},
    "swap_blocks_batch": {"src": np.ones(16, np.float32), "dst": np.zeros(8, np.float32), **OFFSETS},
    "cp_gather_cache": {"src": np.ones((3, 2, 4), np.float32), "dst": np.zeros((5, 4), np.float32),
                        "block_table": np.int32([[0, 1]]), "cu_seq_lens": np.int32([0, 3])},
}  # fmt: skip
REFUSED = [
    ("copy_blocks", "block_mapping", {"block_mapping": mapping([(0, 3)])}),
    ("copy_blocks", "block_mapping", {"block_mapping": mapping([(-1, 0)])}),
    ("copy_blocks", "block_mapping", {"block_mapping": np.int32([[0, 1]])}),
    ("copy_blocks", "block_mapping", {"block_mapping": np.int64([[0, 1, 2]])}),
    ("copy_blocks", "cache", {"cache": _frozen(3, 4)}),
    ("copy_blocks", "cache", {"cache": np.float32(1).reshape(())}),
    ("swap_blocks", "block_mapping", {"block_mapping": mapping([(4, 0)])}),
    ("swap_blocks", "block_mapping", {"block_mapping": mapping([(0, 2)])}),
    ("swap_blocks", "block_mapping", {"block_mapping": mapping([(0, -1)])}),
    ("swap_blocks", "block_size_bytes", {"block_size_bytes": 0}),
    ("swap_blocks", "src", {"src": np.ones(32, np.float32)[::2]}),
    ("swap_blocks", "dst", {"dst": _frozen(8)}),
    ("swap_blocks", "dst", {"src": SHARED[:8], "dst": SHARED[4:12]}),
    ("swap_blocks_batch", "sizes", {"sizes": np.int64([-1])}),
    ("swap_blocks_batch", "sizes", {"sizes": np.int64([1, 2])}),
    ("swap_blocks_batch", "src_offsets", {"src_offsets": np.int64([57])}),
    ("swap_blocks_batch", "src_offsets", {"src_offsets": np.int64([-1])}),
    ("swap_blocks_batch", "src_offsets", {"src_offsets": np.int64([2**63 - 1])}),
    ("swap_blocks_batch", "dst_offsets", {"dst_offsets": np.int64([25])}),
    ("swap_blocks_batch", "src_offsets", {"sizes": np.int64([2**63 - 1])}),
    ("swap_blocks_batch", "dst", {"dst": _frozen(8)}),
    ("cp_gather_cache", "cu_seq_lens", {"cu_seq_lens": np.int32([1, 3])}),
    ("cp_gather_cache", "cu_seq_lens", {"cu_seq_lens": np.int32([0, 6])}),
    ("cp_gather_cache", "cu_seq_lens", {"cu_seq_lens": np.int32([0, 1, 2])}),
    ("cp_gather_cache", "cu_seq_lens", {"block_table": np.int32([[0, 1]] * 2), "cu_seq_lens": np.int32([0, 3, 1])}),
    (
        "cp_gather_cache",
        "cu_seq_lens",
        {"block_table": np.int32([[0, 1]] * 3), "cu_seq_lens": np.int32([0, 2**31 - 1, -(2**31), 3])},
    ),
    ("cp_gather_cache", "src", {"src": np.ones((3, 0, 4), np.float32)}),
    ("cp_gather_cache", "seq_starts", {"seq_starts": np.int32([1])}),
    ("cp_gather_cache", "seq_starts", {"seq_starts": np.int32([-2])}),
    ("cp_gather_cache", "block_table", {"seq_starts": np.int32([2])}),
    ("cp_gather_cache", "block_table", {"block_table": np.int32([[0, 3]])}),
    ("cp_gather_cache", "block_table", {"block_table": np.int32([[0, -1]])}),
    ("cp_gather_cache", "dst", {"dst": np.zeros((5, 5), np.float32)}),
    ("cp_gather_cache", "dst", {"dst": np.zeros((5, 4), np.float16)}),
    ("cp_gather_cache", "dst", {"dst": _frozen(5, 4)}),
]


@pytest.mark.parametrize("op, argument, wrong", REFUSED)
def test_bad_moves_are_refused(op, argument, wrong):
    arguments = {**DEFAULTS[op], **wrong}
    with pytest.raises(ContractError) as refusal:
        getattr(oracle, op)(**arguments)
    assert (refusal.value.op, refusal.value.argument) == (op, argument)
    assert not np.any(arguments.get("dst", 0)), "a refused call wrote"


mutations("copy_blocks", {
    "source and target swapped": ("blocks[target] = blocks[source]", "blocks[source] = blocks[target]"),
    "order ignored": ("if _independent(source, target):", "if True:"),
    "first pair only": ("in block_mapping:", "in block_mapping[:1]:"),
    "chains are independent": (" and not np.isin(source, target).any()", "", "_independent"),
})  # fmt: skip
mutations("swap_blocks", {
    "source and target swapped": ("target_blocks[target] = source_blocks[source]",
                                  "target_blocks[source] = source_blocks[target]"),
    "order ignored": ("if np.unique(target).size == target.size and not np.may_share_memory(src, dst):", "if True:"),
    "sharing ignored": (" and not np.may_share_memory(src, dst)", ""),
    "later pairs only": ("for read, write in block_mapping:", "for read, write in block_mapping[1:]:"),
})  # fmt: skip
mutations("swap_blocks_batch", {
    "offsets swapped": ("target[write : write + size] = source[read : read + size]",
                        "target[read : read + size] = source[write : write + size]"),
    "half of each range": ("target[write : write + size] = source[read : read + size]",
                           "target[write : write + size // 2] = source[read : read + size // 2]"),
    "last first": ("sizes.tolist())", "sizes.tolist()[::-1])"),
    "all from the original": ("_bytes_of(src), _bytes_of(dst)", "_bytes_of(src).copy(), _bytes_of(dst)"),
})  # fmt: skip
mutations("cp_gather_cache", {
    "starts ignored": ("cu_seq_lens, seq_starts, src", "cu_seq_lens, None, src"),
    "first request's table": ("block_table[request, page]", "block_table[0 * request, page]"),
    "pages in order": ("raw(src)[block_table[request, page], offset]", "raw(src)[page, offset]"),
    "positions from the batch's start": ("- bounds[request]", "", "places"),
    "dst rows beyond": ("raw(dst)[: request.size] =", "raw(dst)[-request.size :] ="),
})  # fmt: skip
