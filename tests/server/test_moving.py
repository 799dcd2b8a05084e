# SPDX-License-Identifier: Apache-2.0
"""The tables for those who come from other servers, against the routes and metrics of this one."""

from __future__ import annotations

import re

import pytest

from freewheel.spec.elsewhere import Row, service
from tests.server.running import Running

ALIASES = {"/ping"}
"""Served, but told of by their other name in the document."""


@pytest.fixture(scope="module")
def paths(server: Running) -> set[str]:
    return ALIASES | set(server.http.get("/openapi.json").json()["paths"])


def rows() -> list[Row]:
    return list(service.ADDRESSES[1])


def test_addresses_that_are_named_are_there(paths: set[str]) -> None:
    assert {row.ours for row in rows() if row.ours} <= paths


@pytest.mark.parametrize(
    "path", [path for row in rows() for path in row.theirs], ids=lambda path: path
)
def test_an_address_of_theirs_is_served_or_answered(
    server: Running, paths: set[str], path: str
) -> None:
    row = next(one for one in rows() if path in one.theirs)
    found = server.http.post(path)
    if path in ALIASES:
        assert found.status_code == 200 and row.ours
        return
    if path in paths:
        assert found.status_code in (400, 405) and row.ours
        return
    assert found.status_code in (404, 501)
    said = found.json()["error"]["message"]
    assert row.note in said and row.ours in said


def test_metrics_that_are_named_are_there(server: Running) -> None:
    assert server.post("/v1/completions", prompt="Emma was", max_tokens=4).status_code == 200
    text = server.http.get("/metrics").text
    named = {row.ours for row in service.METRICS[1] if row.ours}
    known = set(re.findall(r"^# TYPE freewheel:(\S+) ", text, re.MULTILINE))
    assert {name for name in named if name not in known} == set()
    notes = " ".join(row.note for row in service.METRICS[1])
    said = {name for name in re.findall(r"[a-z]+(?:_[a-z]+)+", notes) if name != "finished_reason"}
    assert said <= known
