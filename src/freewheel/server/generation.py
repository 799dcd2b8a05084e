# SPDX-License-Identifier: Apache-2.0
"""The answers to one HTTP request: tickets at the engine, read as text as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from freewheel.chat import Parser
from freewheel.engine import Reader, Tokenizer
from freewheel.server.choices import Choice, Part
from freewheel.server.failures import ApiError
from freewheel.server.link import Link
from freewheel.server.sampling import for_choice
from freewheel.server.structure import Structure
from freewheel.server.tickets import Events, Ticket
from freewheel.server.wire import Step
from freewheel.spec import FinishReason, Handoff, SamplingParams

ABNORMAL = ("abort", "error")
"""Ends that nobody here asked for."""

UNKNOWN_FAULT = "its logits held NaN, or the request's bans and form left no token to choose"
"""Why an answer ends with an error of which the engine says no more."""


@dataclass(frozen=True)
class Talk:
    """A prompt that asks for the next turn, and how the answer is read.

    `start_of_thought` and `end_of_thought` as `Reader` takes them. `parser` makes what reads tool
    calls, if there may be any; `shown`: the control tokens that they are made of.
    """

    ids: list[int]
    end_of_thought: int | None = None
    start_of_thought: int | None = None
    parser: Callable[[], Parser | None] = lambda: None
    shown: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Terms:
    """How a request is served. `shows`: with what the prompt's last token picks. `handoff`: of the
    one prompt, which has one answer."""

    cache_salt: str = ""
    priority: int = 0
    shows: bool = False
    handoff: Handoff | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens of all choices; each prompt counts once. `cached` of the prompts' were
    not computed, since an earlier request had; of these `cached_host` came from host memory and
    `cached_disk` from files. `rejected`: drafts that did not count."""

    prompt: int
    cached: int
    completion: int
    thought: int
    accepted: int
    rejected: int
    cached_host: int = 0
    cached_disk: int = 0

    @property
    def tiers(self) -> dict[str, int]:
        """Cached tokens by where they were found."""
        below = self.cached_host + self.cached_disk
        return {
            "device": self.cached - below,
            "host": self.cached_host,
            "disk": self.cached_disk,
        }


class Generation:
    """`n` answers to each of `prompts`. Closing it ends at the engine whatever has not ended."""

    def __init__(
        self,
        link: Link,
        tokenizer: Tokenizer,
        prompts: Sequence[Talk],
        params: SamplingParams | Sequence[SamplingParams],
        n: int = 1,
        structure: Structure | Sequence[Structure | None] | None = None,
        *,
        terms: Terms = Terms(),
    ) -> None:
        """`params`, `structure`: of all prompts, or one for each.

        Raises ApiError: 503 without an engine, 429 if there is too much to do.
        """
        link.check_ready()
        self._prompt_tokens = sum(len(talk.ids) for talk in prompts)
        link.ledger.admit(n * self._prompt_tokens, n * len(prompts))
        self._link, self._n = link, n
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        self._structures = structure if isinstance(structure, Sequence) else [structure] * len(each)
        self._events: Events = asyncio.Queue()
        self.choices: list[Choice] = []
        self._by_id: dict[str, Choice] = {}
        self._first: Part | None = None
        for talk, wanted in zip(prompts, each, strict=True):
            for copy in range(n):
                own = for_choice(wanted, copy)
                given = (terms.cache_salt, terms.priority, terms.shows, terms.handoff)
                ticket = link.open(talk.ids, own, self._events, *given)
                thought = (talk.end_of_thought, talk.start_of_thought)
                reader = Reader(tokenizer, own, *thought, talk.shown)
                choice = Choice(len(self.choices), talk.ids, ticket, reader, talk.parser())
                self.choices.append(choice)
                self._by_id[ticket.id] = choice

    @property
    def usage(self) -> Usage:
        """So far."""
        accepted = sum(one.accepted for one in self.choices)
        firsts = [one.ticket for one in self.choices[:: self._n]]
        return Usage(
            prompt=self._prompt_tokens,
            cached=sum(one.cached_tokens for one in firsts),
            completion=sum(len(one.token_ids) for one in self.choices),
            thought=sum(one.reader.thought_tokens for one in self.choices),
            accepted=accepted,
            rejected=sum(one.ticket.drafted for one in self.choices) - accepted,
            cached_host=sum(one.cached_host_tokens for one in firsts),
            cached_disk=sum(one.cached_disk_tokens for one in firsts),
        )

    async def begin(self) -> None:
        """Wait for the first token: until then a refusal still has a status of its own."""
        self._first = await self._next()

    async def parts(self) -> AsyncIterator[Part]:
        """Everything that comes, up to the last finish. Raises ApiError if a choice is lost."""
        while True:
            if self._first is not None:
                part, self._first = self._first, None
            elif all(choice.finish is not None for choice in self.choices):
                return
            else:
                part = await self._next()
            yield part

    async def finish(self) -> None:
        """Wait for all choices to end."""
        async for _ in self.parts():
            pass

    def close(self) -> None:
        self._link.close([choice.ticket for choice in self.choices])

    async def _next(self) -> Part:
        while True:
            ticket, event = await self._event()
            choice = self._by_id[ticket.id]
            if isinstance(event, ApiError):
                structure = self._structures[choice.index // self._n]
                raise event if structure is None else structure.blamed(event)
            if choice.finish is None:
                return self._read(choice, event)

    async def _event(self) -> tuple[Ticket, Step | ApiError]:
        """The next event, within the time that a request may wait for its first token."""
        waiting = [one.ticket.opened for one in self.choices if one.ticket.waits]
        if not waiting:
            return await self._events.get()
        budget = self._link.settings.queue_seconds
        left = min(waiting) + budget - time.perf_counter()
        try:
            return await asyncio.wait_for(self._events.get(), max(left, 0.0))
        except TimeoutError:
            raise ApiError(
                429,
                f"no token came within {budget:g} s: the server is busy",
                code="queue_timeout",
                retry_after=5,
            ) from None

    def _read(self, choice: Choice, step: Step) -> Part:
        if step.finish in ABNORMAL:
            raise ApiError(
                500,
                f"the engine could not go on with this answer: {step.fault or UNKNOWN_FAULT}",
                code="engine_error",
            )
        finish = None if step.finish is None else FinishReason(step.finish)
        reading = choice.reader.push(step.tokens, step.accepted, finish)
        told = choice.add(reading)
        logprobs = (step.logprobs or ())[: len(reading.token_ids)]
        choice.logprobs += logprobs
        if step.prompt_logprobs is not None:
            choice.prompt_logprobs = step.prompt_logprobs
        choice.picks = step.picks or choice.picks
        if choice.finish is not None and finish is None:
            self._link.close([choice.ticket], FinishReason.STOP)
        return Part(choice, reading, told, logprobs)
