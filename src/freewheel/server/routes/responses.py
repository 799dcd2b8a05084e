# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses: OpenAI's, without a memory: nothing is stored or can be continued."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from freewheel.chat import Message
from freewheel.server.generation import Generation
from freewheel.server.respond import Streamed, Whole, event
from freewheel.server.routes.chat import MAX_MESSAGES
from freewheel.server.routes.shapes import new_id, now
from freewheel.server.sampling import sampling_params
from freewheel.server.schema import Count, Priority, Sampling, ShortText, Strict, Text
from freewheel.server.serving import Served
from freewheel.server.structure import structure_of_format

router = APIRouter()


class InputText(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


class InputMessage(Strict):
    """A turn; also an answer's message, sent back as it came."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[InputText], Field(min_length=1, max_length=1024)]
    id: ShortText | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class Reasoning(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: None = None


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Strict):
    format: TextFormat | None = None
    verbosity: None = None


class ResponsesRequest(Strict):
    """`store` must not be true, and nothing that a store would remember can be named."""

    model: ShortText | None = None
    input: Text | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    reasoning: Reasoning | None = None
    text: TextSettings | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    user: ShortText | None = None
    cache_salt: ShortText | None = None
    priority: Priority | None = None
    tags: Annotated[dict[ShortText, ShortText], Field(max_length=16)] | None = Field(
        default=None, alias="metadata"
    )
    service_tier: Literal["auto", "default"] | None = None


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, serving: Served) -> Response:
    """An answer to an input."""
    model = serving.check_model(body.model)
    structure = None
    if body.text is not None and body.text.format is not None:
        wanted = body.text.format
        structure = structure_of_format(wanted.type, wanted.schema_, "text.format")
    asked = Sampling(temperature=body.temperature, top_p=body.top_p)
    params = sampling_params(asked, body.max_output_tokens, structure=structure)
    effort = None if body.reasoning is None else body.reasoning.effort
    prompt = await serving.converse(_turns(body), effort not in (None, "none"))
    serving.check_room(prompt.ids, body.max_output_tokens, "input max_output_tokens")
    generation = serving.generate(
        [prompt.ids],
        params,
        1,
        prompt.end_of_thought,
        structure,
        body.cache_salt,
        body.priority,
    )
    writer = _Writer(model, body, generation)
    if body.stream:
        return Streamed(generation, writer.events())
    return Whole(generation, writer.ended)


def _turns(body: ResponsesRequest) -> list[Message]:
    system = [] if body.instructions is None else [Message("system", body.instructions)]
    if isinstance(body.input, str):
        return [*system, Message("user", body.input)]
    turns = [
        Message("system" if one.role == "developer" else one.role, _plain(one.content))
        for one in body.input
    ]
    return [*system, *turns]


def _plain(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class _Writer:
    """The answer's JSON, whole or in numbered events."""

    def __init__(self, model: str, body: ResponsesRequest, generation: Generation) -> None:
        self._model, self._body, self._generation = model, body, generation
        self._id, self._created = new_id("resp"), now()
        self._message_id, self._thought_id = new_id("msg"), new_id("rs")
        self._number = -1

    def ended(self) -> dict[str, Any]:
        """The whole response, complete or cut at its limit."""
        (choice,) = self._generation.choices
        cut = choice.finish == "length"
        found = self._object("incomplete" if cut else "completed")
        if choice.thought:
            found["output"].append(self._thought_item(choice.thoughts))
        found["output"].append(
            self._message_item(choice.text, "incomplete" if cut else "completed")
        )
        if cut:
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = self._generation.usage
        found["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.thought},
            "total_tokens": usage.prompt + usage.completion,
        }
        return found

    async def events(self) -> AsyncIterator[bytes]:
        begun = self._object("in_progress")
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        thinking = speaking = False
        async for part in self._generation.parts():
            if part.thought:
                if not thinking:
                    thinking = True
                    yield self._open_thought()
                yield self._at(
                    "response.reasoning_text.delta", 0, self._thought_id, delta=part.thought
                )
            if part.said:
                if not speaking:
                    yield self._close_thought() if thinking else b""
                    speaking = True
                    yield self._open_message(int(thinking))
                place = int(thinking)
                yield self._text("response.output_text.delta", place, delta=part.said)
        if not speaking:
            yield self._close_thought() if thinking else b""
            yield self._open_message(int(thinking))
        yield self._close_message(int(thinking))
        found = self.ended()
        yield self._event(f"response.{found['status']}", response=found)

    def _open_thought(self) -> bytes:
        item = self._thought_item("") | {"content": []}
        return self._event("response.output_item.added", output_index=0, item=item)

    def _close_thought(self) -> bytes:
        text = self._generation.choices[0].thoughts
        done = self._at("response.reasoning_text.done", 0, self._thought_id, text=text)
        item = self._thought_item(text)
        return done + self._event("response.output_item.done", output_index=0, item=item)

    def _open_message(self, place: int) -> bytes:
        item = self._message_item("", "in_progress") | {"content": []}
        added = self._event("response.output_item.added", output_index=place, item=item)
        return added + self._at(
            "response.content_part.added", place, self._message_id, part=_part("")
        )

    def _close_message(self, place: int) -> bytes:
        (choice,) = self._generation.choices
        status = "incomplete" if choice.finish == "length" else "completed"
        done = self._text("response.output_text.done", place, text=choice.text)
        part = _part(choice.text)
        done += self._at("response.content_part.done", place, self._message_id, part=part)
        item = self._message_item(choice.text, status)
        return done + self._event("response.output_item.done", output_index=place, item=item)

    def _text(self, kind: str, place: int, **fields: Any) -> bytes:
        return self._at(kind, place, self._message_id, logprobs=[], **fields)

    def _at(self, kind: str, place: int, item_id: str, **fields: Any) -> bytes:
        where = {"item_id": item_id, "output_index": place, "content_index": 0}
        return self._event(kind, **where, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number} | fields, kind)

    def _thought_item(self, text: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}]
        return {"id": self._thought_id, "type": "reasoning", "summary": [], "content": content}

    def _message_item(self, text: str, status: str) -> dict[str, Any]:
        head = {"id": self._message_id, "type": "message", "role": "assistant", "status": status}
        return head | {"content": [_part(text)]}

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
            "parallel_tool_calls": bool(body.parallel_tool_calls),
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": _format(body)},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _format(body: ResponsesRequest) -> dict[str, Any]:
    wanted = None if body.text is None else body.text.format
    return {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
