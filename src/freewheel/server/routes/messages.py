# SPDX-License-Identifier: Apache-2.0
"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from freewheel.chat import Ask, CallBegun, CallDelta, Content, Event, Message
from freewheel.server.choices import Call, Choice, Part
from freewheel.server.failures import ApiError
from freewheel.server.generation import Generation, Talk, Usage
from freewheel.server.respond import Streamed, Whole, event, json_response
from freewheel.server.routes.message_input import (
    Asked,
    MessagesRequest,
    calling_of_message,
    plain_text,
    turns_of,
)
from freewheel.server.routes.shapes import new_id
from freewheel.server.sampling import sampling_params
from freewheel.server.schema import Sampling
from freewheel.server.serving import Served, Serving
from freewheel.server.tools import (
    Calling,
)

router = APIRouter()


@router.post("/v1/messages")
async def messages(body: MessagesRequest, serving: Served) -> Response:
    """The next turn of a conversation."""
    model = serving.check_model(body.model)
    calling = calling_of_message(body)
    talk = await _conversation(body, serving, calling)
    asked = Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        thinking_token_budget=None if body.thinking is None else body.thinking.budget_tokens,
    )
    structure = serving.hold(calling, None, asked.thinking_token_budget is not None)
    params = sampling_params(asked, body.max_tokens, structure=structure)
    serving.check_room(talk.ids, body.max_tokens, "messages max_tokens")
    generation = serving.generate([talk], params, 1, structure)
    writer = _Writer(model, body.stop_sequences or [], generation)
    if body.stream:
        return Streamed(generation, writer.events(), anthropic=True)
    return Whole(generation, writer.whole)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: Asked, serving: Served) -> Response:
    """How long the prompt would be."""
    serving.check_model(body.model)
    talk = await _conversation(body, serving, calling_of_message(body))
    return json_response({"input_tokens": len(talk.ids)})


async def _conversation(body: Asked, serving: Serving, calling: Calling) -> Talk:
    thinking = body.thinking
    if thinking is not None and (thinking.type == "enabled") != (
        thinking.budget_tokens is not None
    ):
        raise ApiError(
            400,
            "thinking.budget_tokens: goes with type enabled, and only with it",
            param="thinking",
        )
    system = [] if body.system is None else [Message("system", plain_text(body.system))]
    turns = [one for turn in body.messages for one in turns_of(turn)]
    ask = Ask(
        thinking=thinking is not None and thinking.type != "disabled",
        effort=None if body.output_config is None else body.output_config.effort,
        tools=calling.offered,
        continues=body.messages[-1].role == "assistant",
    )
    return await serving.converse([*system, *turns], ask, calling)


class _Writer:
    """The answer's JSON, whole or in events."""

    def __init__(self, model: str, stops: Sequence[str], generation: Generation) -> None:
        self._generation = generation
        self._head = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": model}
        self._stops = stops
        self._block = -1
        self._kind = ""

    def whole(self) -> dict[str, Any]:
        (choice,) = self._generation.choices
        content: list[dict[str, Any]] = []
        if choice.thought:
            content.append({"type": "thinking", "thinking": choice.thoughts, "signature": ""})
        for block in choice.blocks:
            if isinstance(block, Call):
                content.append(_tool_use(block) | {"input": block.values})
            else:
                content.append({"type": "text", "text": block.text})
        if not choice.blocks:
            content.append(_EMPTY)
        usage = _usage(self._generation.usage)
        return self._head | {"content": content} | self._ending(choice) | {"usage": usage}

    async def events(self) -> AsyncIterator[bytes]:
        (choice,) = self._generation.choices
        usage = _usage(self._generation.usage) | {"output_tokens": 0}
        nothing = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _named({"type": "message_start", "message": self._head | nothing})
        async for part in self._generation.parts():
            for data in self._part_events(part):
                yield data
        if self._kind in ("", "thinking"):
            yield self._begin("text", _EMPTY)
        yield _named({"type": "content_block_stop", "index": self._block})
        usage = _usage(self._generation.usage)
        ending = {"delta": self._ending(choice), "usage": usage}
        yield _named({"type": "message_delta"} | ending)
        yield _named({"type": "message_stop"})

    def _part_events(self, part: Part) -> list[bytes]:
        found: list[bytes] = []
        if part.thought:
            if self._kind != "thinking":
                block = {"type": "thinking", "thinking": "", "signature": ""}
                found.append(self._begin("thinking", block))
            found.append(self._delta({"type": "thinking_delta", "thinking": part.thought}))
        for one in part.told.events:
            found += self._said(one, part.choice)
        return found

    def _said(self, one: Event, choice: Choice) -> list[bytes]:
        """One event of the answer. Text around calls gets blocks of its own."""
        if isinstance(one, CallBegun):
            block = _tool_use(choice.calls[one.index]) | {"input": {}}
            return [self._begin("tool_use", block)]
        if isinstance(one, CallDelta):
            return [self._delta({"type": "input_json_delta", "partial_json": one.text})]
        if not isinstance(one, Content):
            return []
        opening = [] if self._kind == "text" else [self._begin("text", _EMPTY)]
        return [*opening, self._delta({"type": "text_delta", "text": one.text})]

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _named({"type": "content_block_delta", "index": self._block, "delta": delta})

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        """Close the block before, if there is one, and open another."""
        closing = b""
        if self._block >= 0:
            closing = _named({"type": "content_block_stop", "index": self._block})
        self._block, self._kind = self._block + 1, kind
        opening = {"type": "content_block_start", "index": self._block, "content_block": block}
        return closing + _named(opening)

    def _ending(self, choice: Choice) -> dict[str, Any]:
        if choice.finish == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if choice.stopped_by is not None and choice.finish_reason != "tool_calls":
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stopped_by}
        called = choice.finish_reason == "tool_calls"
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


_EMPTY = {"type": "text", "text": ""}


def _tool_use(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{call.key}", "name": call.name}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "output_tokens": usage.completion,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
    }


def _named(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])
