# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses: OpenAI's, without a memory: nothing is stored or can be continued."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from freewheel.chat import Ask, CallBegun, CallDelta, Content, Event
from freewheel.server.choices import Call, Said
from freewheel.server.generation import Generation
from freewheel.server.respond import Streamed, Whole, event
from freewheel.server.routes.items import Block, Thoughts, id_of, item_of, text_part
from freewheel.server.routes.response_input import (
    ResponsesRequest,
    calling_of_response,
    turns_of,
)
from freewheel.server.routes.shapes import new_id, now
from freewheel.server.sampling import sampling_params
from freewheel.server.schema import Sampling, Strict
from freewheel.server.serving import Served
from freewheel.server.structure import structure_of_format

router = APIRouter()


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, serving: Served) -> Response:
    """An answer to an input."""
    model = serving.check_model(body.model)
    structure = None
    if body.text is not None and body.text.format is not None:
        wanted = body.text.format
        structure = structure_of_format(wanted.type, wanted.schema_, "text.format")
    calling = calling_of_response(body)
    structure = serving.hold(calling, structure)
    asked = Sampling(temperature=body.temperature, top_p=body.top_p)
    params = sampling_params(asked, body.max_output_tokens, structure=structure)
    effort = None if body.reasoning is None else body.reasoning.effort
    effort = None if effort == "none" else effort
    ask = Ask(thinking=effort is not None, effort=effort, tools=calling.offered)
    talk = await serving.converse(turns_of(body), ask, calling, "input")
    serving.check_room(talk.ids, body.max_output_tokens, "input max_output_tokens")
    asked = (params, 1, structure, body.cache_salt, body.priority)
    generation = serving.generate([talk], *asked)
    writer = _Writer(model, body, generation)
    if body.stream:
        return Streamed(generation, writer.events())
    return Whole(generation, writer.ended)


class _Writer:
    """The answer's JSON, whole or in numbered events."""

    def __init__(self, model: str, body: ResponsesRequest, generation: Generation) -> None:
        self._model, self._body, self._generation = model, body, generation
        self._id, self._created = new_id("resp"), now()
        self._thought = Thoughts(new_id("rs"))
        self._nothing = Said()
        self._number = -1
        self._open: Block | None = None
        self._place = -1

    def ended(self) -> dict[str, Any]:
        """The whole response, complete or cut at its limit."""
        (choice,) = self._generation.choices
        cut = choice.finish == "length"
        found = self._object("incomplete" if cut else "completed")
        blocks: list[Block] = list(choice.blocks or [self._nothing])
        if choice.thought:
            self._thought.text = choice.thoughts
            blocks.insert(0, self._thought)
        found["output"] = [item_of(one, self._status(one)) for one in blocks]
        if cut:
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = self._generation.usage
        found["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {
                "cached_tokens": usage.cached,
                "cached_tokens_by_tier": usage.tiers,
            },
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.thought},
            "total_tokens": usage.prompt + usage.completion,
        }
        return found

    async def events(self) -> AsyncIterator[bytes]:
        begun = self._object("in_progress")
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        (choice,) = self._generation.choices
        async for part in self._generation.parts():
            if part.thought:
                yield self._turn_to(self._thought)
                self._thought.text += part.thought
                yield self._at("response.reasoning_text.delta", delta=part.thought)
            blocks = iter(choice.blocks[len(choice.blocks) - part.told.begun :])
            for one in part.told.events:
                yield self._said(one, blocks)
        if not choice.blocks:
            yield self._turn_to(self._nothing)
        yield self._close()
        found = self.ended()
        yield self._event(f"response.{found['status']}", response=found)

    def _said(self, one: Event, blocks: Iterator[Said | Call]) -> bytes:
        """One event of the answer. `blocks`: those that this round began, in their order."""
        if isinstance(one, CallBegun):
            return self._turn_to(next(blocks))
        if isinstance(one, CallDelta):
            return self._item_event("response.function_call_arguments.delta", delta=one.text)
        if not isinstance(one, Content):
            return b""
        opening = b"" if isinstance(self._open, Said) else self._turn_to(next(blocks))
        return opening + self._at("response.output_text.delta", delta=one.text, logprobs=[])

    def _turn_to(self, block: Block) -> bytes:
        """Close the item before, if there is one, and open another."""
        if block is self._open:
            return b""
        closing = self._close()
        self._open, self._place = block, self._place + 1
        item = item_of(block, "in_progress", empty=True)
        added = self._event("response.output_item.added", output_index=self._place, item=item)
        if isinstance(block, Said):
            added += self._at("response.content_part.added", part=text_part(""))
        return closing + added

    def _close(self) -> bytes:
        block = self._open
        if block is None:
            return b""
        self._open = None
        item = item_of(block, self._status(block))
        done = self._finished(block, item["id"])
        return done + self._event("response.output_item.done", output_index=self._place, item=item)

    def _finished(self, block: Block, item_id: str) -> bytes:
        where = {"item_id": item_id, "output_index": self._place}
        if isinstance(block, Call):
            kind = "response.function_call_arguments.done"
            return self._event(kind, **where, name=block.name, arguments=block.arguments)
        where["content_index"] = 0
        if isinstance(block, Thoughts):
            return self._event("response.reasoning_text.done", **where, text=block.text)
        done = self._event("response.output_text.done", **where, text=block.text, logprobs=[])
        part = text_part(block.text)
        return done + self._event("response.content_part.done", **where, part=part)

    def _status(self, block: Block) -> str:
        """Of an item that has ended: the last one may have been cut."""
        (choice,) = self._generation.choices
        if isinstance(block, Call):
            return "completed" if block.whole else "incomplete"
        cut = choice.finish == "length" and (not choice.blocks or block is choice.blocks[-1])
        return "incomplete" if cut else "completed"

    def _at(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        return self._event(kind, item_id=id_of(self._open), output_index=self._place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number} | fields, kind)

    def _object(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.tags or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": _format(body)},
            "tool_choice": _choice(body),
            "tools": [tool.model_dump() for tool in body.tools or []],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _format(body: ResponsesRequest) -> dict[str, Any]:
    wanted = None if body.text is None else body.text.format
    return {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)


def _choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    return choice.model_dump() if isinstance(choice, Strict) else choice or "auto"
