"""The generators under the draws against published vectors and Python integers."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab.oracle import random_bits

from .harness import checks
from .scalar_bits import GOLDEN, LONG, WORD, philox, splitmix, unsplitmix, words_of

U64 = np.uint64
QUICK = settings(max_examples=50, deadline=None, derandomize=True)


def ours(seed: int, offset: int) -> tuple[int, ...]:
    return tuple(int(w[0]) for w in random_bits.philox4x32(np.array([seed % LONG], U64), np.array([offset], U64)))


@checks("random_sample")
def test_splitmix64_gives_the_published_stream():
    """The first outputs of the reference implementation from state 1234567."""
    want = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    state = np.array([(1234567 + i * GOLDEN) % LONG for i in range(5)], U64)
    assert random_bits.splitmix64(state).tolist() == want == [splitmix(int(s)) for s in state]
    assert [unsplitmix(w) for w in want] == state.tolist()


@checks("gumbel_sample")
def test_philox_gives_the_published_words():
    """Random123's known answers; those with a 128-bit counter hold for the scalar form that ours is compared with."""
    ones = WORD - 1
    assert philox((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8) == ours(0, 0)
    assert philox((ones,) * 2, (ones,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    digits = (0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(*digits) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@checks("gumbel_sample")
@QUICK
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, LONG - 1))
def test_philox_against_python_integers(seed, offset):
    assert ours(seed, offset) == words_of(seed, offset)


@checks("random_sample")
@QUICK
@given(st.integers(0, LONG - 1))
def test_splitmix64_against_python_integers(counter):
    found = random_bits.splitmix64(np.array([counter, (counter + 1) % LONG], U64))
    assert found.tolist() == [splitmix(counter), splitmix(counter + 1)]
    assert unsplitmix(int(found[0])) == counter


@checks("gumbel_sample")
def test_philox_broadcasts_its_keys_over_its_counters():
    seeds, offsets = np.array([[3], [2**40]], U64), np.array([0, 1, 2**33], U64)
    words = random_bits.philox4x32(seeds, offsets)
    assert all(w.shape == (2, 3) for w in words)
    for (r, seed), (c, offset) in ((a, b) for a in enumerate((3, 2**40)) for b in enumerate((0, 1, 2**33))):
        assert tuple(int(w[r, c]) for w in words) == words_of(seed, offset)
