# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document, and requests made from it: none of them may be the server's fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode

from tests.server.running import Running
from tests.waiting import PATIENCE

PATHS = {
    "/generate",
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/debug/round",
    "/debug/rounds",
    "/debug/selection",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/v1/models/{name}",
    "/v1/loads",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
}
LIMITS = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "n": 2}
"""A good request is made short: it is the way in that is tested here."""


def shorten(body: Any) -> Any:
    """The same body with limits that keep an answer short, where they are numbers at all."""
    if not isinstance(body, dict):
        return body
    cut = dict(body)
    if "sampling_params" in cut or {"text", "input_ids"} & cut.keys():
        given = cut.get("sampling_params")
        if given is None:
            return cut | {"sampling_params": {"max_new_tokens": 4}}
        return cut | {"sampling_params": _short(given)}
    for name, limit in LIMITS.items():
        if isinstance(cut.get(name), int | float) and cut[name] > limit:
            cut[name] = limit
    if not {"max_tokens", "max_output_tokens"} & cut.keys():
        cut["max_output_tokens" if "input" in cut else "max_tokens"] = 4
    return cut


def _short(given: Any) -> Any:
    """SGLang's sampling parameters, one or several."""
    if isinstance(given, list):
        return [_short(one) for one in given]
    if not isinstance(given, dict):
        return given
    most = {"n": 2, "max_new_tokens": 4}
    shorter = {k: v for k, v in most.items() if isinstance(given.get(k), int | float)}
    return (
        given
        | {"max_new_tokens": given.get("max_new_tokens", 4)}
        | {name: min(value, given[name]) for name, value in shorter.items()}
    )


def check_operation(server: Running, operation: Any, mode: GenerationMode, cases: int) -> int:
    """Make up to so many requests; returns how many there were to make."""
    made = 0

    def run(case: Any) -> None:
        nonlocal made
        made += 1
        if case.path.startswith(("/v1/", "/generate")) and case.method == "POST":
            case.body = shorten(case.body)
        found = case.call(base_url=server.url, timeout=PATIENCE)
        assert found.status_code < 500 or found.status_code == 501, (case.body, found.text)

    decorate: Callable[[Any], Any] = settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
        ],
    )
    decorate(given(operation.as_strategy(generation_mode=mode))(run))()
    return made


_FOUND: dict[str, dict[str, Any]] = {}


def operations(server: Running) -> dict[str, Any]:
    """By path; read once for each server."""
    if server.url not in _FOUND:
        _FOUND[server.url] = _operations(server)
    return _FOUND[server.url]


def _operations(server: Running) -> dict[str, Any]:
    document = server.http.get("/openapi.json").json()
    schema: Any = schemathesis.openapi.from_dict(document)
    every = [one.ok() for one in schema.get_all_operations()]
    return {one.path: one for one in every}


def test_the_document_names_every_endpoint(server: Running) -> None:
    assert set(operations(server)) == PATHS


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", sorted(PATHS - {"/metrics", "/v1/models/{name}"}))
def test_no_request_is_the_servers_fault(server: Running, path: str, mode: GenerationMode) -> None:
    found = operations(server)[path]
    if found.body or mode is GenerationMode.POSITIVE:
        check_operation(server, found, mode, 8 if found.body else 1)
    server.wait_until_idle()


CASES = {
    "/generate": (200, 450),
    "/tokenize": (600, 250),
    "/detokenize": (600, 600),
    "/v1/completions": (200, 450),
    "/v1/chat/completions": (500, 450),
    "/v1/messages": (200, 200),
    "/v1/messages/count_tokens": (250, 150),
    "/v1/responses": (200, 600),
}
"""Requests by the document, and against it: more where one costs less."""


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.25, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_thousands_of_requests_are_not_the_servers_fault(server: Running, share: float) -> None:
    made: Counter[str] = Counter()
    for path, counts in CASES.items():
        for mode, most in zip(GenerationMode, counts, strict=True):
            cases = round(share * most)
            made[path] += check_operation(server, operations(server)[path], mode, cases)
    server.wait_until_idle()
    print(dict(made))
    assert server.http.get("/ready").json() == {"ready": True, "engine": "ready", "restarts": 0}
    assert made.total() >= 5000 * share, made
