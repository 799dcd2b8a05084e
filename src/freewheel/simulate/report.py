# SPDX-License-Identifier: Apache-2.0
"""Figures of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freewheel.simulate.replay import Outcome, PoolUse

QUANTILES = (0.5, 0.9, 0.99)


def report(outcome: Outcome, replayed_in: float) -> dict[str, Any]:
    """Everything by name. `replayed_in`: seconds that the simulation itself took.

    Times are simulated, `ttft` from arrival to first token, `tpot` from there to the last token
    over the tokens between, `e2e` from arrival to the last token.
    """
    served = len(outcome.whole)
    refused = sum(outcome.refused.values())
    rounds = outcome.prompt_rounds + outcome.decode_rounds
    return {
        "requests": served + refused,
        "served": served,
        "refused": outcome.refused,
        "seconds": outcome.seconds,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "hit_rate": outcome.hit_rate,
        "answer_tokens": outcome.answer_tokens,
        "answer_tokens_per_second": _share(outcome.answer_tokens, outcome.seconds),
        "ttft_ms": distribution(outcome.first_token),
        "tpot_ms": distribution(outcome.per_token),
        "e2e_ms": distribution(outcome.whole),
        "rounds": {
            "all": rounds,
            "prompts": outcome.prompt_rounds,
            "decoding": outcome.decode_rounds,
        },
        "device_busy_share": _share(outcome.busy_seconds, outcome.seconds),
        "preemptions": outcome.preemptions,
        "pages": [_use(use, outcome.seconds) for use in outcome.pools],
        "replayed_in_seconds": replayed_in,
        "replayed_requests_per_second": _share(served, replayed_in),
    }


def distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    """Milliseconds: mean, quantiles (the nearest rank), and the largest; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    found = {"mean": 1000 * sum(ordered) / len(ordered)}
    for share in QUANTILES:
        rank = max(0, -int(-share * len(ordered) // 1) - 1)
        found[f"p{100 * share:g}"] = 1000 * ordered[rank]
    return found | {"max": 1000 * ordered[-1]}


def _use(use: PoolUse, seconds: float) -> dict[str, Any]:
    """`owned`: by requests under way; `held`: with what is kept for later ones."""
    return {
        "group": use.name,
        "total": use.total,
        "peak_owned": use.peak_owned,
        "peak_held": use.peak_held,
        "mean_owned": _share(use.owned_seconds, seconds),
        "mean_held": _share(use.held_seconds, seconds),
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
