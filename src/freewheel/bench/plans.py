# SPDX-License-Identifier: Apache-2.0
"""What is to be measured, checked before anything is loaded: this file needs no PyTorch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freewheel.config import EngineConfig, room_for
from freewheel.errors import ConfigError, RequestError
from freewheel.spec import SamplingParams

if TYPE_CHECKING:
    from freewheel.engine import LLM

WARM, COUNTED = 4, 5
"""Rounds before those that are timed, and rounds of the pass that counts."""

UNLIMITED = 1 << 49
"""Bytes of cache: every row's whole context has its pages, or memory runs out and says so."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The same requests for every engine: request i has the i-th prompt and the seed `seed + i`.

    `texts`: prompts, taken in turn until there are `requests`. Without them prompts are
    `prompt_tokens` random token ids, drawn from `seed`; no text looks like that, so what drafts
    gain on them says little. Every answer has `max_tokens` tokens: end-of-sequence ids do not end
    it. Raises RequestError if a field is out of range.
    """

    requests: int
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    prompt_tokens: int = 64
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_tokens"):
            if vars(self)[name] < 1:
                raise RequestError(name, f"must be at least 1, got {vars(self)[name]}")
        self.params(self.max_tokens)

    @property
    def source(self) -> str:
        """Where the prompts come from, in words."""
        if self.texts:
            return f"{len(self.texts)} given texts in turn"
        return f"{self.prompt_tokens} random token ids each, seed {self.seed}"

    def params(self, max_tokens: int) -> list[SamplingParams]:
        return [
            SamplingParams(
                temperature=self.temperature,
                seed=self.seed + number,
                max_tokens=max_tokens,
                ignore_eos=True,
            )
            for number in range(self.requests)
        ]

    def prompts(self, llm: LLM) -> list[list[int]]:
        """Token ids. Raises RequestError if a whole answer does not fit behind one of them."""
        if self.texts:
            encoded = [llm.tokenizer.encode_prompt(text) for text in self.texts]
            prompts = list(itertools.islice(itertools.cycle(encoded), self.requests))
        else:
            rng, vocabulary = random.Random(self.seed), llm.spec.vocab_size
            prompts = [
                [rng.randrange(vocabulary) for _ in range(self.prompt_tokens)]
                for _ in range(self.requests)
            ]
        longest = max(map(len, prompts))
        if longest + self.max_tokens > llm.context_len:
            raise RequestError(
                "max_tokens",
                f"a prompt of {longest} tokens and {self.max_tokens} of answer exceed the context "
                f"of {llm.context_len}; lower max_tokens or the prompt, or raise context_len",
            )
        return prompts


def plan_runs(
    model: str, batches: Sequence[int], depths: Sequence[int], **options: Any
) -> list[EngineConfig]:
    """One engine for each batch and number of drafts. Raises ConfigError for an invalid option."""
    for name, values in (("batch", batches), ("speculate", depths)):
        if not values:
            raise ConfigError(f"{name}: needs at least one number")
    for batch in batches:
        if batch < 1:
            raise ConfigError(f"batch: must be at least 1, got {batch}")
    return [
        EngineConfig(
            model=model,
            max_batch=batch,
            prefill_batch=min(2, batch),
            speculate=depth,
            prefix_cache=False,  # prompts come again, and each is to be computed
            **options,
        )
        for batch in batches
        for depth in depths
    ]


@dataclass(frozen=True, kw_only=True)
class DecodeBench:
    """What is measured. `accept`: tokens that a round decides of each row on average; None leaves
    the drafts to the model. `slow_hosts`: milliseconds that the host sleeps in every turn; each
    batch is measured at each.

    Raises ConfigError, naming the option, if one is out of range or contradicts another.
    """

    model: str
    batches: tuple[int, ...]
    context: int = 4096
    speculate: int = 3
    accept: float | None = None
    rounds: int = 50
    slow_hosts: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        if not self.batches:
            raise ConfigError("batch: needs at least one number")
        for name, value in (("context", self.context), ("rounds", self.rounds)):
            if value < 1:
                raise ConfigError(f"{name}: must be at least 1, got {value}")
        if not self.slow_hosts or not all(0 <= ms <= 10_000 for ms in self.slow_hosts):
            raise ConfigError(f"slow_host: must be 0 to 10000 milliseconds, got {self.slow_hosts}")
        if self.accept is not None and not 1 <= self.accept <= 1 + self.speculate:
            raise ConfigError(
                f"accept: must be 1 to {1 + self.speculate}, one token and the drafts of a round, "
                f"got {self.accept:g}"
            )

    @property
    def longest_run(self) -> int:
        """Rounds from where the rows are put."""
        return WARM + max(self.rounds, COUNTED)

    def config(self, **options: Any) -> EngineConfig:
        """The engine that is measured. Raises ConfigError for an invalid option."""
        room = room_for(self.longest_run, self.speculate)
        return EngineConfig(
            model=self.model,
            speculate=self.speculate,
            max_batch=max(self.batches),
            prefill_batch=1,
            chunk=16,
            context_len=self.context + room,
            cache_bytes=UNLIMITED,
            prefix_cache=False,  # rows are placed by hand, and hold nothing worth finding
            **options,
        )
