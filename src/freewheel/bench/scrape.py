# SPDX-License-Identifier: Apache-2.0
"""A server's own counts of drafts, from its Prometheus page; under our prefix or vLLM's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROUNDS = "spec_decode_num_drafts"
DRAFTED = "spec_decode_num_draft_tokens"
ACCEPTED = "spec_decode_num_accepted_tokens"
BY_PLACE = "spec_decode_num_accepted_tokens_per_pos"


@dataclass
class DraftCounts:
    """Rounds of a request with drafts, drafts verified and accepted, and those by place."""

    rounds: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    by_place: Counter[int] = field(default_factory=Counter[int])

    def since(self, before: DraftCounts) -> DraftCounts:
        by_place = Counter(self.by_place)
        by_place.subtract(before.by_place)
        return DraftCounts(
            self.rounds - before.rounds,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            by_place,
        )


def read_counts(text: str) -> DraftCounts:
    """Of a page in Prometheus's text format, all engines and models together."""
    counts = DraftCounts()
    for family in text_string_to_metric_families(text):
        name = family.name.partition(":")[2]
        for sample in family.samples:
            if not sample.name.endswith("_total"):
                continue
            if name == ROUNDS:
                counts.rounds += sample.value
            elif name == DRAFTED:
                counts.drafted += sample.value
            elif name == ACCEPTED:
                counts.accepted += sample.value
            elif name == BY_PLACE:
                counts.by_place[int(sample.labels["position"])] += int(sample.value)
    return counts


async def scrape(http: httpx.AsyncClient) -> DraftCounts | None:
    """What the server has counted so far; None if it has no such page."""
    response = await http.get("/metrics")
    if response.status_code != httpx.codes.OK:
        return None
    return read_counts(response.text)


def draft_summary(counts: DraftCounts | None) -> dict[str, Any]:
    """Under vLLM's keys: the rate in percent, rates by place over all rounds with a draft."""
    if counts is None or not counts.rounds:
        return {}
    places = range(max(counts.by_place, default=-1) + 1)
    return {
        "spec_decode_num_drafts": int(counts.rounds),
        "spec_decode_draft_tokens": int(counts.drafted),
        "spec_decode_accepted_tokens": int(counts.accepted),
        "spec_decode_acceptance_rate": 100 * counts.accepted / counts.drafted,
        "spec_decode_acceptance_length": 1 + counts.accepted / counts.rounds,
        "spec_decode_per_position_acceptance_rates": [
            counts.by_place[place] / counts.rounds for place in places
        ],
    }
