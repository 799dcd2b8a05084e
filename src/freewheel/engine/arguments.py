# SPDX-License-Identifier: Apache-2.0
"""What a caller of `LLM` gives, one or several, as lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeGuard, TypeVar

from freewheel.errors import RequestError
from freewheel.spec import SamplingParams
from freewheel.spec.elsewhere import argument_hint, prompt_hint

_IN_PROMPTS = ("prompt", "prompt_token_ids", "cache_salt")

P = ParamSpec("P")
R = TypeVar("R")


def names_its_arguments(method: Callable[P, R]) -> Callable[P, R]:
    """`method`, which raises RequestError for arguments that it lacks, with what is meant."""
    known = signature(method).parameters

    @wraps(method)
    def called(*given: P.args, **named: P.kwargs) -> R:
        if unknown := [name for name in named if name not in known]:
            wishes = SamplingParams.__dataclass_fields__
            raise RequestError.of_names(
                (name, f"is no argument of {method.__name__}; {argument_hint(name, known, wishes)}")
                for name in unknown
            )
        return method(*given, **named)

    return called


Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or either as vLLM writes it: `{"prompt": text}`, `{"prompt_token_ids": ids}`,
beside which `cache_salt` may stand."""


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    """The prompts, unchecked. A lone one, as text, ids or a mapping, is a list of one.

    Raises RequestError for what is neither text nor a list.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not is_list(prompts):
        raise RequestError(
            "prompts", f"must be text, a list of ids, or a list of such, got {kind_of(prompts)}"
        )
    lone = len(prompts) > 0 and not any(isinstance(item, Sequence | Mapping) for item in prompts)
    return [prompts] if lone else prompts


def opened(prompt: Prompt, cache_salt: str) -> tuple[str | Sequence[int], str]:
    """Text or ids of a prompt, unchecked, and its salt. `cache_salt`: of all prompts of a call.

    Raises RequestError for a mapping that holds anything else, or that says something twice.
    """
    if not isinstance(prompt, Mapping):
        return prompt, cache_salt
    given = {str(name): value for name, value in prompt.items() if value is not None}
    for name in given:
        if name not in _IN_PROMPTS:
            hint = prompt_hint(name, _IN_PROMPTS)
            raise RequestError(name, f"is no part of a prompt; {hint}")
    salt = given.pop("cache_salt", cache_salt)
    if cache_salt and salt != cache_salt:
        raise RequestError("cache_salt", "the prompt has one, and the call another; give one")
    if not given:
        raise RequestError("prompt", "is missing: give prompt, a text, or prompt_token_ids")
    if len(given) > 1:
        raise RequestError("prompt_token_ids", "stands beside prompt; give one of them")
    name, value = given.popitem()
    if name == "prompt" and not isinstance(value, str):
        raise RequestError(
            "prompt", f"must be text in a mapping, got {kind_of(value)}; ids are prompt_token_ids"
        )
    if name == "prompt_token_ids" and not is_list(value):
        raise RequestError("prompt_token_ids", f"must be a list of ids, got {kind_of(value)}")
    return value, salt


def check_one(prompt: object) -> None:
    """Raise RequestError for a list of prompts where one is taken."""
    if not is_list(prompt) or not prompt:
        return
    if all(isinstance(item, str | Mapping) or is_list(item) for item in prompt):
        raise RequestError("prompt", "one is taken here; generate takes many, as a list")


def param_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    """One for each of `count` prompts. Raises RequestError for what is neither one nor so many."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not is_list(params):
        raise RequestError("params", f"must be SamplingParams, or a list, got {kind_of(params)}")
    if len(params) != count:
        raise RequestError("params", f"{len(params)} given for {count} prompts")
    return params


def priorities(priority: int | Sequence[int], count: int) -> Sequence[int]:
    """One for each of `count` prompts, unchecked. Raises what `param_list` raises."""
    if isinstance(priority, int):
        return [priority] * count
    if not is_list(priority):
        raise RequestError("priority", f"must be a number, or a list, got {kind_of(priority)}")
    if len(priority) != count:
        raise RequestError("priority", f"{len(priority)} given for {count} prompts")
    return priority


def check_priority(priority: object) -> None:
    """Raise RequestError for what is no whole number."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError("priority", f"must be a whole number, got {priority!r}")


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """A list, a tuple or the like; raw bytes are neither text nor token ids."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def kind_of(value: object) -> str:
    """The name of its type, for messages."""
    return type(value).__name__
