# SPDX-License-Identifier: Apache-2.0
"""Another rank builds what rank 0 builds, whatever the options."""

from __future__ import annotations

from dataclasses import fields

from freewheel.config import EngineConfig
from freewheel.runtime.describe import describe, read_description


def test_an_engine_is_described_with_every_option() -> None:
    plain = EngineConfig(model="demo")
    role = EngineConfig(model="demo", role="decode", kv_peers=("one", "two:3"), speculate="auto")
    disk = EngineConfig(
        model="demo", host_cache_gb=1.0, disk_cache_gb=2.0, canary=3, strict=True, perturb=5
    )
    for config in (plain, role, disk):
        assert read_description(describe(config, config.ladder(), 0.5)) == (
            config, config.ladder(), 0.5,
        )  # fmt: skip
    tuples = {one.name for one in fields(EngineConfig) if isinstance(vars(plain)[one.name], tuple)}
    assert tuples == {"kv_peers"}, "a value of each belongs in this test"
