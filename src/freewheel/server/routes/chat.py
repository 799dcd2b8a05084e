# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions: OpenAI's, with `reasoning_content` for models that think first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from freewheel.chat import Ask, Message, ToolCall
from freewheel.server.calls import call_deltas, call_objects
from freewheel.server.choices import Choice, Part
from freewheel.server.failures import ApiError
from freewheel.server.generation import Generation
from freewheel.server.handoff import handing_of
from freewheel.server.respond import Streamed, Whole, event
from freewheel.server.routes.shapes import new_id, now, usage_object
from freewheel.server.sampling import sampling_params
from freewheel.server.schema import Choices, Count, ShortText, Strict, Text, Usual
from freewheel.server.scores import chat_logprobs, prompt_object
from freewheel.server.serving import Served, Serving
from freewheel.server.structure import ResponseFormat, structure_of
from freewheel.server.tools import (
    MAX_CALLS,
    MAX_TOOLS,
    CalledTool,
    Calling,
    FunctionTool,
    ToolChoice,
    calling_of,
    choice_of,
)

router = APIRouter()

MAX_MESSAGES = 4096


class TextPart(Strict):
    """The only kind of content: there are no images, sounds or files here."""

    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[TextPart], Field(min_length=1, max_length=1024)]


class ChatMessage(Strict):
    """One turn. What an answer brought may be sent back as it came.

    Which thoughts of earlier turns the model sees is its encoding's business. `tool_call_id` goes
    with role `tool`, calls and thoughts with `assistant`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: ShortText | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: ShortText | None = None
    prefix: bool | None = Field(
        default=None,
        description="DeepSeek's, of the last turn, an assistant's: the answer is the rest of it. "
        "The same as `continue_final_message`.",
    )


def continues(messages: Sequence[ChatMessage], wanted: bool | None, opens: bool | None) -> bool:
    """Whether the answer goes on with the last turn; `wanted` and `opens` are vLLM's fields.

    Raises ApiError 400 if that is said twice and not alike, or of another turn.
    """
    marked = [place for place, turn in enumerate(messages) if turn.prefix]
    if any(place != len(messages) - 1 for place in marked):
        field = f"messages.{marked[0]}.prefix"
        raise ApiError(400, f"{field}: only the last turn can go on", param=field)
    if marked and wanted is False:
        raise ApiError(
            400, "continue_final_message: contradicts prefix of the last turn",
            param="continue_final_message",
        )  # fmt: skip
    found = bool(marked or wanted)
    if opens is not None and opens == found:
        message = "add_generation_prompt: the opposite of continue_final_message; leave it out"
        raise ApiError(400, message, param="add_generation_prompt")
    return found


class TemplateSettings(Strict):
    """Whether the model thinks first; both names are in use.

    `clear_thinking` false keeps thoughts of earlier turns, where the model's template has a choice.
    """

    thinking: bool | None = None
    enable_thinking: bool | None = None
    clear_thinking: bool | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Talked(Usual):
    """What a prompt is made of besides its messages."""

    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | Literal["none", "auto", "required"] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateSettings | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def calling(self) -> Calling:
        """The tools. Raises ApiError 400."""
        functions = [tool.function for tool in self.tools or []]
        return calling_of(functions, choice_of(self.tool_choice), self.parallel_tool_calls)

    def ask(self, calling: Calling, messages: Sequence[ChatMessage]) -> Ask:
        """What the encoding is asked for. Thinking is off unless asked for. Raises ApiError 400."""
        settings = self.chat_template_kwargs or TemplateSettings()
        effort = None if self.reasoning_effort == "none" else self.reasoning_effort
        said = [one for one in (settings.thinking, settings.enable_thinking) if one is not None]
        clear = settings.clear_thinking
        return Ask(
            thinking=said[0] if said else effort is not None,
            effort=effort,
            tools=calling.offered,
            keep_thoughts=None if clear is None else not clear,
            continues=continues(messages, self.continue_final_message, self.add_generation_prompt),
        )


class ChatRequest(Choices, Talked):
    """`max_completion_tokens` is OpenAI's new name for `max_tokens`; None runs to the end."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[Count, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    store: Literal[False] | None = None
    tags: Annotated[dict[ShortText, ShortText], Field(max_length=16)] | None = Field(
        default=None, alias="metadata"
    )
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, serving: Served) -> Response:
    """The next turn of a conversation, `n` times."""
    model = serving.check_model(body.model)
    body.check_stream()
    calling = body.calling()
    limit = body.max_completion_tokens
    if limit is not None and body.max_tokens not in (None, limit):
        raise ApiError(400, "max_tokens: contradicts max_completion_tokens", param="max_tokens")
    limit = body.max_tokens if limit is None else limit
    tokens = serving.tokenizer.control_tokens
    structure = structure_of(body.structured_outputs, body.response_format, tokens)
    structure = serving.hold(calling, structure, body.thinking_token_budget is not None)
    params = sampling_params(body, limit, {"logprobs": _logprobs(body)}, structure)
    talk = await serving.converse(
        as_messages(body.messages), body.ask(calling, body.messages), calling
    )
    field_name = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    serving.check_room(talk.ids, limit, f"messages {field_name}")
    handing = handing_of(body, serving)
    head = {"id": new_id("chatcmpl"), "created": now(), "model": model} | handing.told()
    asked = (params, body.n or 1, structure, body.cache_salt, body.priority)
    generation = serving.generate([talk], *asked, handoff=handing.handoff)
    writer = _Writer(head, body, generation, serving, talk.ids)
    if body.stream:
        return Streamed(generation, writer.events())
    return Whole(generation, writer.whole)


def as_messages(turns: Sequence[ChatMessage]) -> list[Message]:
    """The turns as the encoding takes them. Raises ApiError 400 for a field in a wrong turn."""
    return [_message(turn, f"messages.{place}") for place, turn in enumerate(turns)]


def _message(turn: ChatMessage, where: str) -> Message:
    answered = turn.role == "assistant"
    thoughts = turn.reasoning_content if turn.reasoning is None else turn.reasoning
    wrong = {
        "tool_calls": bool(turn.tool_calls) and not answered,
        "reasoning_content": thoughts is not None and not answered,
        "tool_call_id": (turn.tool_call_id is None) == (turn.role == "tool"),
        "content": turn.content is None and not (answered and turn.tool_calls),
    }
    for field_name, is_wrong in wrong.items():
        if is_wrong:
            field = f"{where}.{field_name}"
            message = f"{field}: missing, or not for a turn of role {turn.role}"
            raise ApiError(400, message, param=field, code="invalid_value")
    return Message(
        "system" if turn.role == "developer" else turn.role,
        "" if turn.content is None else plain(turn.content),
        thoughts,
        tuple(
            ToolCall(call.id, call.function.name, call.function.arguments)
            for call in turn.tool_calls or ()
        ),
        turn.tool_call_id,
    )


def plain(content: str | Sequence[TextPart]) -> str:
    """The text of a content, whichever way it was sent."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _logprobs(body: ChatRequest) -> int | None:
    """How many of the likeliest to report; None: not even the token's own."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs: true", param="top_logprobs")
    return None


class _Writer:
    """The answer's JSON, whole or in events."""

    def __init__(
        self,
        head: dict[str, Any],
        body: ChatRequest,
        generation: Generation,
        serving: Serving,
        prompt: list[int],
    ) -> None:
        self._head, self._body, self._generation = head, body, generation
        self._prompt, self._spelling = prompt, serving.spelling

    def whole(self) -> dict[str, Any]:
        found = self._head | {"object": "chat.completion"}
        found["choices"] = [self._choice(choice) for choice in self._generation.choices]
        found["usage"] = usage_object(self._generation.usage)
        if self._body.return_token_ids:
            found["prompt_token_ids"] = self._prompt
        scores = self._generation.choices[0].prompt_logprobs
        if scores is not None:
            found["prompt_logprobs"] = prompt_object(self._spelling, scores)
        return found

    async def events(self) -> AsyncIterator[bytes]:
        head = self._head | {"object": "chat.completion.chunk"}
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        always = options is not None and bool(options.continuous_usage_stats)
        role = {"role": "assistant", "content": ""}
        for choice in self._generation.choices:
            opening = {"index": choice.index, "delta": role, "logprobs": None}
            opened = head | {"choices": [opening | {"finish_reason": None}]}
            if self._body.return_token_ids:
                opened["prompt_token_ids"] = self._prompt
            yield event(opened)
        async for part in self._generation.parts():
            delta = self._delta(part)
            if self._says_nothing(delta):
                continue
            chunk = head | {"choices": [delta]}
            if always:
                chunk["usage"] = usage_object(self._generation.usage)
            elif with_usage:
                chunk["usage"] = None
            yield event(chunk)
        if with_usage:
            usage = usage_object(self._generation.usage)
            yield event(head | {"choices": [], "usage": usage})
        yield event(b"[DONE]")

    def _choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.thought:
            message |= _thoughts(choice.thoughts)
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": call_objects(choice)}
        found: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(self._spelling, choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stopped_by,
        }
        if self._body.return_token_ids:
            found["token_ids"] = choice.token_ids
        return found

    def _says_nothing(self, delta: dict[str, Any]) -> bool:
        """A round that brought nothing but markup, and of which nothing else was asked."""
        asked = self._body.return_token_ids or self._body.return_pieces or self._body.logprobs
        return not (asked or delta["delta"] or delta["finish_reason"])

    def _delta(self, part: Part) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if part.thought:
            delta |= _thoughts(part.thought)
        if part.said:
            delta["content"] = part.said
        calls = call_deltas(part)
        if calls:
            delta["tool_calls"] = calls
        found: dict[str, Any] = {
            "index": part.choice.index,
            "delta": delta,
            "logprobs": chat_logprobs(self._spelling, part.logprobs),
            "finish_reason": part.choice.finish_reason,
            "stop_reason": part.reading.stopped_by,
        }
        if self._body.return_token_ids:
            found["token_ids"] = part.reading.token_ids
        if self._body.return_pieces:
            found["pieces"] = part.said_pieces
            found["reasoning_pieces"] = part.thought_pieces
        return found


def _thoughts(text: str) -> dict[str, str]:
    """Both names are in use."""
    return {"reasoning_content": text, "reasoning": text}
