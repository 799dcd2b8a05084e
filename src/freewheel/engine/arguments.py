# SPDX-License-Identifier: Apache-2.0
"""What a caller of `LLM` gives, one or several, as lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeGuard, TypeVar

from freewheel.errors import RequestError
from freewheel.spec import SamplingParams
from freewheel.spec.elsewhere import argument_hint

P = ParamSpec("P")
R = TypeVar("R")


def names_its_arguments(method: Callable[P, R]) -> Callable[P, R]:
    """`method`, which raises RequestError for an argument that it lacks, with what is meant."""
    known = signature(method).parameters

    @wraps(method)
    def called(*given: P.args, **named: P.kwargs) -> R:
        for name in named:
            if name not in known:
                hint = argument_hint(name, known, SamplingParams.__dataclass_fields__)
                raise RequestError(name, f"is no argument of {method.__name__}; {hint}")
        return method(*given, **named)

    return called


Prompt = str | Sequence[int]
"""Text, or token ids."""


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    """The prompts, unchecked. A lone one, as text or as ids, is a list of one.

    Raises RequestError for what is neither text nor a list.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not is_list(prompts):
        raise RequestError(
            "prompts", f"must be text, a list of ids, or a list of such, got {kind_of(prompts)}"
        )
    lone = len(prompts) > 0 and not any(isinstance(item, Sequence) for item in prompts)
    return [prompts] if lone else prompts


def check_one(prompt: object) -> None:
    """Raise RequestError for a list of prompts where one is taken."""
    if not is_list(prompt) or not prompt:
        return
    if all(isinstance(item, str) or is_list(item) for item in prompt):
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
