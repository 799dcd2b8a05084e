# SPDX-License-Identifier: Apache-2.0
"""Transfers as numbers, each of 64 bits with a sign, for ranks that are told of them.

a transfer    id, copy, way, how many blocks, how many keys
its blocks    slot, label, 1 if filed; then key, parent and 1 if latest; groups, and for each:
              how many pages, and the pages
its keys      of blocks whose files are to be removed
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

from freewheel.spec.filed import Filed
from freewheel.spec.transfer import BlockCopy, Transfer, Way

_KEY = struct.Struct("<2q")
_WAYS = tuple(Way)


def words_of(transfers: Iterable[Transfer]) -> list[int]:
    """What `transfers_in` reads."""
    words: list[int] = []
    for one in transfers:
        words += (one.id, one.replica, _WAYS.index(one.way), len(one.blocks), len(one.gone))
        for copy in one.blocks:
            words += _block_words(copy)
        for key in one.gone:
            words += _KEY.unpack(key)
    return words


def transfers_in(words: Sequence[int]) -> list[Transfer]:
    """What `words_of` wrote."""
    found: list[Transfer] = []
    rest = iter(words)
    for number in rest:
        replica, way, blocks, gone = (next(rest) for _ in range(4))
        copies = tuple(_block(rest) for _ in range(blocks))
        keys = tuple(_key(rest) for _ in range(gone))
        found.append(Transfer(number, _WAYS[way], copies, keys, replica))
    return found


def _block_words(copy: BlockCopy) -> list[int]:
    words = [copy.slot, copy.label, int(copy.filed is not None)]
    if copy.filed is not None:
        own = copy.filed
        words += (*_KEY.unpack(own.key), *_KEY.unpack(own.parent), int(own.latest))
    words.append(len(copy.pages))
    for pages in copy.pages:
        words += (len(pages), *pages)
    return words


def _block(words: Iterator[int]) -> BlockCopy:
    slot, label, filed = next(words), next(words), None
    if next(words):
        filed = Filed(_key(words), _key(words), next(words) == 1)
    groups = next(words)
    pages = tuple(tuple(next(words) for _ in range(next(words))) for _ in range(groups))
    return BlockCopy(slot, label, pages, filed)


def _key(words: Iterator[int]) -> bytes:
    return _KEY.pack(next(words), next(words))
