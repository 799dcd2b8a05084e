# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/bench_depth.py`, which runs seldom, keeps to the policy that it stands in for."""

from __future__ import annotations

import inspect

from benchmarks.bench_depth import FixedDepth
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
