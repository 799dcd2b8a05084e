# SPDX-License-Identifier: Apache-2.0
"""A load's figures under the keys of vLLM's serving benchmark, meaning the same."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from freewheel.bench.client import Asking, Reply
from freewheel.bench.load import Load, LoadRun
from freewheel.bench.scrape import draft_summary
from freewheel.bench.statistics import spread
from freewheel.errors import ConfigError

GOALS = ("ttft", "tpot", "e2el")


def served_summary(
    load: Load, asking: Asking, run: LoadRun, goals: Mapping[str, float]
) -> dict[str, Any]:
    """Rates a second and times in milliseconds, over the requests that were answered whole.

    TTFT: from sending to the first text. TPOT: after it, the time for a token, a request a value.
    ITL: between events, of all requests together; one event may bring several tokens. `goals`:
    the most milliseconds of a TTFT, TPOT or E2EL for a request to count in `request_goodput`.
    """
    good = [reply for reply in run.replies if not reply.error]
    given = sum(reply.input_tokens for reply in good)
    made = sum(reply.output_tokens for reply in good)
    return {
        "endpoint_type": asking.endpoint,
        "model_id": asking.model,
        "num_prompts": len(run.replies),
        "request_rate": "inf" if math.isinf(load.rate) else load.rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.concurrency,
        "duration": run.duration,
        "completed": len(good),
        "failed": len(run.replies) - len(good),
        "total_input_tokens": given,
        "total_output_tokens": made,
        "request_throughput": len(good) / run.duration,
        "request_goodput": _goodput(good, goals, run.duration),
        "output_throughput": made / run.duration,
        "total_token_throughput": (given + made) / run.duration,
        "max_concurrent_requests": most_at_once(good),
        **spread("ttft", [reply.first for reply in good]),
        **spread("tpot", [each for reply in good if (each := reply.token_seconds) is not None]),
        **spread("itl", [gap for reply in good for gap in reply.gaps]),
        **spread("e2el", [reply.latency for reply in good]),
        **draft_summary(run.drafts),
        "errors": dict(Counter(reply.error for reply in run.replies if reply.error)),
    }


def details(run: LoadRun) -> dict[str, Any]:
    """Each request's own figures, times in seconds, in the order in which they were sent."""
    return {
        "input_lens": [reply.input_tokens for reply in run.replies],
        "output_lens": [reply.output_tokens for reply in run.replies],
        "ttfts": [reply.first for reply in run.replies],
        "itls": [reply.gaps for reply in run.replies],
        "generated_texts": [reply.text for reply in run.replies],
        "errors": [reply.error for reply in run.replies],
    }


def read_goals(texts: Sequence[str]) -> dict[str, float]:
    """Of `ttft:500` and the like, in milliseconds. Raises ConfigError."""
    goals: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            goals[name] = float(number)
        except ValueError as error:
            raise ConfigError(f"goodput: must be NAME:MILLISECONDS, got {text!r}") from error
        if name not in GOALS or not goals[name] > 0:
            raise ConfigError(f"goodput: {text!r} is none of {', '.join(GOALS)} above 0 ms")
    return goals


def most_at_once(replies: Sequence[Reply]) -> int:
    """Requests under way at the fullest moment."""
    begun = [(reply.start, 1) for reply in replies]
    ended = [(reply.start + reply.latency, -1) for reply in replies]
    steps = (step for _, step in sorted(begun + ended))
    return max(itertools.accumulate(steps), default=0)


def _goodput(replies: Sequence[Reply], goals: Mapping[str, float], duration: float) -> float | None:
    if not goals:
        return None

    def kept(reply: Reply) -> bool:
        each = reply.token_seconds
        took = {"ttft": reply.first, "tpot": each or 0.0, "e2el": reply.latency}
        return all(1000 * took[name] <= most for name, most in goals.items())

    return sum(map(kept, replies)) / duration
