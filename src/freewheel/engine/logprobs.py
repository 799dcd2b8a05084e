# SPDX-License-Identifier: Apache-2.0
"""Scores as letters bring them, into what a request asked for."""

from __future__ import annotations

from freewheel.engine.output import Logprobs
from freewheel.host import Request
from freewheel.spec import TokenScore


def token_logprobs(request: Request, start: int, count: int) -> tuple[Logprobs, ...] | None:
    """Of `count` output tokens from `start` on; None if the request did not ask."""
    most = request.params.logprobs
    if most is None:
        return None
    stop = start + count
    pairs = zip(request.output[start:stop], request.scores[start:stop], strict=True)
    return tuple(_logprobs(token, score, most) for token, score in pairs)


def prompt_logprobs(request: Request) -> tuple[Logprobs | None, ...] | None:
    """Of the prompt's tokens, as far as it was computed; None if the request did not ask."""
    most = request.params.prompt_logprobs
    if most is None:
        return None
    pairs = zip(request.prompt[1:], request.echo, strict=False)
    return (None, *(_logprobs(token, score, most) for token, score in pairs))


def _logprobs(token: int, score: TokenScore, most: int) -> Logprobs:
    top = tuple(pair for pair in score.top[:most] if pair[0] >= 0)
    return Logprobs(token, score.logprob, top)
