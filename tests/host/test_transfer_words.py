# SPDX-License-Identifier: Apache-2.0
"""What other ranks read is what rank 0 wrote, every field of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freewheel.spec import BlockCopy, Transfer, Way
from freewheel.spec.filed import KEY_BYTES, Filed
from freewheel.spec.transfer_words import transfers_in, words_of

KEYS = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
SMALL = st.integers(0, 1 << 31)
FILED = st.builds(Filed, KEYS, KEYS, st.booleans())
PAGES = st.lists(st.lists(SMALL, max_size=3).map(tuple), max_size=5).map(tuple)
BLOCKS = st.builds(BlockCopy, SMALL, st.integers(0, (1 << 63) - 1), PAGES, st.none() | FILED)
TRANSFERS = st.builds(
    Transfer,
    SMALL,
    st.sampled_from(Way),
    st.lists(BLOCKS, max_size=4).map(tuple),
    st.lists(KEYS, max_size=3).map(tuple),
    SMALL,
)


@given(st.lists(TRANSFERS, max_size=5))
def test_transfers_come_through_numbers_of_64_bits(transfers: list[Transfer]) -> None:
    words = words_of(transfers)
    assert all(-(1 << 63) <= word < 1 << 63 for word in words)
    assert transfers_in(words) == transfers
