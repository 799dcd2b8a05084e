# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in the shapes of OpenAI's two older endpoints."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from freewheel.engine import Logprobs, Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say. vLLM's."""


class Spelling:
    """What single tokens say."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._bytes = tokenizer.token_bytes(vocab_size)

    def said(self, token: int) -> bytes | None:
        """Its bytes in a text; None for a control token."""
        return self._bytes[token]

    def name(self, token: int) -> str:
        """Its text. Parts of a character are OpenAI's `bytes:\\xf0\\x9f`."""
        said = self._bytes[token]
        if said is None:
            return self._tokenizer.decode([token], skip_special_tokens=False)
        try:
            return said.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in said)

    def whole(self, token: int) -> bytes:
        """Its bytes, a control token's being those of its name."""
        said = self._bytes[token]
        return self.name(token).encode() if said is None else said


class Offsets:
    """Where tokens begin in a text, in characters. One of several in a character begins with it."""

    def __init__(self, spelling: Spelling, start: int, names: bool) -> None:
        """`names`: whether control tokens stand in the text."""
        self._spelling, self._at, self._names = spelling, start, names
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token: int) -> int:
        """Of the token behind the last one."""
        return self._advance(token, self._names)

    def next_in(self, text: str, token: int) -> int:
        """The same in a known text, where some control tokens stand and a begin token may not."""
        return self._advance(token, text.startswith(self._spelling.name(token), self._at))

    def _advance(self, token: int, named: bool) -> int:
        begin, said = self._at, self._spelling.said(token)
        if said is None:
            said = self._spelling.whole(token) if named else b""
        self._at += len(self._decoder.decode(said))
        return begin


def completion_logprobs(
    spelling: Spelling,
    tokens: Sequence[int],
    scores: Sequence[Logprobs | None],
    offsets: Sequence[int],
) -> dict[str, list[Any]]:
    """OpenAI's shape for completions. A prompt's first token has no score."""
    return {
        "tokens": [spelling.name(token) for token in tokens],
        "token_logprobs": [None if one is None else _finite(one.logprob) for one in scores],
        "top_logprobs": [None if one is None else _by_name(spelling, one) for one in scores],
        "text_offset": list(offsets),
    }


def joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Two stretches of a text as one."""
    return {key: first[key] + second[key] for key in first}


def chat_logprobs(spelling: Spelling, scores: Sequence[Logprobs]) -> dict[str, Any] | None:
    """OpenAI's shape for chats; None if there is no token."""
    if not scores:
        return None
    content = [
        _entry(spelling, one.token_id, one.logprob)
        | {"top_logprobs": [_entry(spelling, token, value) for token, value in one.top]}
        for one in scores
    ]
    return {"content": content, "refusal": None}


def prompt_object(
    spelling: Spelling, scores: Sequence[Logprobs | None]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token, by id; the prompt's own token first.

    `rank` is None for a token that is not among the likeliest that were asked for.
    """
    return [None if one is None else _by_id(spelling, one) for one in scores]


def _by_id(spelling: Spelling, one: Logprobs) -> dict[str, Any]:
    ranks = {token: place for place, (token, _) in enumerate(one.top, 1)}
    values = {one.token_id: one.logprob} | dict(one.top)
    return {
        str(token): {
            "logprob": _finite(value),
            "rank": ranks.get(token),
            "decoded_token": spelling.name(token),
        }
        for token, value in values.items()
    }


def _by_name(spelling: Spelling, one: Logprobs) -> dict[str, float]:
    """The token itself is in it, likely or not."""
    pairs = [*one.top, (one.token_id, one.logprob)]
    found: dict[str, float] = {}
    for token, value in pairs:
        found.setdefault(spelling.name(token), _finite(value))
    return found


def _entry(spelling: Spelling, token: int, logprob: float) -> dict[str, Any]:
    said = spelling.whole(token)
    return {"token": spelling.name(token), "logprob": _finite(logprob), "bytes": list(said)}


def _finite(value: float) -> float:
    return max(value, LOWEST)
