# SPDX-License-Identifier: Apache-2.0
"""POST /generate: SGLang's own, for prompts of text or of token ids, alone or several.

A stream repeats the whole answer so far in every event, as SGLang's does.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from freewheel.engine import Logprobs
from freewheel.server.choices import Choice
from freewheel.server.failures import ApiError
from freewheel.server.generation import Generation, Talk
from freewheel.server.handoff import handing_of
from freewheel.server.native import NativeRequest, Wanted, each, wanted_of
from freewheel.server.respond import Streamed, Whole, event
from freewheel.server.schema import Choices
from freewheel.server.scores import LOWEST
from freewheel.server.serving import Served, Serving
from freewheel.spec import FinishReason

router = APIRouter()

WEIGHTS = "default"
"""SGLang's version of weights that were never changed."""


@router.post("/generate")
async def generate(body: NativeRequest, serving: Served) -> Response:
    """Continue each prompt, `n` times."""
    prompts, several = await _prompts(body, serving)
    wanted = wanted_of(body, len(prompts))
    n = wanted[0].sampling.n or 1
    field = "text" if body.input_ids is None else "input_ids"
    for ids, one in zip(prompts, wanted, strict=True):
        limit = one.sampling.max_new_tokens
        names = f"{field} {one.where}.max_new_tokens"
        serving.check_room(ids, None if limit is None else max(limit, 1), names)
        for name in ("stop_token_ids", "logit_bias"):
            serving.check_ids(map(int, vars(one.sampling)[name] or ()), f"{one.where}.{name}")
        if one.start >= len(ids):
            message = f"logprob_start_len: {one.start}, but the prompt has {len(ids)} tokens"
            raise ApiError(400, message, param="logprob_start_len", code="invalid_value")
    structures = [one.structure(serving.tokenizer.control_tokens) for one in wanted]
    params = [one.params(form) for one, form in zip(wanted, structures, strict=True)]
    room = (body.bootstrap_host, body.bootstrap_port, body.bootstrap_room)
    handing = handing_of(
        Choices(n=n, bootstrap_host=room[0], bootstrap_port=room[1], bootstrap_room=room[2]),
        serving,
        len(prompts),
    )
    generation = serving.generate(
        [Talk(ids) for ids in prompts],
        params,
        n,
        structures,
        "\0".join(filter(None, (body.cache_salt, body.extra_key))),
        None if body.priority is None else -body.priority,
        handoff=handing.handoff,
    )
    ids = _request_ids(body, len(prompts), n)
    writer = _Writer(body, generation, serving, [one for one in wanted for _ in range(n)], ids)
    listed = several or n > 1
    if body.stream:
        return Streamed(generation, writer.events(listed))
    return Whole(generation, lambda: writer.whole(listed))


async def _prompts(body: NativeRequest, serving: Serving) -> tuple[list[list[int]], bool]:
    """Their ids, and whether they came as a list."""
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "text: give either text or input_ids", param="text")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        return [await serving.encode(one, "text") for one in texts], not isinstance(body.text, str)
    given: Any = body.input_ids
    several = isinstance(given[0], list)
    found = [list(one) for one in given] if several else [list(given)]
    for one in found:
        serving.check_ids(one, "input_ids")
    return found, several


def _request_ids(body: NativeRequest, count: int, n: int) -> list[str]:
    """One for each answer: the client's, numbered if it gave one for several."""
    if body.rid is None or n > 1:
        return [secrets.token_hex(16) for _ in range(count * n)]
    if isinstance(body.rid, str) and count > 1:
        return [f"{body.rid}_{place}" for place in range(count)]
    found = list(each("rid", body.rid, count))
    if len(set(found)) < len(found):
        raise ApiError(400, "rid: names two prompts alike", param="rid", code="invalid_value")
    return found


class _Writer:
    """Answers in SGLang's words, whole or in events."""

    def __init__(
        self,
        body: NativeRequest,
        generation: Generation,
        serving: Serving,
        wanted: Sequence[Wanted],
        ids: Sequence[str],
    ) -> None:
        """`wanted`, `ids`: one for each answer."""
        self._body, self._generation, self._serving = body, generation, serving
        self._wanted, self._ids = wanted, ids

    def whole(self, listed: bool) -> Any:
        found = [self._answer(choice) for choice in self._generation.choices]
        return found if listed else found[0]

    async def events(self, listed: bool) -> AsyncIterator[bytes]:
        async for part in self._generation.parts():
            found = self._answer(part.choice)
            yield event(found | {"index": part.choice.index} if listed else found)
        yield event(b"[DONE]")

    def _answer(self, choice: Choice) -> dict[str, Any]:
        alone = self._wanted[choice.index].sampling.max_new_tokens == 0
        found: dict[str, Any] = {
            "text": "" if alone else choice.text,
            "output_ids": [] if alone else choice.token_ids,
            "meta_info": self._about(choice, [] if alone else choice.token_ids),
        }
        if self._body.return_prompt_token_ids:
            found["prompt_token_ids"] = choice.prompt
        return found

    def _about(self, choice: Choice, tokens: Sequence[int]) -> dict[str, Any]:
        ticket, wanted = choice.ticket, self._wanted[choice.index]
        below = ticket.cached_host_tokens + ticket.cached_disk_tokens
        found: dict[str, Any] = {
            "id": self._ids[choice.index],
            "finish_reason": _finish(choice, len(tokens)),
            "prompt_tokens": len(choice.prompt),
            "weight_version": WEIGHTS,
        }
        if wanted.logprobs:
            found |= self._scores(choice, wanted, len(tokens))
        found |= {
            "reasoning_tokens": 0,
            "completion_tokens": len(tokens),
            "cached_tokens": ticket.cached_tokens,
            "cached_tokens_details": {
                "device": ticket.cached_tokens - below,
                "host": ticket.cached_host_tokens,
                "storage": ticket.cached_disk_tokens,
            },
        }
        if choice.finish is None:
            return found
        found["e2e_latency"] = time.perf_counter() - ticket.opened
        return found | _drafts(choice, len(tokens))

    def _scores(self, choice: Choice, wanted: Wanted, count: int) -> dict[str, Any]:
        """SGLang's: triples of log-probability, id and, if asked for, text."""
        start = len(choice.prompt) if wanted.start < 0 else wanted.start
        prompt = list(zip(choice.prompt, choice.prompt_logprobs or (), strict=False))[start:]
        own = choice.logprobs[:count]
        # of the first token that is asked for, SGLang gives none, wherever it stands
        first = [self._triple(None, token) for token, _ in prompt[:1]]
        rest = [one for _, one in prompt[1:] if one is not None]
        found: dict[str, Any] = {
            "input_token_logprobs": [*first, *map(self._chosen, rest)],
            "output_token_logprobs": [self._chosen(one) for one in own],
            "output_token_logprobs_length": len(own),
        }
        if wanted.top:
            found["input_top_logprobs"] = [*[None] * len(first), *map(self._top, rest)]
            found["output_top_logprobs"] = [self._top(one) for one in own]
        return found

    def _chosen(self, one: Logprobs) -> list[Any]:
        return self._triple(one.logprob, one.token_id)

    def _top(self, one: Logprobs) -> list[list[Any]]:
        return [self._triple(value, token) for token, value in one.top]

    def _triple(self, value: float | None, token: int) -> list[Any]:
        said = None
        if self._body.return_text_in_logprobs:
            said = self._serving.tokenizer.decode([token], False)
        return [None if value is None else max(value, LOWEST), token, said]


def _finish(choice: Choice, count: int) -> dict[str, Any] | None:
    """Why it ended, and at what; None while it goes on."""
    if choice.finish is None:
        return None
    if choice.finish is FinishReason.LENGTH or not count:
        return {"type": "length", "length": count}
    matched = choice.token_ids[-1] if choice.stopped_by is None else choice.stopped_by
    return {"type": "stop", "matched": matched}


def _drafts(choice: Choice, count: int) -> dict[str, Any]:
    """SGLang's figures of speculation, of rounds with drafts."""
    ticket = choice.ticket
    if not ticket.verified:
        return {}
    return {
        "spec_accept_rate": choice.accepted / ticket.drafted,
        "spec_accept_length": count / ticket.verified,
        "spec_num_correct_drafts": choice.accepted,
        "spec_num_proposed_drafts": ticket.drafted,
        "spec_verify_ct": ticket.verified,
    }
