# SPDX-License-Identifier: Apache-2.0
"""A span of OpenTelemetry for every answer, sent to the collector that the operator names.

Attributes follow OpenTelemetry's conventions for generative AI, whose status is "development";
latencies have the names that vLLM gives them. Needs the `otel` extra.
"""

from __future__ import annotations

import time

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import freewheel
from freewheel.server.tickets import Ticket
from freewheel.spec import FinishReason


class Spans:
    """Sends in a thread of its own; a collector that is away costs spans and nothing else."""

    def __init__(self, model_name: str, exporter: SpanExporter) -> None:
        resource = Resource({"service.name": "freewheel", "service.version": freewheel.__version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("freewheel.server")
        self._model = model_name
        self._propagator = TraceContextTextMapPropagator()

    def end(self, ticket: Ticket, reason: FinishReason) -> None:
        """The answer has ended: its span is made now, with the times that were noted."""
        clock = time.time_ns() - time.perf_counter_ns()
        span = self._tracer.start_span(
            f"text_completion {self._model}",
            context=self._propagator.extract({"traceparent": ticket.trace_parent}),
            kind=trace.SpanKind.SERVER,
            start_time=clock + _nanoseconds(ticket.opened),
            attributes=self._attributes(ticket, reason),
        )
        if ticket.first is not None:
            span.add_event("first_token", timestamp=clock + _nanoseconds(ticket.first))
        if reason is FinishReason.ERROR:
            span.set_status(trace.StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Send what is left, as far as the collector takes it."""
        self._provider.shutdown()

    def _attributes(self, ticket: Ticket, reason: FinishReason) -> dict[str, str | int | float]:
        params = ticket.params
        found: dict[str, str | int | float] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": self._model,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.response.finish_reason": reason,
            "gen_ai.usage.input_tokens": len(ticket.prompt),
            "gen_ai.usage.output_tokens": ticket.tokens,
            "gen_ai.usage.cached_tokens": ticket.cached_tokens,
            "gen_ai.usage.drafted_tokens": ticket.drafted,
            "gen_ai.usage.accepted_tokens": ticket.accepted,
            "gen_ai.latency.e2e": time.perf_counter() - ticket.opened,
        }
        if params.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = params.max_tokens
        if ticket.first is not None:
            found["gen_ai.latency.time_to_first_token"] = ticket.first - ticket.opened
        if ticket.queued_seconds is not None:
            found["gen_ai.latency.time_in_queue"] = ticket.queued_seconds
        return found


def spans_to(endpoint: str, model_name: str) -> Spans:
    """To a collector that takes OTLP over HTTP at this address."""
    return Spans(model_name, OTLPSpanExporter(endpoint=endpoint))


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
