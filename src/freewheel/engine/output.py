# SPDX-License-Identifier: Apache-2.0
"""What a request gets back, whole or in pieces."""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.spec.picks import PickedLayers
from freewheel.spec.sampling import FinishReason


@dataclass(frozen=True, slots=True)
class Arrival:
    """What one letter brought a request: `tokens` new ones, `seconds` after it was queued.

    The clock is read when the host has the letter, which may be some rounds after it was written.
    `drafted` drafts were verified in that round; the first `accepted` tokens were such drafts.
    """

    seconds: float
    tokens: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Metrics:
    """Counts and seconds of one request.

    `arrivals`: one for each round that decided at least one token, the one that ended the prompt
    included. `cached_tokens` of the prompt's were not computed, because an earlier request had;
    `cached_host_tokens` of these came from host memory, `cached_disk_tokens` from files.
    `drafted` drafts were verified in all, `accepted` of those became output.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted: int
    accepted: int
    first_token_seconds: float
    total_seconds: float
    arrivals: tuple[Arrival, ...]
    form: str | None = None
    """Where the answer was held to its form: "device" (a table) or "host" (masks), or None."""
    cached_host_tokens: int = 0
    cached_disk_tokens: int = 0

    @property
    def rounds(self) -> int:
        """Rounds that decided at least one token."""
        return len(self.arrivals)

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens decided in a round; 1 without drafts. 0 for a request that decided none."""
        return self.completion_tokens / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class Piece:
    """A stretch of text, whether its token was an accepted draft, and that token's place among the
    answer's."""

    text: str
    accepted: bool
    place: int


@dataclass(frozen=True)
class Logprobs:
    """Log-probability of a token by the model's own logits, and of the likeliest tokens there.

    `top`: as many as were asked for, likeliest first: (token id, log-probability).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Chunk:
    """What one round added to a stream. Joined texts equal the whole output's text."""

    pieces: tuple[Piece, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    metrics: Metrics | None
    """Set on the last chunk."""
    logprobs: tuple[Logprobs, ...] | None = None
    """One for each of `token_ids`, if asked for."""
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    """Set on the last chunk, if asked for: one for each prompt token; None for the first."""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True)
class Output:
    """A finished request. A stop token that ended it is the last of `token_ids`, not in `text`.

    `logprobs`: one for each of `token_ids`. `prompt_logprobs`: one for each prompt token, None for
    the first, which nothing precedes. Both are None unless asked for. `reasoning`: what a model
    that `LLM.chat` lets think thought before the text, if it did; `token_ids` are those of both.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    metrics: Metrics
    logprobs: tuple[Logprobs, ...] | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    reasoning: str | None = None


@dataclass(frozen=True)
class Selection:
    """What the indexers select for the last token of a text, to choose the token behind it.

    `picks`: of each of `of.layers`, the keys that it picks, ascending; a layer without an indexer
    attends to the picks of the nearest one below that has one. `of.tokens` says which tokens a key
    stands for: V3.2's key k is token k, an entry of V4 is several. `token_id`: the model's own
    greedy choice behind the text.
    """

    of: PickedLayers
    picks: tuple[tuple[int, ...], ...]
    token_id: int


def joined(chunks: list[Chunk]) -> Output:
    """The output that all chunks of an answer make."""
    last = chunks[-1]
    assert last.finish_reason is not None and last.metrics is not None
    return Output(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        finish_reason=last.finish_reason,
        metrics=last.metrics,
        logprobs=None if last.logprobs is None else _joined_logprobs(chunks),
        prompt_logprobs=last.prompt_logprobs,
    )


def _joined_logprobs(chunks: list[Chunk]) -> tuple[Logprobs, ...]:
    return tuple(one for chunk in chunks for one in chunk.logprobs or ())
