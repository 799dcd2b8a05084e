# SPDX-License-Identifier: Apache-2.0
"""The forms that an answer can be held to: OpenAI's `response_format`, vLLM's own field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from freewheel.errors import RequestError
from freewheel.server.failures import ApiError
from freewheel.server.schema import ShortText, StopText, Strict, StructuredOutputs, Text
from freewheel.structured import Tag, tag_tree

MAX_TAGS = 128

FIELDS = ("json_schema", "regex", "choice", "json_object", "grammar", "calls")
"""SamplingParams' names of what a client names otherwise."""


@dataclass(frozen=True)
class Structure:
    """One form, as fields of SamplingParams. `field`: what the client called it."""

    field: str
    wanted: Mapping[str, Any]

    def blamed(self, error: ApiError) -> ApiError:
        """The same error in the client's words."""
        if error.param not in FIELDS:
            return error
        message = error.message.replace(error.param, self.field, 1)
        return ApiError(error.status, message, param=self.field, code=error.code or "invalid_value")


class NamedSchema(Strict):
    """`strict` changes nothing: a schema is kept exactly, or refused."""

    name: ShortText | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TagOf(Strict):
    """`begin`, JSON of `schema`, `end`."""

    begin: StopText
    schema_: dict[str, Any] = Field(alias="schema")
    end: StopText


class ResponseFormat(Strict):
    """OpenAI's, of a chat; and vLLM's and SGLang's `structural_tag`: free text, in which what
    begins with the trigger is one of the structures."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: Annotated[NamedSchema, Field()] | None = None
    structures: Annotated[list[TagOf], Field(max_length=MAX_TAGS)] | None = None
    triggers: Annotated[list[StopText], Field(max_length=MAX_TAGS)] | None = None

    def tags(self) -> tuple[list[Tag], list[str]] | None:
        """What is asked of tags; None if nothing is. Raises ApiError 400."""
        wanted = self.type == "structural_tag"
        for name in ("structures", "triggers"):
            if (vars(self)[name] is not None) != wanted:
                raise ApiError(
                    400,
                    f"response_format.{name}: goes with type structural_tag, and only with it",
                    param=f"response_format.{name}",
                    code="invalid_value",
                )
        if self.structures is None or self.triggers is None:
            return None
        return [Tag(one.begin, one.schema_, one.end) for one in self.structures], self.triggers


def structure_of_tags(
    tags: Sequence[Tag], triggers: Sequence[str], tokens: Mapping[str, int], field: str
) -> Structure:
    """The form of text with tags in it. `tokens`: the control tokens. Raises ApiError 400."""
    try:
        return Structure(field, {"calls": tag_tree(tags, triggers, tokens)})
    except RequestError as error:
        param = f"{field}.{error.field}"
        raise ApiError(400, f"{field}.{error}", param=param, code="invalid_value") from error


def structure_of_format(
    kind: str, schema: Mapping[str, Any] | None, field: str
) -> Structure | None:
    """What a format of OpenAI's asks for. Raises ApiError 400 if it says too little or too much."""
    if kind == "json_schema":
        if schema is None:
            raise ApiError(400, f"{field}: json_schema needs a schema", param=field)
        return Structure(field, {"json_schema": schema})
    if schema is not None:
        raise ApiError(400, f"{field}: a schema needs type json_schema, not {kind}", param=field)
    return Structure(field, {"json_object": True}) if kind == "json_object" else None


def structure_of(
    asked: StructuredOutputs | None,
    response_format: ResponseFormat | None = None,
    tokens: Mapping[str, int] | None = None,
) -> Structure | None:
    """The form that a request asks for, or None. `tokens`: the control tokens.

    Raises ApiError 400 for more than one.
    """
    found: Structure | None = None
    tags = None if response_format is None else response_format.tags()
    if tags is not None:
        found = structure_of_tags(*tags, tokens or {}, "response_format")
    elif response_format is not None:
        named = response_format.json_schema
        schema = None if named is None else named.schema_
        found = structure_of_format(response_format.type, schema, "response_format")
    if asked is None:
        return found
    given = {
        "json": asked.json_,
        "regex": asked.regex,
        "choice": asked.choice,
        "grammar": asked.grammar,
        "json_object": asked.json_object,
    }
    given = {name: value for name, value in given.items() if value not in (None, False)}
    if len(given) + (found is not None) > 1:
        raise ApiError(
            400,
            "structured_outputs: more than one form is asked for; give one",
            param="structured_outputs",
        )
    for name, value in given.items():
        kept = tuple(value) if isinstance(value, list) else value
        wanted = {"json_schema" if name == "json" else name: kept}
        return Structure(f"structured_outputs.{name}", wanted)
    return found
