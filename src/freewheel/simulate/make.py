# SPDX-License-Identifier: Apache-2.0
"""Made-up traces: conversations of several turns that share system prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from freewheel.errors import ConfigError
from freewheel.simulate.trace import BLOCK, Call, Trace

NAMESPACE = 1 << 20
"""Block ids of one conversation: more than any has."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """`conversations` begin at random over `seconds`, each with one of `systems` prompts of
    `system_tokens`. A turn adds about `user_tokens`, and is answered by about `answer_tokens`; the
    next one comes about `pause` seconds after. `block`: tokens of a hash id."""

    conversations: int = 200
    turns: int = 5
    systems: int = 4
    system_tokens: int = 1024
    user_tokens: int = 200
    answer_tokens: int = 150
    seconds: float = 600.0
    pause: float = 20.0
    block: int = BLOCK
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("conversations", "turns", "systems", "user_tokens", "answer_tokens", "block"):
            if vars(self)[name] < 1:
                raise ConfigError(f"{name}: must be at least 1, got {vars(self)[name]}")
        for name in ("system_tokens", "seconds", "pause"):
            if vars(self)[name] < 0:
                raise ConfigError(f"{name}: must be 0 or more, got {vars(self)[name]}")


def make(asked: Made) -> Trace:
    """The trace. The same options give the same one."""
    rng = random.Random(asked.seed)
    calls: list[Call] = []
    for number in range(asked.conversations):
        calls += _conversation(asked, number, rng)
    return Trace(tuple(sorted(calls, key=lambda call: call.arrival)), asked.block)


def _conversation(asked: Made, number: int, rng: random.Random) -> Iterator[Call]:
    """Its tokens are one stream; every turn is a longer beginning of it."""
    system = rng.randrange(asked.systems)
    shared = asked.system_tokens // asked.block
    now, length = rng.uniform(0, asked.seconds), asked.system_tokens
    for _ in range(asked.turns):
        length += _about(asked.user_tokens, rng)
        answer = _about(asked.answer_tokens, rng)
        blocks = tuple(
            (system if index < shared else asked.systems + number) * NAMESPACE + index
            for index in range(-(-(length + answer) // asked.block))
        )
        yield Call(now, length, answer, blocks)
        length += answer
        now += rng.expovariate(1 / asked.pause) if asked.pause else 0.0


def _about(mean: int, rng: random.Random) -> int:
    """From half to one and a half times as much, evenly."""
    return max(1, rng.randint(mean - mean // 2, mean + mean // 2))
