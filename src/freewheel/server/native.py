# SPDX-License-Identifier: Apache-2.0
"""The body of SGLang's own `/generate`, in its words, and what it asks of the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, StringConstraints

from freewheel.errors import RequestError
from freewheel.server.failures import ApiError
from freewheel.server.schema import (
    MAX_CHOICES,
    MAX_PROMPTS,
    Count,
    IdText,
    Port,
    Priority,
    Room,
    ShortText,
    StopText,
    Strict,
    Text,
    TokenId,
    TokenIds,
)
from freewheel.server.structure import ResponseFormat, Structure, structure_of_tags
from freewheel.spec import SamplingParams
from freewheel.structured import Tag

T = TypeVar("T")
Each = T | Annotated[list[T], Field(min_length=1, max_length=MAX_PROMPTS)]
"""One for all prompts, or one for each."""

ANY_OBJECT = "$$ANY$$"
"""SGLang's schema of any JSON object."""
DEFAULT_MAX_TOKENS = 128
"""SGLang's."""
OURS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
"""SamplingParams' names of fields that SGLang calls otherwise."""
_FORMS = {"json_schema": "json_schema", "regex": "regex", "ebnf": "grammar"}
_ALIKE = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "skip_special_tokens"),
)


class NativeSampling(Strict):
    """SGLang's sampling parameters. Those that are null have their defaults."""

    max_new_tokens: Count | None = DEFAULT_MAX_TOKENS
    min_new_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=8)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    no_stop_trim: bool | None = None
    logit_bias: (
        Annotated[dict[IdText, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)]
        | None
    ) = None
    sampling_seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    json_schema: Text | None = None
    regex: Annotated[str, StringConstraints(max_length=1 << 16)] | None = None
    ebnf: Text | None = None
    structural_tag: Text | None = None
    stop_regex: None = None
    custom_params: None = None


class NativeRequest(Strict):
    """`text` or `input_ids`: one prompt, or several, whose answers come as a list.

    What holds for each prompt may be given once, or as a list. `priority`: the higher goes first,
    as SGLang has it, and unlike the other endpoints.
    """

    text: Each[Text] | None = None
    input_ids: Each[TokenIds] | None = None
    sampling_params: Each[NativeSampling] | None = None
    rid: Each[ShortText] | None = None
    stream: bool | None = None
    return_logprob: Each[bool] | None = None
    logprob_start_len: Each[Annotated[int, Field(ge=-1, lt=1 << 31)]] | None = None
    top_logprobs_num: Each[Annotated[int, Field(ge=0, le=20)]] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    priority: Priority | None = None
    cache_salt: ShortText | None = None
    extra_key: ShortText | None = None
    bootstrap_host: ShortText | None = None
    bootstrap_port: Port | None = None
    bootstrap_room: Room | None = None
    token_ids_logprob: None = None
    input_embeds: None = None
    image_data: None = None
    audio_data: None = None
    video_data: None = None
    lora_path: None = None
    custom_logit_processor: None = None
    return_hidden_states: Literal[False] | None = None


@dataclass(frozen=True)
class Wanted:
    """What one prompt asks for. `start`: the first prompt token with a log-probability."""

    sampling: NativeSampling
    where: str
    logprobs: bool
    start: int
    top: int

    def structure(self, tokens: Mapping[str, int]) -> Structure | None:
        """The form of its answer. `tokens`: the control tokens. Raises ApiError 400."""
        sampling = self.sampling
        given = {
            name: value
            for name in (*_FORMS, "structural_tag")
            if (value := vars(sampling)[name]) is not None
        }
        if len(given) > 1:
            first, second = list(given)[:2]
            field = f"{self.where}.{second}"
            message = f"{field}: cannot be kept together with {first}; give one"
            raise ApiError(400, message, param=field, code="invalid_value")
        for name, value in given.items():
            field = f"{self.where}.{name}"
            if name == "structural_tag":
                return structure_of_tags(*_tags(value, field), tokens, field)
            if value == ANY_OBJECT and name == "json_schema":
                return Structure(field, {"json_object": True})
            return Structure(field, {_FORMS[name]: value})
        return None

    def params(self, structure: Structure | None) -> SamplingParams:
        """For the engine. Raises ApiError 400 for a value that it refuses, in SGLang's words."""
        given = {name: vars(self.sampling)[name] for name in (*_ALIKE, *OURS)}
        passed: dict[str, Any] = {
            OURS.get(name, name): tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
            if value is not None
        }
        limit = self.sampling.max_new_tokens
        passed["max_tokens"] = 1 if limit == 0 else limit
        if self.sampling.logit_bias is not None:
            biases = self.sampling.logit_bias.items()
            passed["logit_bias"] = {int(token): bias for token, bias in biases}
        if self.logprobs:
            passed["logprobs"] = self.top
            passed |= {"prompt_logprobs": self.top} if self.start >= 0 else {}
        try:
            return SamplingParams(**passed, **({} if structure is None else structure.wanted))
        except RequestError as error:
            raise self._refused(error, structure) from error

    def _refused(self, error: RequestError, structure: Structure | None) -> ApiError:
        message = str(error).removeprefix(f"{error.field}: ")
        for theirs, ours in OURS.items():
            message = message.replace(ours, theirs)
        theirs = next((name for name, ours in OURS.items() if ours == error.field), error.field)
        if structure is not None and error.field in structure.wanted:
            theirs = structure.field.rpartition(".")[2]
        field = f"{self.where}.{theirs}"
        return ApiError(400, f"{field}: {message}", param=field, code="invalid_value")


def _tags(text: str, field: str) -> tuple[list[Tag], list[str]]:
    message = f"{field}: must be JSON of an object with structures and triggers"
    try:
        asked = ResponseFormat.model_validate({"type": "structural_tag"} | json.loads(text))
        found = asked.tags()
    except (ValueError, TypeError, RecursionError, ApiError) as error:
        raise ApiError(400, message, param=field, code="invalid_value") from error
    if found is None:
        raise ApiError(400, message, param=field, code="invalid_value")
    return found


def wanted_of(body: NativeRequest, count: int) -> list[Wanted]:
    """What each of `count` prompts asks for. Raises ApiError 400 for lists of another length."""
    given = body.sampling_params or NativeSampling()
    several = isinstance(given, list)
    sampling = each("sampling_params", given, count)
    asked = each("return_logprob", body.return_logprob or False, count)
    starts = each(
        "logprob_start_len", -1 if body.logprob_start_len is None else body.logprob_start_len, count
    )
    tops = each("top_logprobs_num", body.top_logprobs_num or 0, count)
    if len({one.n or 1 for one in sampling}) > 1:
        message = "sampling_params: n must be the same for all prompts"
        raise ApiError(400, message, param="sampling_params", code="invalid_value")
    found: list[Wanted] = []
    for place in range(count):
        if tops[place] and not asked[place]:
            message = "top_logprobs_num: needs return_logprob: true"
            raise ApiError(400, message, param="top_logprobs_num", code="invalid_value")
        where = f"sampling_params.{place}" if several else "sampling_params"
        found.append(Wanted(sampling[place], where, asked[place], starts[place], tops[place]))
    return found


def each(field: str, given: T | list[T], count: int) -> Sequence[T]:
    """One for each of `count` prompts. Raises ApiError 400 for a list of another length."""
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        message = f"{field}: has {len(given)} for {count} prompts; give one, or one for each"
        raise ApiError(400, message, param=field, code="invalid_value")
    return given
