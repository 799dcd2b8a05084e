# SPDX-License-Identifier: Apache-2.0
"""How fast an engine serves one fixed workload, for each batch and number of drafts.

Without a server: requests are queued in this process, a fixed number under way together (a closed
loop). The clock is read when the host has a round's letter. Keys of `summary` that vLLM's serving
benchmark has too are spelt as there, and mean the same, without the network between.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from freewheel.bench.plans import Workload
from freewheel.bench.statistics import spread
from freewheel.config import EngineConfig
from freewheel.engine import LLM, Arrival, Machine, Output, Resolved

WARM_UP_TOKENS = 8
"""Answer tokens of each request of the warm-up, at most."""


@dataclass(frozen=True)
class BenchRun:
    """One engine's run over the workload. Times in seconds.

    `load_seconds`: reading weights and making the engine. `capture_seconds`: making every graph.
    `warm_up_seconds`: short requests whose times do not count. `duration`: from before the first
    request is queued until the last letter is read; the rest excluded. `rounds`: launched in that
    time. `late_captures`: graphs made in that time, which must be 0. `differing_tokens`: output
    tokens that are not those of the first run.
    """

    batch: int
    speculate: int
    resolved: Resolved
    machine: Machine
    context_len: int
    load_seconds: float
    capture_seconds: float
    warm_up_seconds: float
    duration: float
    rounds: int
    late_captures: int
    outputs: tuple[Output, ...]
    differing_tokens: int


def bench(
    configs: Sequence[EngineConfig],
    workload: Workload,
    open_engine: Callable[..., LLM] = LLM,
) -> Iterator[BenchRun]:
    """Run the workload on each engine in turn; one engine exists at a time.

    `open_engine` takes the fields of EngineConfig. Raises RequestError if a request does not fit.
    """
    first: tuple[Output, ...] | None = None
    for config in configs:
        run = _run(config, workload, open_engine, first)
        first = first or run.outputs
        yield run
        gc.collect()  # an engine is part of a cycle, and the next one needs its memory


def _run(
    config: EngineConfig,
    workload: Workload,
    open_engine: Callable[..., LLM],
    first: tuple[Output, ...] | None,
) -> BenchRun:
    """One engine from its start to its last token."""
    times = [time.perf_counter()]
    llm = open_engine(**vars(config))
    prompts = workload.prompts(llm)
    times.append(time.perf_counter())
    llm.capture()
    times.append(time.perf_counter())
    few = slice(config.max_batch)
    short = workload.params(min(workload.max_tokens, WARM_UP_TOKENS))
    llm.generate(prompts[few], short[few])
    params, counters = workload.params(workload.max_tokens), llm.executor.counters
    rounds, late = counters.rounds, counters.late_captures
    times.append(time.perf_counter())
    outputs = tuple(llm.generate(prompts, params, at_once=config.max_batch))
    times.append(time.perf_counter())
    load, capture, warm_up, duration = (b - a for a, b in itertools.pairwise(times))
    return BenchRun(
        batch=config.max_batch,
        speculate=config.depth,
        resolved=llm.built.resolved,
        machine=Machine.here(llm.built.resolved.device),
        context_len=llm.context_len,
        load_seconds=load,
        capture_seconds=capture,
        warm_up_seconds=warm_up,
        duration=duration,
        rounds=counters.rounds - rounds,
        late_captures=counters.late_captures - late,
        outputs=outputs,
        differing_tokens=count_differing(first or outputs, outputs),
    )


def count_differing(ones: Sequence[Output], others: Sequence[Output]) -> int:
    """Token positions at which two runs of the same requests differ, missing tokens included."""
    return sum(
        a != b
        for one, other in zip(ones, others, strict=True)
        for a, b in itertools.zip_longest(one.token_ids, other.token_ids)
    )


def summary(run: BenchRun) -> dict[str, Any]:
    """Rates and times of a run, times in milliseconds unless the key says seconds.

    TTFT: from queueing a request to its first token. TPOT: for each request with several tokens,
    the time from its first token to its last over the number of tokens after the first. ITL: the
    time between the letters that brought a request tokens, of all requests together; a letter may
    bring several tokens. E2EL: from queueing to the last token. `tokens_per_round`: tokens over
    the rounds that decided any of a request's, the one that ended its prompt included.
    `mean_round_ms`: duration over all rounds launched, prompts' rounds included. A value is None
    if nothing was there to measure.
    """
    metrics = [output.metrics for output in run.outputs]
    arrivals = [m.arrivals for m in metrics]
    given = sum(m.prompt_tokens for m in metrics)
    made = sum(m.completion_tokens for m in metrics)
    return {
        "max_concurrency": run.batch,
        "speculate": run.speculate,
        "drafter": run.resolved.drafter,
        "load_seconds": run.load_seconds,
        "capture_seconds": run.capture_seconds,
        "warm_up_seconds": run.warm_up_seconds,
        "duration": run.duration,
        "completed": len(run.outputs),
        "total_input_tokens": given,
        "total_output_tokens": made,
        "request_throughput": len(run.outputs) / run.duration,
        "output_throughput": made / run.duration,
        "total_token_throughput": (given + made) / run.duration,
        **spread("ttft", [each[0].seconds for each in arrivals]),
        **spread("tpot", [t for each in arrivals for t in _token_seconds(each)]),
        **spread("itl", [gap for each in arrivals for gap in _letter_seconds(each)]),
        **spread("e2el", [each[-1].seconds for each in arrivals]),
        "tokens_per_round": made / sum(map(len, arrivals)),
        **_acceptance([arrival for each in arrivals for arrival in each], run.speculate),
        "rounds": run.rounds,
        "mean_round_ms": 1000 * run.duration / run.rounds,
        "late_captures": run.late_captures,
        "differing_tokens": run.differing_tokens,
    }


def _letter_seconds(arrivals: Sequence[Arrival]) -> Iterator[float]:
    """Seconds from each letter that brought tokens to the next."""
    return (after.seconds - before.seconds for before, after in itertools.pairwise(arrivals))


def _token_seconds(arrivals: Sequence[Arrival]) -> Iterator[float]:
    """Seconds for each token after the first, as one value; none if there is one token."""
    rest = sum(arrival.tokens for arrival in arrivals) - 1
    if rest:
        yield (arrivals[-1].seconds - arrivals[0].seconds) / rest


def _acceptance(arrivals: Sequence[Arrival], depth: int) -> dict[str, Any]:
    """What became of the drafts that were verified.

    `drafted_per_position[i]`: rounds that verified an (i + 1)-th draft of a request;
    `accepted_per_position[i]`: those that accepted it. Keys with `spec_decode` are vLLM's: the
    acceptance rate is in percent, rates per position are over all rounds that verified any draft.
    """
    speculative = [arrival for arrival in arrivals if arrival.drafted]
    drafted = sum(arrival.drafted for arrival in speculative)
    accepted = sum(arrival.accepted for arrival in speculative)
    place = range(1, depth + 1)
    reached = [sum(arrival.accepted >= p for arrival in speculative) for p in place]
    count = len(speculative)
    return {
        "drafted_per_position": [sum(a.drafted >= p for a in speculative) for p in place],
        "accepted_per_position": reached,
        "spec_decode_num_drafts": count,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else None,
        "spec_decode_acceptance_length": 1 + accepted / count if count else None,
        "spec_decode_per_position_acceptance_rates": [r / count for r in reached] if count else [],
    }
