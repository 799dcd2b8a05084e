# SPDX-License-Identifier: Apache-2.0
"""What a server under load is asked, and when."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freewheel.errors import RequestError

PLAIN_IDS = range(300, 1000)
"""Token ids that are pieces of text in every vocabulary served, and no control tokens."""


@dataclass(frozen=True)
class Prompt:
    """Text or token ids, and the most tokens of an answer to it."""

    content: str | list[int]
    max_tokens: int


def random_prompts(count: int, tokens: int, max_tokens: int, seed: int) -> list[Prompt]:
    """Prompts of `tokens` random token ids each. No text looks like that: drafts fare otherwise."""
    rng = random.Random(seed)
    return [Prompt(rng.choices(PLAIN_IDS, k=tokens), max_tokens) for _ in range(count)]


def read_prompts(file: Path, count: int | None, max_tokens: int) -> list[Prompt]:
    """A prompt a line: text, or in a .jsonl file objects with `prompt` and maybe `output_tokens`.

    Taken in turn until there are `count`. Raises RequestError if the file is not as said.
    """
    try:
        lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("prompt_file", str(error)) from error
    if not lines:
        raise RequestError("prompt_file", f"{file} holds no prompt")
    objects = file.suffix == ".jsonl"
    prompts = [
        _prompt_of(line, number, max_tokens) if objects else Prompt(line, max_tokens)
        for number, line in enumerate(lines, 1)
    ]
    return [prompts[index % len(prompts)] for index in range(count or len(prompts))]


def _prompt_of(line: str, number: int, max_tokens: int) -> Prompt:
    try:
        found: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError("prompt_file", f"line {number} is not JSON: {error}") from error
    text = found.get("prompt") if isinstance(found, dict) else None
    if not isinstance(text, str) or not text:
        raise RequestError("prompt_file", f"line {number} has no text under 'prompt'")
    tokens = found.get("output_tokens", max_tokens)
    if not isinstance(tokens, int) or tokens < 1:
        raise RequestError("prompt_file", f"line {number}: output_tokens must be at least 1")
    return Prompt(text, tokens)


def starts(count: int, rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the begin at which each request is sent.

    Gaps are drawn from a gamma distribution with mean 1 / rate and shape `burstiness`: 1 is a
    Poisson process, less comes in bursts, more is steadier. An infinite rate sends all at once.
    """
    rng, now = random.Random(seed), 0.0
    for _ in range(count):
        yield now
        if not math.isinf(rate):
            now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
