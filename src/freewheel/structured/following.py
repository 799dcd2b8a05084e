# SPDX-License-Identifier: Apache-2.0
"""Grammars that are no table: what llguidance reads, and the mask behind each answer.

Needs llguidance (the extra `structured`). Runs in the processes of `worker` and `guide_worker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from freewheel.structured.schema import Refusal

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=500_000,
    step_max_items=100_000,
    max_lexer_states=100_000,
    max_grammar_size=500_000,
)
"""What compiling a grammar and making one mask may take, in llguidance's units: under 0.1 s."""

SPACES = r"[ ]?"
"""Between the parts of JSON by a schema: as in tables."""

PRETTY = r"[\x20\x0A\x0D\x09]{0,40}"
"""Between the parts of JSON without one: also lines with indents, but not without end."""


class _Vocabulary:
    """A vocabulary as llguidance asks for one. Control tokens, and the end, are no text."""

    bos_token_id = None

    def __init__(self, vocabulary: Sequence[bytes | None]) -> None:
        self.eos_token_id = len(vocabulary)  # an end of its own: requests name theirs themselves
        self.tokens = [
            b"\xff<|%d|>" % index if token is None else token
            for index, token in enumerate([*vocabulary, None])
        ]
        self.special_token_ids = [n for n, token in enumerate([*vocabulary, None]) if token is None]
        self._bytes = {token: n for n, token in enumerate(vocabulary) if token and len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        raw = text.encode() if isinstance(text, str) else text
        return [self._bytes[raw[n : n + 1]] for n in range(len(raw))]


def tokenizer_of(vocabulary: Sequence[bytes | None]) -> LLTokenizer:
    """llguidance's view of a vocabulary; its end of text is the id behind the last."""
    return LLTokenizer(TokenizerWrapper(_Vocabulary(vocabulary)))


def source_of(kind: str, source: str) -> str:
    """What llguidance makes of a wish, as its matcher takes it. Raises Refusal if it cannot."""
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_spaced(PRETTY))
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    try:
        if kind == "grammar":
            return LLMatcher.grammar_from_lark(any_to_lark(source))
        return LLMatcher.grammar_from_json_schema(source, overrides=_spaced(SPACES))
    except (ValueError, IndexError) as error:
        raise Refusal(f"cannot be read: {error}") from error


def _spaced(pattern: str) -> JsonCompileOptions:
    return cast("JsonCompileOptions", {"whitespace_pattern": pattern})


def matcher_of(source: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Follows one answer. Raises Refusal if the grammar is wrong, or takes more than LIMITS."""
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise Refusal(f"cannot be turned into a grammar: {_first_line(matcher)}")
    return matcher


def _first_line(matcher: LLMatcher) -> str:
    """What went wrong; the lines behind it describe the parser."""
    return matcher.get_error().strip().split("\n", 1)[0][:200]


def mask_of(matcher: LLMatcher, stop_ids: Sequence[int], size: int) -> bytes:
    """A bit for each of `size` tokens, in whole int32 words: those that may follow, and the stops.

    Raises Refusal if there is none: a limit was passed, or nothing may follow at all.
    """
    bits = bytearray(4 * ((size + 31) // 32))
    found = matcher.compute_bitmask()
    kept = min(len(found), len(bits))
    bits[:kept] = found[:kept]
    if size % 32:
        bits[size // 8] &= ~(1 << size % 8)  # llguidance's own end
    if matcher.is_error():
        raise Refusal(f"cannot be followed: {_first_line(matcher)}")
    if matcher.is_accepting():
        for stop in stop_ids:
            bits[stop // 8] |= 1 << stop % 8
    if not any(bits):
        raise Refusal("allows no text that this model's tokens spell")
    return bytes(bits)
