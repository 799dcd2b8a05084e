# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics: vLLM's names where vLLM has one, so that its dashboards work.

`request_prefill_time_seconds` and the like are taken on the HTTP side, where a client would see
them; the engine's own counts come with each of its reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from freewheel.engine import CanaryLoad, DiskLoad, HandoffLoad, Load, PoolLoad, TierLoad
from freewheel.server.tickets import Ticket
from freewheel.server.wire import Step
from freewheel.spec import FinishReason

if TYPE_CHECKING:
    from freewheel.server.link import Link

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
Labelled = TypeVar("Labelled", Counter, Histogram)
STATES = ("free", "cached", "owned", "quarantined")


class ServerMetrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self._prefix, self._model = prefix, model_name
        self.registry = CollectorRegistry()
        self.first_token = self._histogram(
            "time_to_first_token_seconds",
            "From the request to its first token",
            FIRST_TOKEN_BUCKETS,
        )
        self.between = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of an answer", BETWEEN_BUCKETS
        )
        self.whole = self._histogram(
            "e2e_request_latency_seconds", "From the request to its last token", REQUEST_BUCKETS
        )
        self.queued = self._histogram(
            "request_queue_time_seconds", "Before the request got a row", REQUEST_BUCKETS
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "From a row to the first token", REQUEST_BUCKETS
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last", REQUEST_BUCKETS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens served")
        self.asked_tokens = self._counter("prefix_cache_queries", "Prompt tokens looked up")
        self.cached_tokens = self._counter("prefix_cache_hits", "Prompt tokens not computed anew")
        self.tier_tokens = self._counter(
            "external_prefix_cache_hits", "Of these, found below the device", "tier"
        )
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.drafts = self._counter("spec_decode_num_drafts", "Rounds with drafts, by request")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Drafts verified")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Drafts accepted")
        self.accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by place", "position"
        )
        self.success = self._counter("request_success", "Requests that ended", "finished_reason")
        self.rejections = self._counter("admission_rejections", "Requests refused", "reason")

    def step(self, ticket: Ticket, step: Step, before: float) -> None:
        """One letter for one request; `before`: when the one before it came."""
        if step.tokens:
            self._tokens(ticket, step, before)
        if step.cached_tokens is not None:
            self._of(self.asked_tokens).inc(len(ticket.prompt))
            self._of(self.cached_tokens).inc(step.cached_tokens)
            self._of(self.tier_tokens, "host").inc(step.cached_host_tokens)
            self._of(self.tier_tokens, "disk").inc(step.cached_disk_tokens)
        if step.queued_seconds is not None:
            self._of(self.queued).observe(step.queued_seconds)

    def end(self, ticket: Ticket, reason: FinishReason) -> None:
        """A request ended, by itself or because nobody waited for more."""
        self._of(self.success, reason).inc()
        if ticket.latest is not None and ticket.first is not None:
            self._of(self.whole).observe(ticket.latest - ticket.opened)
            self._of(self.decode).observe(ticket.latest - ticket.first)

    def rejected(self, reason: str) -> None:
        """A request was not taken on."""
        self._of(self.rejections, reason).inc()

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self.registry)

    def watch(self, link: Link) -> None:
        """Also show what the engine reports."""
        self.registry.register(EngineCollector(self._prefix, self._model, link))

    def _tokens(self, ticket: Ticket, step: Step, before: float) -> None:
        assert ticket.first is not None and ticket.latest is not None
        if ticket.tokens == len(step.tokens):
            self._of(self.prompt_tokens).inc(len(ticket.prompt))
            self._of(self.first_token).observe(ticket.first - ticket.opened)
            queued = ticket.queued_seconds or 0.0
            self._of(self.prefill).observe(max(ticket.first - ticket.opened - queued, 0.0))
        else:
            each = (ticket.latest - before) / len(step.tokens)
            for _ in step.tokens:
                self._of(self.between).observe(each)
        self._of(self.generation_tokens).inc(len(step.tokens))
        if step.drafted:
            self._of(self.drafts).inc()
            self._of(self.drafted).inc(step.drafted)
            self._of(self.accepted).inc(step.accepted)
        for place in range(step.accepted):
            self._of(self.accepted_at, str(place)).inc()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"{self._prefix}:{name}", text, ["model_name"], buckets=buckets, registry=self.registry
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(
            f"{self._prefix}:{name}", text, ["model_name", *labels], registry=self.registry
        )

    def _of(self, metric: Labelled, *labels: str) -> Labelled:
        return metric.labels(self._model, *labels)


class EngineCollector(Collector):
    """Read from the engine's last report when Prometheus asks."""

    def __init__(self, prefix: str, model_name: str, link: Link) -> None:
        self._prefix, self._model, self._link = prefix, model_name, link

    def collect(self) -> Iterator[Metric]:
        link, load = self._link, self._link.load
        yield self._gauge(
            "engine_up", "Whether requests can be served", float(link.ready is not None)
        )
        yield self._counter("engine_restarts", "Engine processes started anew", link.restarts)
        yield self._gauge("waiting_tokens", "Prompt tokens that wait", link.ledger.waiting_tokens)
        if load is None:
            return
        yield self._gauge("num_requests_running", "Requests with a row", load.running)
        yield self._gauge("num_requests_waiting", "Requests without a row", load.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of pages in use", usage_share(load.pages))
        yield self._counter(
            "num_preemptions", "Rows taken back for want of pages", load.preemptions
        )
        yield self._counter("rounds", "Rounds launched", load.rounds)
        yield self._counter("graph_replays", "Captured rounds replayed", load.graph_launches)
        yield self._counter(
            "late_compiles", "Graphs made while requests waited", load.late_captures
        )
        yield self._forms(load)
        if load.host_reads is not None:
            yield self._counter("host_reads", "Device values read in a round", load.host_reads)
        yield self._pages(load.pages)
        if load.tiers is not None:
            yield from self._tiers(load.tiers)
        if load.disk is not None:
            yield from self._disk(load.disk)
        if load.canary is not None:
            yield from self._canary(load.canary)
        if load.handoffs is not None:
            yield self._handoffs(load.handoffs)

    def _handoffs(self, handoffs: HandoffLoad) -> Metric:
        events = ("offered", "read", "dropped", "fetched", "failed")
        about = "Prompts that changed engines, or were to"
        return self._events("kv_handoffs", about, events, asdict(handoffs))

    def _events(
        self,
        name: str,
        about: str,
        events: tuple[str, ...],
        counts: Mapping[str, int],
        label: str = "event",
    ) -> Metric:
        """A counter of each of the events, which `counts` names."""
        family = CounterMetricFamily(f"{self._prefix}:{name}", about, labels=["model_name", label])
        for event in events:
            family.add_metric([self._model, event], counts[event])
        return family

    def _tiers(self, tiers: TierLoad) -> Iterator[Metric]:
        yield self._gauge("host_cache_blocks", "Blocks that host memory has room for", tiers.slots)
        yield self._gauge("host_cache_used_blocks", "Blocks in host memory", tiers.used)
        events = ("stored", "fetched", "evicted", "lost", "damaged")
        yield self._events("cache_tier_blocks", "Blocks copied", events, asdict(tiers))
        yield self._counter("host_cache_bytes_out", "Bytes copied there", tiers.bytes_out)
        yield self._counter("host_cache_bytes_in", "Bytes copied back", tiers.bytes_in)

    def _disk(self, disk: DiskLoad) -> Iterator[Metric]:
        yield self._gauge("disk_cache_blocks", "Blocks that files may hold", disk.blocks)
        yield self._gauge("disk_cache_used_blocks", "Blocks in files", disk.used)
        events = ("stored", "fetched", "evicted", "damaged", "failed")
        yield self._events("disk_cache_events", "Files of blocks", events, asdict(disk))
        yield self._counter("disk_cache_bytes_out", "Bytes written", disk.bytes_out)
        yield self._counter("disk_cache_bytes_in", "Bytes read", disk.bytes_in)

    def _canary(self, canary: CanaryLoad) -> Iterator[Metric]:
        kinds = ("kv", "page_table", "tokens")
        about = "Changes that the engine had not made"
        yield self._events("canary_violations", about, kinds, asdict(canary), "kind")
        yield self._counter("canary_quarantined_pages", "Pages out of use", canary.pages)

    def _forms(self, load: Load) -> Metric:
        about = "Requests of a stated form, by where they are held to it"
        counts = {"device": load.device_forms, "host": load.host_forms}
        return self._events("structured_requests", about, tuple(counts), counts, "form")

    def _pages(self, pools: tuple[PoolLoad, ...]) -> Metric:
        family = GaugeMetricFamily(
            f"{self._prefix}:kv_pages", "Cache pages", labels=["model_name", "group", "state"]
        )
        for pool in pools:
            counts = (pool.free, pool.cached, pool.owned, pool.quarantined)
            for state, count in zip(STATES, counts, strict=True):
                family.add_metric([self._model, pool.name, state], count)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family


def usage_share(pools: tuple[PoolLoad, ...]) -> float:
    """Share of the fullest group's pages that requests hold, 0 to 1."""
    return max((1 - (p.free + p.cached) / p.total for p in pools if p.total), default=0.0)
