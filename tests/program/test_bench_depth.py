# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/bench_depth.py`, which runs seldom, keeps to the policy, and runs."""

from __future__ import annotations

import inspect

from benchmarks.bench_depth import FixedDepth, compared, every_engine, piece
from freewheel.config import AUTO_DEPTHS
from freewheel.host import DepthPolicy


def test_a_fixed_depth_is_asked_and_told_as_the_policy_is() -> None:
    own = [name for name, member in vars(FixedDepth).items() if inspect.isfunction(member)]
    assert {"choose", "count", "took"} <= set(own)
    for name in own:
        expected = inspect.signature(vars(DepthPolicy)[name]).parameters.values()
        found = inspect.signature(vars(FixedDepth)[name]).parameters.values()
        assert [(p.name, p.kind, p.default) for p in found] == [
            (p.name, p.kind, p.default) for p in expected
        ]


def test_the_comparison_runs_and_its_tokens_are_the_same_at_every_depth() -> None:
    one = piece("prose copy", 2, 2, 4, 0.8, 0)
    row = compared("short", [one], every_engine())
    assert row["tokens"] == 8 and row["differing_pieces"] == 0
    assert row["rate"].keys() == {"none", *map(str, AUTO_DEPTHS), "auto"}
    assert row["best_fixed"] in AUTO_DEPTHS
