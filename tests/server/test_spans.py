# SPDX-License-Identifier: Apache-2.0
"""Spans: one an answer, in the client's trace, and never in the way of one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from freewheel.errors import ConfigError
from freewheel.server.settings import ServerSettings
from freewheel.server.spans import Spans
from freewheel.server.tickets import Ticket
from freewheel.spec import FinishReason, SamplingParams
from tests.server.running import Running
from tests.waiting import wait_for

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Takes what is exported to it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for one in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in one.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1/traces"


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    with made.http:
        Thread(target=made.http.serve_forever, daemon=True).start()
        yield made
        made.http.shutdown()


@pytest.mark.slow
def test_each_answer_is_a_span_of_its_clients_trace(log: Path, collector: Collector) -> None:
    with Running(log, "--otlp-endpoint", collector.url) as server:
        server.wait_until_ready()
        body = {"prompt": "Emma was", "max_tokens": 5, "n": 2, "ignore_eos": True}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        bad = {"traceparent": "00-no-trace-01\r\n".strip()}
        assert server.http.post("/v1/completions", json=body, headers=bad).status_code == 200
        wait_for("four spans", lambda: len(collector.spans) == 4)
    ours = [span for span in collector.spans if span.trace_id.hex() == TRACE]
    assert len(ours) == 2 and all(span.parent_span_id.hex() == PARENT for span in ours)
    for span in ours:
        found = {one.key: one.value for one in span.attributes}
        assert found["gen_ai.usage.output_tokens"].int_value == 5
        assert found["gen_ai.response.finish_reason"].string_value == "length"
        (event,) = span.events
        assert span.start_time_unix_nano < event.time_unix_nano <= span.end_time_unix_nano


@pytest.mark.slow
def test_a_collector_that_is_away_costs_no_answer(log: Path) -> None:
    with Running(log, "--otlp-endpoint", "http://127.0.0.1:9/v1/traces") as server:
        server.wait_until_ready()
        for _ in range(3):
            assert server.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200


def test_a_span_has_the_times_and_the_failure_of_its_ticket() -> None:
    exporter = InMemorySpanExporter()
    spans = Spans("m", exporter)
    ticket = Ticket("1", [1, 2, 3], SamplingParams(max_tokens=4), asyncio.Queue())
    ticket.first, ticket.tokens, ticket.drafted, ticket.accepted = ticket.opened + 0.25, 3, 6, 2
    spans.end(ticket, FinishReason.ERROR)
    spans.close()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None and span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None and span.start_time is not None
    assert span.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(0.25)
    assert span.attributes["gen_ai.usage.accepted_tokens"] == 2
    assert span.events[0].timestamp - span.start_time == pytest.approx(0.25e9, rel=1e-3)


def test_a_collector_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        ServerSettings(model_name="m", otlp_endpoint="collector:4318")
