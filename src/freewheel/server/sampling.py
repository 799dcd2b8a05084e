# SPDX-License-Identifier: Apache-2.0
"""From an endpoint's fields to SamplingParams: the one place that knows both.

A field of the engine's own SamplingParams is passed on under its name. One that the schema knows
and SamplingParams does not is refused, unless its value changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from freewheel.errors import RequestError
from freewheel.server.failures import ApiError
from freewheel.server.schema import Sampling
from freewheel.spec import SamplingParams

SUPPORTED = frozenset(one.name for one in fields(SamplingParams))
NEUTRAL: Mapping[str, object] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "allowed_token_ids": [],
    "bad_words": [],
    "structured_outputs": {},
    "logprobs": False,
    "top_logprobs": 0,
}
"""Values that ask for nothing."""

NAMES = frozenset(Sampling.model_fields)


def sampling_params(
    asked: Sampling, max_tokens: int | None, extra: Mapping[str, object] | None = None
) -> SamplingParams:
    """What the engine is to do. `extra`: fields that only one endpoint has, such as logprobs.

    Raises ApiError 400 for a field that the engine does not have, or whose value it refuses.
    """
    wanted = {name: getattr(asked, name) for name in sorted(NAMES)} | dict(extra or {})
    wanted = {name: value for name, value in wanted.items() if value is not None}
    passed: dict[str, Any] = {"max_tokens": max_tokens}
    for name, value in wanted.items():
        if name in SUPPORTED:
            passed[name] = _converted(name, value)
        elif not _is_neutral(name, value):
            raise unsupported(name)
    try:
        return SamplingParams(**passed)
    except RequestError as error:
        raise ApiError(400, str(error), param=error.field) from error


def unsupported(name: str) -> ApiError:
    """A field that exists elsewhere and not here."""
    return ApiError(
        400, f"{name}: not supported by this server; leave it out", param=name, code="unsupported"
    )


def for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of choice `index` of several: a given seed counts up, so that they differ."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=(params.seed + index + (1 << 63)) % (1 << 64) - (1 << 63))


def _is_neutral(name: str, value: object) -> bool:
    """False is not 0 here: `logprobs: 0` asks for something, `logprobs: false` does not."""
    return name in NEUTRAL and type(NEUTRAL[name]) in (type(value), int) and NEUTRAL[name] == value


def _converted(name: str, value: Any) -> Any:
    if name == "stop":
        return (value,) if isinstance(value, str) else tuple(value)
    if name == "top_k":
        return max(value, 0)  # vLLM's -1 is off
    if name == "logit_bias":
        return {int(token): bias for token, bias in value.items()}
    return tuple(value) if isinstance(value, list) else value
