# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of the choice of tokens, validated before anything runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from freewheel.errors import RequestError
from freewheel.spec.adjustments import MAX_BIASES
from freewheel.spec.checks import (
    biases_of,
    check_count,
    check_flag,
    check_number,
    ids_of,
    json_text,
    texts_of,
)
from freewheel.spec.elsewhere import params_hint

MAX_STOP_IDS = 8
"""Stop ids that fit a row of the device state, the model's own end-of-sequence ids included."""


MAX_LOGPROBS = 20
"""The most alternatives that are reported for each token."""

STRUCTURES = ("json_schema", "regex", "choice", "json_object", "grammar", "calls")
"""Fields that say what form the answer has; at most one is given."""

FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "json_object")

DEFAULT_MAX_TOKENS = 256
"""Of a request that says nothing of it."""

MIN_TEMPERATURE = 1e-3
"""Below it, logits divided by the temperature overflow; 0 itself is greedy."""


class FinishReason(StrEnum):
    """Why a request ended. ERROR: its logits held NaN, nothing was left to
    choose, or a canary ended it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    `temperature` 0 is greedy. Filters apply in the order temperature, top_k, top_p, min_p, each
    to what the one before left. `seed` None draws one; a given seed makes the text reproducible,
    whatever the draft depth or the company. `top_k` -1 is 0, off. `max_tokens` None runs to the
    context limit. `stop` may be given as one text; it and `stop_token_ids` as lists. Penalties,
    `logit_bias`, `bad_words` and `allowed_token_ids` come before the temperature;
    `spec.adjustments` says what they do.
    `logprobs`: report the log-probability of each token, and of so many of the likeliest (0 to 20),
    by the model's own logits, before anything here changed them; `prompt_logprobs`: also of the
    prompt's tokens. At most one of `json_schema` (an object, or its JSON text), `regex` and
    `choice`, `json_object` (any JSON object), `grammar` (in Lark or in a form of BNF) and `calls`
    (of tools: what `structured.tool_grammar` gives): the answer is a text of that kind, and ends
    with it. Where the prompt leaves thinking open, it begins behind the end of thinking, which
    `thinking_token_budget` output tokens force if they have not brought it. With `grammar_trigger`,
    a token id, the grammar or the calls begin behind the first such token, and an answer without
    one is free. Raises RequestError on the first field out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: Mapping[str, object] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    json_object: bool = False
    grammar: str | None = None
    calls: str | None = None
    grammar_trigger: int | None = None
    thinking_token_budget: int | None = None
    seed: int | None = None
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __new__(cls, *given: object, **named: object) -> Self:
        if given:
            raise RequestError("params", "takes its fields by name, such as temperature=0")
        known = cls.__dataclass_fields__
        if unknown := [name for name in named if name not in known]:
            raise RequestError.of_names(
                (name, f"is no field of SamplingParams; {params_hint(name, known)}")
                for name in unknown
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0.0, 100.0)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError("temperature", f"must be 0 or at least {MIN_TEMPERATURE:g}")
        check_number("top_p", self.top_p, 0.0, 1.0)
        check_number("min_p", self.min_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p", "must be above 0; use temperature 0 for greedy decoding")
        check_count("top_k", self.top_k, -1)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        check_count("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError("min_tokens", f"exceeds max_tokens ({self.max_tokens})")
        if self.seed is not None:
            check_count("seed", self.seed, -(2**63), 2**63 - 1)
        for flag in FLAGS:
            check_flag(flag, vars(self)[flag])
        self._check_adjustments()
        self._check_structure()
        for field in ("logprobs", "prompt_logprobs"):
            if vars(self)[field] is not None:
                check_count(field, vars(self)[field], 0, MAX_LOGPROBS)
        object.__setattr__(self, "stop", texts_of("stop", self.stops))
        object.__setattr__(self, "bad_words", texts_of("bad_words", self.bad_words))
        stop_ids = ids_of("stop_token_ids", self.stop_token_ids, MAX_STOP_IDS)
        object.__setattr__(self, "stop_token_ids", stop_ids)

    def _check_structure(self) -> None:
        if self.thinking_token_budget is not None:
            check_count("thinking_token_budget", self.thinking_token_budget, 0)
        if self.choice is not None:
            object.__setattr__(self, "choice", texts_of("choice", self.choice))
            if not self.choice:
                raise RequestError("choice", "is empty: there is nothing to choose")
        if self.json_schema is not None:
            schema = json_text("json_schema", self.json_schema)
            object.__setattr__(self, "json_schema", schema)
        for field in ("regex", "grammar", "calls"):
            if vars(self)[field] is not None:
                texts_of(field, (vars(self)[field],))
        self._check_trigger()
        given = [field for field in STRUCTURES if vars(self)[field] not in (None, False)]
        if len(given) > 1:
            raise RequestError(given[1], f"cannot be kept together with {given[0]}; give one")
        for field in ("ignore_eos", "min_tokens"):
            if given and vars(self)[field]:
                raise RequestError(field, f"contradicts {given[0]}, which says where the end is")

    def _check_trigger(self) -> None:
        if self.grammar_trigger is None:
            return
        check_count("grammar_trigger", self.grammar_trigger, 0)
        if self.grammar is None and self.calls is None:
            raise RequestError("grammar_trigger", "needs a grammar that begins behind it")
        if self.thinking_token_budget is not None:
            raise RequestError(
                "thinking_token_budget", "cannot be kept together with grammar_trigger"
            )

    @property
    def structure(self) -> tuple[str, str] | None:
        """(field, text) of what the answer must be; choices as a JSON list."""
        if isinstance(self.json_schema, str):
            return "json_schema", self.json_schema
        if self.regex is not None:
            return "regex", self.regex
        if self.grammar is not None:
            return "grammar", self.grammar
        if self.calls is not None:
            return "calls", self.calls
        if self.json_object:
            return "json_object", ""
        return None if self.choice is None else ("choice", json.dumps(self.choice))

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop` as several texts."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs, checked."""
        return biases_of("logit_bias", self.logit_bias, MAX_BIASES)

    def _check_adjustments(self) -> None:
        for field in ("presence_penalty", "frequency_penalty"):
            check_number(field, vars(self)[field], -100.0, 100.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        if self.repetition_penalty < 0.01:
            raise RequestError("repetition_penalty", "must be at least 0.01; 1 switches it off")
        biases = biases_of("logit_bias", self.logit_bias, MAX_BIASES)
        object.__setattr__(self, "logit_bias", biases)
        if self.allowed_token_ids is not None:
            allowed = ids_of("allowed_token_ids", self.allowed_token_ids, 1 << 20)
            if not allowed:
                raise RequestError("allowed_token_ids", "is empty: no token could be chosen")
            object.__setattr__(self, "allowed_token_ids", tuple(dict.fromkeys(allowed)))
