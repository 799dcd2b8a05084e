# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of the choice of tokens, validated before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from freewheel.errors import RequestError

MAX_STOP_IDS = 8
"""Stop ids that fit a row of the device state, the model's own end-of-sequence ids included."""


MIN_TEMPERATURE = 1e-3
"""Below it, logits divided by the temperature overflow; 0 itself is greedy."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    `temperature` 0 is greedy. Filters apply in the order temperature, top_k, top_p, min_p, each
    to what the one before left. `seed` None draws one; a given seed makes the text reproducible,
    whatever the draft depth or the company. `max_tokens` None runs to the context limit. `stop` and
    `stop_token_ids` may be given as lists. Raises RequestError on the first field out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 100.0)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError("temperature", f"must be 0 or at least {MIN_TEMPERATURE:g}")
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p", "must be above 0; use temperature 0 for greedy decoding")
        _check_count("top_k", self.top_k, 0)
        _check_count("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _check_count("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError("min_tokens", f"exceeds max_tokens ({self.max_tokens})")
        if self.seed is not None:
            _check_count("seed", self.seed, -(2**63), 2**63 - 1)
        for flag in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _check_flag(flag, vars(self)[flag])
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))


def _check_number(field: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(field, f"must be a number, got {value!r}")
    if not low <= value <= high:  # NaN is not, either
        raise RequestError(field, f"must be between {low:g} and {high:g}, got {value!r}")


def _check_count(field: str, value: object, low: int, high: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(field, f"must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise RequestError(field, f"must be between {low} and {high}, got {value}")


def _check_flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(field, f"must be True or False, got {value!r}")


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = _items(stop)
    if strings is None or not all(isinstance(s, str) and s for s in strings):
        raise RequestError("stop", f"must be a tuple of non-empty strings, got {stop!r}")
    texts = tuple(str(s) for s in strings)
    for text in texts:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise RequestError("stop", f"{text!r} is not valid Unicode, so no answer holds it")
    return texts


def _stop_ids(ids: object) -> tuple[int, ...]:
    items = _items(ids)
    whole = [i for i in items or () if isinstance(i, int) and not isinstance(i, bool) and i >= 0]
    if items is None or len(whole) != len(items):
        raise RequestError(
            "stop_token_ids", f"must be a tuple of token ids, each at least 0, got {ids!r}"
        )
    if len(whole) > MAX_STOP_IDS:
        raise RequestError("stop_token_ids", f"holds {len(whole)} ids; at most {MAX_STOP_IDS} fit")
    return tuple(whole)


def _items(value: object) -> tuple[object, ...] | None:
    """The items of a list or tuple; None for anything else."""
    return tuple(cast("list[object]", value)) if isinstance(value, list | tuple) else None
