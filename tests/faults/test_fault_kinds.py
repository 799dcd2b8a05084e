# SPDX-License-Identifier: Apache-2.0
"""Every kind of fault of the list strikes: its request is told what the list says, others see what
it says, and all is over in the time that it gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from freewheel import LLM
from tests.faults.kinds import KINDS, LIST, with_table
from tests.faults.rounds import Want, undisturbed, whole_engine
from tests.faults.seen import Kind
from tests.faults.server import SHORT, running_server
from tests.server.running import Running


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> LLM:
    return whole_engine(folders)


@pytest.fixture(scope="module")
def want(llm: LLM) -> Want:
    return undisturbed(llm)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def struck(folder: Path) -> Iterator[Running]:
    with running_server(folder) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture
def whole(struck: Running) -> Iterator[Running]:
    """Behind each fault the same server answers as before, and every page is home."""
    want = struck.post("/v1/completions", **SHORT).json()["choices"]
    yield struck
    struck.wait_until_ready()
    assert struck.post("/v1/completions", **SHORT).json()["choices"] == want
    struck.wait_until_idle()


def case(kind: Kind) -> object:
    rare = [pytest.mark.exhaustive] if kind.rare else []
    return pytest.param(kind, id=kind.name, marks=[*rare, *([pytest.mark.slow] * kind.slow)])


@pytest.mark.parametrize("kind", [case(kind) for kind in KINDS])
def test_a_fault_is_told_as_the_list_says_and_over_in_its_time(
    kind: Kind, request: pytest.FixtureRequest
) -> None:
    seen = kind.strike(request)
    assert (seen.told, seen.others) == (kind.told, kind.others)
    assert kind.within is None or seen.seconds < kind.within


def test_the_list_names_every_kind_once() -> None:
    names = [kind.name for kind in KINDS]
    assert len(names) == len(set(names)) >= 45
    text = LIST.read_text("utf-8")
    assert with_table(text) == text, "write it anew: python -m tests.faults.kinds"
