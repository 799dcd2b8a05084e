# SPDX-License-Identifier: Apache-2.0
"""Tokens of one answer to text, for whoever gets tokens from a `TokenEngine`."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial

from freewheel.engine.output import Piece
from freewheel.engine.tokenizer import Tokenizer
from freewheel.host import TextDelta, TextStream
from freewheel.spec import FinishReason, SamplingParams

Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class Reading:
    """What some tokens add to an answer.

    `thought` and `said` are the text before and behind the mark that ends thinking. `token_ids`
    are those that count: the ones behind a stop string do not. `accepted` of them were drafts.
    `finish` is set on the last reading; `stopped_by` too, if a stop string ended the answer. `cut`:
    one did, and whoever makes the tokens does not know it.
    """

    thought: Pieces
    said: Pieces
    token_ids: tuple[int, ...]
    accepted: int
    finish: FinishReason | None
    cut: bool
    stopped_by: str | None = None


class Reader:
    """The text of one request: joined, it is what `LLM.stream` gives.

    `end_of_thought`: the token behind which the answer begins, if the prompt opened thinking, or if
    the answer may open it with `start_of_thought`. Neither has text. Stop strings are looked for in
    thoughts and in the answer, each by itself. `shown`: special tokens whose text is kept whatever
    the request says of special tokens, because markup is made of them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        end_of_thought: int | None = None,
        start_of_thought: int | None = None,
        shown: Set[int] = frozenset(),
    ) -> None:
        if shown and params.skip_special_tokens:
            self._decode = partial(tokenizer.decode_with, shown)
        else:
            self._decode = partial(tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        self._params = params
        self._mark = end_of_thought
        self._opening = start_of_thought
        self._count = 0  # output tokens so far
        self._base = 0  # of them, those before the present stretch of text
        self._text = self._new_text()
        self.thought_tokens = 0
        """Tokens of thinking so far, the mark that ends it included."""

    def push(
        self, tokens: Sequence[int], accepted: int, finish: FinishReason | None = None
    ) -> Reading:
        """Add tokens, the first `accepted` of which were drafts. A stop token has no text."""
        drafts = range(self._count, self._count + accepted)
        body = list(tokens[:-1] if finish is FinishReason.STOP else tokens)
        lead = self._opened(body) if self._opening is not None and body else 0
        body = body[lead:]
        thought: Pieces = ()
        if self._mark in body:  # not if it is None
            place = body.index(self._mark)
            delta = self._feed(body[:place], ends=True)
            thought = self._pieces(delta, drafts)
            if delta.stopped:
                return self._reading(tokens, drafts, finish, delta, thought, ())
            self._base = self._count + lead + place + 1
            self.thought_tokens = self._base
            self._mark, self._text, body = None, self._new_text(), body[place + 1 :]
        delta = self._feed(body, ends=finish is not None)
        if self._mark is not None:
            self.thought_tokens = self._base + delta.tokens_used
            return self._reading(tokens, drafts, finish, delta, self._pieces(delta, drafts), ())
        said = self._pieces(delta, drafts)
        return self._reading(tokens, drafts, finish, delta, thought, said)

    def _opened(self, body: list[int]) -> int:
        """How many of the first tokens open thinking: one or none."""
        opens = body[0] == self._opening
        self._opening = None
        if not opens:
            self._mark = None
            return 0
        self._base += 1
        return 1

    def _feed(self, body: list[int], ends: bool) -> TextDelta:
        delta = self._text.push(body)
        if delta.stopped or not ends:
            return delta
        rest = self._text.flush()
        text, pieces = delta.text + rest.text, delta.pieces + rest.pieces
        return TextDelta(text, pieces, rest.stopped, rest.tokens_used, rest.stopped_by)

    def _reading(
        self,
        tokens: Sequence[int],
        drafts: range,
        finish: FinishReason | None,
        delta: TextDelta,
        thought: Pieces,
        said: Pieces,
    ) -> Reading:
        kept = tuple(tokens)
        if delta.stopped:
            kept = kept[: self._base + delta.tokens_used - self._count]
        self._count += len(kept)
        ended = FinishReason.STOP if delta.stopped else finish
        cut = delta.stopped and finish is None
        accepted = min(len(drafts), len(kept))
        return Reading(thought, said, kept, accepted, ended, cut, delta.stopped_by)

    def _pieces(self, delta: TextDelta, drafts: range) -> Pieces:
        places = ((text, self._base + at) for text, at in delta.pieces)
        return tuple(Piece(text, at in drafts, at) for text, at in places)

    def _new_text(self) -> TextStream:
        params = self._params
        minimum = max(0, params.min_tokens - self._base)
        return TextStream(self._decode, params.stops, params.include_stop_str_in_output, minimum)
