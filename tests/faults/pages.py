# SPDX-License-Identifier: Apache-2.0
"""Pages, page tables and tokens that turn over by themselves, and files that do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from freewheel import FinishReason
from freewheel.host.alarm import PATIENCE as STRIKES
from freewheel.runtime.files import FileStore
from tests.faults.seen import ENGINE_ERROR, Seen, Strike
from tests.program.test_canary import PROMPT, Watched, begin, decoding, disturbed, finish
from tests.program.test_disk import ask, disk_of, files, harmed, settle, small, store_of, tokens
from tests.program.test_tier import turns


def folder_of(request: pytest.FixtureRequest) -> Path:
    folders: dict[str, Path] = request.getfixturevalue("folders")
    return folders["t32"]


def damage(request: pytest.FixtureRequest) -> Seen:
    """Again and again, of sorts and in places drawn by lot."""
    seen = Seen()
    assert disturbed(folder_of(request), 6, run_ahead=2, seed=0) >= 6
    return seen.over()


def strict_canary(request: pytest.FixtureRequest) -> Seen:
    """It ends the request alone, and says so once."""
    caplog: pytest.LogCaptureFixture = request.getfixturevalue("caplog")
    llm = Watched(folder_of(request), strict=True).llm
    victim, other = begin(llm, PROMPT), begin(llm, [5, 6, 9])
    decoding(llm, victim)
    row, seen = decoding(llm, other), Seen()
    assert victim.request.row is not None
    with caplog.at_level(logging.ERROR, "freewheel.canary"):
        llm.executor.state.page_tables[0, victim.request.row, 1] += 1
        finish(llm)
    assert other.request.finish is FinishReason.LENGTH and row == 2
    assert len(caplog.records) == 1 and "page_table" in caplog.text
    return seen.over(ENGINE_ERROR if victim.request.finish is FinishReason.ERROR else None)


def struck_without_end(request: pytest.FixtureRequest) -> Seen:
    """It is given up in the end."""
    llm = Watched(folder_of(request), run_ahead=0, prefix_cache=False).llm
    launch = llm.executor.launch

    def damaging(plan: Any) -> None:
        for row in plan.rows:
            llm.executor.state.tokens[row, 0] += int(llm.executor.state.computed_lens[row]) > 0
        launch(plan)

    llm.executor.launch = damaging  # type: ignore[method-assign]
    live, seen = begin(llm, PROMPT), Seen()
    finish(llm)
    assert llm.alarm.counts["tokens"] == STRIKES + 1
    return seen.over(ENGINE_ERROR if live.request.finish is FinishReason.ERROR else None)


def harmed_files(harm: str) -> Strike:
    """They are computed anew, and counted."""

    def strike(request: pytest.FixtureRequest) -> Seen:
        folder, prompts = folder_of(request), turns(5, 5)
        place: Path = request.getfixturevalue("tmp_path") / "blocks"
        llm = small(folder, place)
        first = ask(llm, prompts)
        settle(llm)
        seen = Seen()
        for path in files(place):
            after = harmed(path.read_bytes(), harm)
            path.unlink() if after is None else path.write_bytes(after)
        assert tokens(ask(llm, prompts)) == tokens(first)
        seen.over()
        assert disk_of(llm).counts.damaged > 0
        settle(llm)
        store_of(llm).close()
        assert tokens(ask(small(folder, place), prompts)) == tokens(first)
        return seen

    return strike


def full_disk(request: pytest.FixtureRequest) -> Seen:
    place: Path = request.getfixturevalue("tmp_path") / "blocks"
    patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    llm, prompts = small(folder_of(request), place), turns(8, 6)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    patch.setattr(FileStore, "_write", full)
    first, seen = ask(llm, prompts), Seen()
    settle(llm)
    assert tokens(ask(llm, prompts)) == tokens(first)
    assert disk_of(llm).counts.failed > 0 and not files(place)
    return seen.over()
