# SPDX-License-Identifier: Apache-2.0
"""By what a block of tokens is known: nobody without the secret can make two that are alike."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from freewheel.host.request import Request

DIGEST_BYTES = 16
DIGEST_HEAD = DIGEST_BYTES.to_bytes(4, "little")


class BlockNames(Protocol):
    """Keys of a request's blocks: equal if all tokens up to the one behind are, and only then."""

    def keys(self, request: Request) -> list[bytes]:
        """Of every block behind which the request has a certain token."""
        ...

    def endings(self, request: Request) -> list[bytes]:
        """Of the same blocks, what each is known by up to its last token."""
        ...

    def ending(self, request: Request, index: int) -> bytes:
        """The same of block `index`, behind which no token is certain."""
        ...


class HashedNames:
    """A block's key is a keyed hash of the key before it and of its own tokens, shifted by one; its
    ending the hash of all these but the last. Requests keep both.
    """

    def __init__(self, size: int, secret: bytes) -> None:
        """`size`: tokens of a block."""
        self._size, self._secret = size, secret

    def keys(self, request: Request) -> list[bytes]:
        size, keys = self._size, request.block_keys
        begun, count = len(keys), (request.known - 1) // size
        if count <= begun:
            return keys
        endings, secret = request.block_endings, self._secret
        first = begun * size + 1 if begun else 0
        tokens = _bytes_of(request.tokens(first, count * size + 1))
        before = keys[-1] if keys else request.cache_salt.encode()
        head, at = len(before).to_bytes(4, "little"), 0
        for end in range(8 * ((begun + 1) * size - first), len(tokens), 8 * size):
            state = blake2b(head + before + tokens[at:end], key=secret, digest_size=DIGEST_BYTES)
            endings.append(state.digest())
            at = end + 8
            state.update(tokens[end:at])
            before = state.digest()
            keys.append(before)
            head = DIGEST_HEAD
        return keys

    def endings(self, request: Request) -> list[bytes]:
        self.keys(request)
        return request.block_endings

    def ending(self, request: Request, index: int) -> bytes:
        before = self.keys(request)[index - 1] if index else request.cache_salt.encode()
        first = index * self._size
        tokens = request.tokens(first + 1 if index else 0, first + self._size)
        data = len(before).to_bytes(4, "little") + before + _bytes_of(tokens)
        return blake2b(data, key=self._secret, digest_size=DIGEST_BYTES).digest()


def _bytes_of(tokens: Sequence[int]) -> bytes:
    """Eight of each."""
    return struct.pack(f"{len(tokens)}q", *tokens)
