# SPDX-License-Identifier: Apache-2.0
"""From an endpoint's fields to SamplingParams: the one place that knows both.

Fields have the names of SamplingParams, but for the form of an answer (`structure.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from freewheel.errors import RequestError
from freewheel.server.failures import ApiError
from freewheel.server.schema import Sampling
from freewheel.server.structure import Structure
from freewheel.spec import SamplingParams
from freewheel.spec.elsewhere import field_hint

NAMES = frozenset(Sampling.model_fields) - {"structured_outputs"}


def sampling_params(
    asked: Sampling,
    max_tokens: int | None,
    extra: Mapping[str, object] | None = None,
    structure: Structure | None = None,
) -> SamplingParams:
    """What the engine is to do. `extra`: fields that only one endpoint has, such as logprobs.

    Raises ApiError 400 for a value that the engine refuses.
    """
    wanted = {name: getattr(asked, name) for name in sorted(NAMES)} | dict(extra or {})
    passed: dict[str, Any] = {
        name: _converted(name, value) for name, value in wanted.items() if value is not None
    }
    passed |= {} if structure is None else structure.wanted
    try:
        return SamplingParams(**passed, max_tokens=max_tokens)
    except RequestError as error:
        refused = ApiError(400, str(error), param=error.field)
        raise (refused if structure is None else structure.blamed(refused)) from error


def unsupported(name: str) -> ApiError:
    """A field that exists elsewhere and not here."""
    hint = field_hint(name)
    return ApiError(
        400,
        f"{name}: not supported by this server; leave it out{f' ({hint})' if hint else ''}",
        param=name,
        code="unsupported",
    )


def for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of choice `index` of several: a given seed counts up, so that they differ."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=(params.seed + index + (1 << 63)) % (1 << 64) - (1 << 63))


def _converted(name: str, value: Any) -> Any:
    if name == "logit_bias":
        return {int(token): bias for token, bias in value.items()}
    return tuple(value) if isinstance(value, list) else value
