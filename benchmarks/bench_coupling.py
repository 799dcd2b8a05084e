# SPDX-License-Identifier: Apache-2.0
"""How often a first draft is right: by coupled noise, as the likeliest token, by rejection.

All three are worked out from the same pairs of distributions, the target's and the drafter's at the
same place, as seeded runs of the demo meet them. The bound that any scheme keeps is 1 minus the
total variation distance, which rejection sampling reaches (Leviathan et al., 2023).
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import Tensor

from freewheel import LLM, SamplingParams
from freewheel.decode import chain
from freewheel.decode import round as rounds
from freewheel.ops.choosing import gumbel

Pairs = list[tuple[Tensor, Tensor]]
"""float64 [V] each: the target's log-probabilities, and the drafter's."""


def collect(temperature: float, tokens: int, requests: int) -> Pairs:
    """Distributions at places where a draft was checked, one row at a time."""
    llm = LLM("demo", speculate=1, graph="eager", run_ahead=0, max_batch=1, prefill_batch=1)
    drafted: dict[int, Tensor] = {}
    pairs: Pairs = []
    choose = rounds.choose_next

    def of_target(
        state: Any, rows: Tensor, positions: Tensor, logits: Tensor, *rest: Any, **more: Any
    ) -> Tensor:
        for place, line in zip(positions[0].tolist(), logits[0], strict=True):
            if place in drafted:
                log_p = (line.double() / temperature).log_softmax(-1)
                pairs.append((log_p, drafted.pop(place)))
        return choose(state, rows, positions, logits, *rest, **more)

    def of_drafter(
        state: Any, rows: Tensor, positions: Tensor, logits: Tensor, *rest: Any, **more: Any
    ) -> Tensor:
        drafted[int(positions[0, 0])] = (logits[0, 0].double() / temperature).log_softmax(-1)
        return choose(state, rows, positions, logits, *rest, **more)

    rounds.choose_next, chain.choose_next = of_target, of_drafter  # type: ignore[assignment]
    for seed in range(requests):
        drafted.clear()
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens)
        llm.generate("Emma was", params)
    rounds.choose_next, chain.choose_next = choose, choose
    return pairs


def rates(pairs: Pairs, draws: int = 400) -> dict[str, float]:
    """Share of first drafts that are right, for each way of drafting; noise is averaged over."""
    coupled = greedy = rejection = 0.0
    positions = torch.arange(draws, dtype=torch.int32)[None]
    for index, (log_p, log_q) in enumerate(pairs):
        noise = gumbel(torch.tensor([index]), positions, len(log_p))[0].double()  # [draws, V]
        same = (log_p + noise).argmax(-1) == (log_q + noise).argmax(-1)
        coupled += float(same.double().mean())
        greedy += float(log_p[log_q.argmax()].exp())
        rejection += float(torch.minimum(log_p.exp(), log_q.exp()).sum())
    count = max(len(pairs), 1)
    return {
        "pairs": len(pairs),
        "coupled": round(coupled / count, 4),
        "greedy_drafts": round(greedy / count, 4),
        "rejection": round(rejection / count, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0, 1.4])
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--requests", type=int, default=6)
    options = parser.parse_args()
    for temperature in options.temperatures:
        pairs = collect(temperature, options.tokens, options.requests)
        print(json.dumps({"temperature": temperature, **rates(pairs)}))


if __name__ == "__main__":
    main()
