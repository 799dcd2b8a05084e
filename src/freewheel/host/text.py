# SPDX-License-Identifier: Apache-2.0
"""Text out of tokens as they come: whole characters only, and cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

REPLACEMENT = "\ufffd"
LONGEST_PREFIX = 3
"""Bytes of a character that may be here while the rest is still to come."""


class Decode(Protocol):
    """The text of token ids: their bytes joined, then read as UTF-8 with U+FFFD for what is not.

    That is byte-level BPE, with tokens left out (`skip_special_tokens`) or not. Decoders that
    look at neighbours otherwise (that strip a leading space, or join pieces with spaces) will not
    do: their text is not a function of the joined bytes.
    """

    def __call__(self, ids: Sequence[int], /) -> str: ...


@dataclass(frozen=True)
class TextDelta:
    """What one push, or the flush, adds.

    `pieces` split `text` by the tokens that completed it: (text, index of the token in the whole
    output). Text held back by an earlier push comes with that push's token. `stopped`: a stop
    string is complete, and nothing follows. `tokens_used`: output tokens that count so far, up to
    and including the one that completed the stop string.
    """

    text: str
    pieces: tuple[tuple[str, int], ...]
    stopped: bool
    tokens_used: int
    stopped_by: str | None = None
    """That stop string."""


class Characters:
    """Turns tokens into characters, none of them half.

    Keeps the few last tokens that may hold the beginning of a character, so the price of a token
    does not depend on how many came before. UTF-8 makes that exact: after a text that does not
    end in U+FFFD the next byte begins a character, and where it does, only the last U+FFFD can
    still change, and it stands for three bytes at most.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that have been returned

    def push(self, token: int) -> str:
        """The characters that `token` completes."""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            fresh = text[self._given :]
            self._window, self._given = [], 0
            return fresh
        fresh = text[self._given : -1]
        self._given = len(text) - 1
        if len(self._window) > LONGEST_PREFIX:
            self._shorten()
        return fresh

    def flush(self) -> str:
        """What is left: U+FFFD for a character that was never completed, or nothing."""
        rest = self._decode(self._window)[self._given :] if self._window else ""
        self._window, self._given = [], 0
        return rest

    def _shorten(self) -> None:
        """Keep the tokens that hold the last three bytes; those without text hold none."""
        tokens = [token for token in self._window if self._decode([token])]
        self._window = tokens[-LONGEST_PREFIX:]
        self._given = len(self._decode(self._window)) - 1


class TextStream:
    """The text of one request's output.

    The text given so far, with what `flush` gives, is `decode` of all tokens, or of it what comes
    before the first stop string (`include_stop`: up to its end). First is the one that is
    complete first, and among those that end together the longest; so the cut does not depend on
    how tokens or pushes divide the text. Only a tail that may still become a stop string is held
    back. A stop string that is complete before `min_tokens` tokens are there does not count.
    """

    def __init__(
        self,
        decode: Decode,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._characters = Characters(decode)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held: list[tuple[str, int]] = []
        self._used = 0
        self._stopped = False
        self._stopped_by: str | None = None

    def push(self, tokens: Sequence[int]) -> TextDelta:
        """Add output tokens. Those behind a complete stop string are dropped."""
        pieces: list[tuple[str, int]] = []
        for token in tokens:
            if self._stopped:
                break
            self._used += 1
            pieces += self._accept(self._characters.push(token))
        return self._delta(pieces)

    def flush(self) -> TextDelta:
        """The end of the output: what was held back, and U+FFFD for an unfinished character."""
        pieces: list[tuple[str, int]] = []
        if not self._stopped:
            pieces = [*self._accept(self._characters.flush()), *self._held]
            self._held = []
        return self._delta(pieces)

    def _delta(self, pieces: list[tuple[str, int]]) -> TextDelta:
        text = "".join(piece for piece, _ in pieces)
        return TextDelta(text, tuple(pieces), self._stopped, self._used, self._stopped_by)

    def _accept(self, text: str) -> list[tuple[str, int]]:
        """Add the latest token's text; return the pieces that are certain now."""
        if not text:
            return []
        before = sum(len(piece) for piece, _ in self._held)
        self._held.append((text, self._used - 1))
        buffer = "".join(piece for piece, _ in self._held)
        if self._used >= self._min_tokens:
            found = self._first_stop(buffer, before)
            if found is not None:
                self._stopped, self._stopped_by = True, buffer[found[0] : found[1]]
                given = self._split(found[1] if self._include_stop else found[0])
                self._held = []
                return given
        return self._split(len(buffer) - self._possible_start(buffer))

    def _first_stop(self, buffer: str, before: int) -> tuple[int, int] | None:
        """Start and end of the first stop string that ends after `before` characters."""
        found: list[tuple[int, int]] = []
        for stop in self._stop:
            start = buffer.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                found.append((start, start + len(stop)))
        return min(found, key=lambda span: (span[1], span[0]), default=None)

    def _possible_start(self, buffer: str) -> int:
        """Length of the longest tail with which some stop string begins."""
        longest = min(len(buffer), max((len(stop) for stop in self._stop), default=1) - 1)
        for length in range(longest, 0, -1):
            tail = buffer[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def _split(self, length: int) -> list[tuple[str, int]]:
        """Take the first `length` held characters."""
        given: list[tuple[str, int]] = []
        rest: list[tuple[str, int]] = []
        for piece, index in self._held:
            head, tail = piece[:length], piece[length:]
            length -= len(head)
            given += [(head, index)] if head else []
            rest += [(tail, index)] if tail else []
        self._held = rest
        return given
