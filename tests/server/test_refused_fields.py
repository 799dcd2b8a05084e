# SPDX-License-Identifier: Apache-2.0
"""Fields that clients of others send and that are refused: each says why, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from freewheel.server.invalid import refusal_of
from freewheel.server.native import NativeRequest, NativeSampling
from freewheel.server.routes.chat import ChatRequest
from freewheel.server.routes.completions import CompletionRequest
from freewheel.server.routes.message_input import MessagesRequest
from freewheel.server.routes.response_input import ResponsesRequest
from freewheel.spec.elsewhere import requests
from freewheel.spec.elsewhere.fixed import ABSENT, ONE_VALUE, reason_of

HI = [{"role": "user", "content": "Hi"}]
LEAST: dict[type[BaseModel], dict[str, Any]] = {
    ChatRequest: {"messages": HI},
    CompletionRequest: {"prompt": "Hi"},
    ResponsesRequest: {"input": "Hi"},
    MessagesRequest: {"model": "demo", "max_tokens": 4, "messages": HI},
    NativeRequest: {"text": "Hi"},
}
NATIVE_NAMES = requests.NATIVE
CHAT, RESPONSES, NATIVE = ChatRequest, ResponsesRequest, NativeRequest


def refused(kind: type[BaseModel], **more: Any) -> tuple[str, str]:
    """The path and the message of the refusal."""
    with pytest.raises(ValidationError) as error:
        kind.model_validate({**LEAST[kind], **more})
    found = refusal_of(error.value.errors(), kind)
    return found.param or "", found.message


def inside(kind: Any) -> Iterator[type[BaseModel]]:
    """The models that a type is made of, itself included."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
        for field in kind.model_fields.values():
            yield from inside(field.annotation)
    for one in get_args(kind):
        yield from inside(one)


def narrow(kind: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    """Fields that take one value alone beside None, and a value that they do not take."""
    for name, field in kind.model_fields.items():
        ways = get_args(field.annotation) or (field.annotation,)
        rest = [one for one in ways if one is not NoneType]
        if get_origin(field.annotation) is Literal:
            continue  # which kind of object it is
        values = [value for one in rest if get_origin(one) is Literal for value in get_args(one)]
        if not rest or (len(values) == 1 and len(rest) == 1):
            yield field.alias or name, "another" if not values else not values[0]


@pytest.mark.parametrize("kind", LEAST)
def test_every_field_of_one_value_says_why_and_what_to_do(kind: type[BaseModel]) -> None:
    own = dict(narrow(kind))
    for name, value in own.items():
        path, message = refused(kind, **{name: value})
        assert path == name and message.endswith(f"; {ONE_VALUE[name]}"), message
    deep = {name for model in inside(kind) for name, _ in narrow(model)}
    assert set(own) <= deep and deep - {"type"} <= set(ONE_VALUE)


def test_what_is_absent_says_why_too() -> None:
    for name, why in ABSENT.items():
        for kind in (ChatRequest, ResponsesRequest, MessagesRequest):
            if name not in kind.model_fields:
                assert refused(kind, **{name: []}) == (
                    name,
                    f"{name}: is not a field that this server knows; {why}",
                )
    assert reason_of([]) == "" and reason_of(["tools", "3", "type"]) == ONE_VALUE["tools.type"]


@pytest.mark.parametrize("field", NATIVE_NAMES)
def test_a_field_of_the_other_endpoints_is_told_the_one_of_generate(field: str) -> None:
    path, message = refused(NATIVE, **{field: "a"})
    assert path == field and message.endswith(f"; use {NATIVE_NAMES[field]}"), message
    first, _, inside = NATIVE_NAMES[field].split()[0].rstrip(",").partition(".")
    assert first in NativeRequest.model_fields
    assert not inside or inside in NativeSampling.model_fields


def test_a_seed_among_sampling_parameters_is_told_its_name() -> None:
    assert refused(NATIVE, sampling_params={"seed": 3})[1].endswith("; use sampling_seed")


def test_names_of_a_caller_are_taken_as_user_is() -> None:
    named = {"user": "a", "safety_identifier": "b", "prompt_cache_key": "c"}
    for kind in (ChatRequest, ResponsesRequest):
        assert kind.model_validate({**LEAST[kind], **named}).model_fields_set >= set(named)


FLAT = {"type": "function", "name": "f"}
DEEP = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("kind", "choice", "path", "cure"),
    [
        (CHAT, FLAT, "tool_choice.name", "use function.name"),
        (
            CHAT,
            {"type": "allowed_tools", "mode": "auto", "tools": [FLAT]},
            "tool_choice.mode",
            "use allowed_tools.mode",
        ),
        (
            CHAT,
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [FLAT]}},
            "tool_choice.allowed_tools.tools.0.name",
            "use function.name",
        ),
        (
            CHAT,
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            "tool_choice.allowed_tools.tools",
            "must not be empty",
        ),
        (RESPONSES, DEEP, "tool_choice.function", "use name"),
        (
            RESPONSES,
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [DEEP]}},
            "tool_choice.allowed_tools",
            "use mode and tools",
        ),
        (
            RESPONSES,
            {"type": "allowed_tools", "mode": "auto", "tools": [DEEP]},
            "tool_choice.tools.0.function",
            "use name",
        ),
        (CHAT, {"type": "web_search"}, "tool_choice", "function or allowed_tools"),
        (RESPONSES, "maybe", "tool_choice", "none, auto or required"),
        (CHAT, 3, "tool_choice", "none, auto or required"),
    ],
)
def test_a_choice_of_tools_in_another_endpoints_shape_is_told_its_own(
    kind: type[BaseModel], choice: Any, path: str, cure: str
) -> None:
    found, message = refused(kind, tool_choice=choice)
    assert found == path and cure in message, message


@pytest.mark.parametrize(
    ("kind", "field", "value", "path"),
    [
        *((NATIVE, name, [], name) for name in ("text", "rid", "sampling_params")),
        *((NATIVE, name, [], name) for name in ("return_logprob", "top_logprobs_num")),
        (NATIVE, "logprob_start_len", [], "logprob_start_len"),
        (NATIVE, "input_ids", [], "input_ids"),
        (NATIVE, "input_ids", [[]], "input_ids.0"),
        (NATIVE, "input_ids", [[1], []], "input_ids.1"),
        (CompletionRequest, "prompt", [], "prompt"),
        (CompletionRequest, "prompt", [[1], []], "prompt.1"),
        (CHAT, "messages", [], "messages"),
        (CHAT, "messages", [{"role": "user", "content": []}], "messages.0.content"),
        (RESPONSES, "input", [], "input"),
    ],
)
def test_an_empty_list_is_refused_for_being_empty(
    kind: type[BaseModel], field: str, value: Any, path: str
) -> None:
    assert refused(kind, **{field: value}) == (path, f"{path}: must not be empty")


def test_a_path_holds_no_names_of_types() -> None:
    assert refused(NATIVE, return_logprob="maybe")[0] == "return_logprob"
