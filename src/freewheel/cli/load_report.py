# SPDX-License-Identifier: Apache-2.0
"""What `freewheel bench serve` does once its libraries are known to be there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from freewheel.bench.client import PATHS, Asking
from freewheel.bench.load import Load, LoadRun, run_load, served_model
from freewheel.bench.prompts import Prompt, random_prompts, read_prompts
from freewheel.bench.served import details, read_goals, served_summary
from freewheel.cli.serve import keys_of
from freewheel.cli.terminal import answers, counting, write_json
from freewheel.config import environment_api_key
from freewheel.errors import ConfigError, RequestError

PROMPTS, PROMPT_TOKENS = 100, 64


def send_load(
    load: dict[str, Any],
    asking: dict[str, Any],
    prompts: dict[str, Any],
    goodput: Sequence[str],
    key_file: Path | None,
    *,
    json: bool,
    detailed: bool,
) -> bool:
    """Fields of Load, of Asking and of `choose_prompts`; whether every request was answered."""
    if asking["endpoint"] not in PATHS:
        raise ConfigError(
            f"endpoint: must be one of {', '.join(PATHS)}, got {asking['endpoint']!r}"
        )
    if asking["endpoint"] == "chat" and prompts["file"] is None:
        raise RequestError("endpoint", "chat takes text: give --prompt-file")
    goals = read_goals(goodput)
    wanted = Load(
        **load, api_key=environment_api_key() if key_file is None else keys_of(key_file)[0]
    )
    chosen = choose_prompts(**prompts)
    if not asking["model"]:
        asking = asking | {"model": asyncio.run(served_model(wanted))}
    same = Asking(**asking)
    run = _run(wanted, same, chosen)
    found = served_summary(wanted, same, run, goals)
    if json:
        write_json(found | details(run) if detailed else found)
    else:
        _print(found)
    return not found["failed"]


def choose_prompts(
    file: Path | None, count: int | None, tokens: int | None, max_tokens: int, seed: int
) -> list[Prompt]:
    """From a file or random. Raises RequestError."""
    for name, value in (("num_prompts", count), ("prompt_tokens", tokens)):
        if value is not None and value < 1:
            raise RequestError(name, f"must be at least 1, got {value}")
    if max_tokens < 1:
        raise RequestError("max_tokens", f"must be at least 1, got {max_tokens}")
    if file is None:
        return random_prompts(count or PROMPTS, tokens or PROMPT_TOKENS, max_tokens, seed)
    if tokens is not None:
        raise RequestError("prompt_tokens", "has no meaning with --prompt-file; give one of them")
    return read_prompts(file, count, max_tokens)


def _run(load: Load, asking: Asking, prompts: list[Prompt]) -> LoadRun:
    ended = 0

    def count(reply: object) -> None:
        nonlocal ended
        del reply
        ended += 1

    with counting("requests", len(prompts), lambda: ended):
        return asyncio.run(run_load(load, asking, prompts, count))


ROWS = (
    ("requests answered / failed", "{completed} / {failed}"),
    ("duration, s", "{duration:.2f}"),
    ("tokens in / out", "{total_input_tokens} / {total_output_tokens}"),
    ("requests/s", "{request_throughput:.2f}"),
    ("output tokens/s", "{output_throughput:.1f}"),
    ("all tokens/s", "{total_token_throughput:.1f}"),
    ("most at once", "{max_concurrent_requests}"),
)


def _print(found: dict[str, Any]) -> None:
    for title, form in ROWS:
        answers.print(f"{title:<28}{form.format_map(found)}")
    if found["request_goodput"] is not None:
        answers.print(f"{'good requests/s':<28}{found['request_goodput']:.2f}")
    for name in ("ttft", "tpot", "itl", "e2el"):
        values = (found[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p99"))
        text = " / ".join("-" if value is None else f"{value:.2f}" for value in values)
        answers.print(f"{f'{name.upper()} ms, mean/median/p99':<28}{text}")
    if "spec_decode_acceptance_length" in found:
        rates = found["spec_decode_per_position_acceptance_rates"]
        answers.print(f"{'tokens a round':<28}{found['spec_decode_acceptance_length']:.2f}")
        places = " ".join(f"{100 * rate:.1f}%" for rate in rates)
        answers.print(f"{'drafts accepted, by place':<28}{places}")
    for error, times in found["errors"].items():
        answers.print(f"{times} x {error}")
