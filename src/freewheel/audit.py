# SPDX-License-Identifier: Apache-2.0
"""Proof that rounds leave the host alone: run a mixed batch under the guard and count.

`no_host_sync` is for anyone's PyTorch code: inside it, a host read raises HostSync, naming the
file and line.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from freewheel.engine import LLM
from freewheel.errors import HostSync
from freewheel.graph import count_host_reads, no_host_sync
from freewheel.runtime import traced
from freewheel.spec import SamplingParams

__all__ = ["AuditReport", "ProfilerCounts", "audit", "count_host_reads", "no_host_sync"]

PROFILED_IDLE = 3
"""Rounds whose kernels are counted. Every row is padding; a graph's kernels are always the same."""


@dataclass(frozen=True)
class ProfilerCounts:
    """What PyTorch's profiler, by CUPTI, saw of `rounds` rounds of mixed requests.

    `waits`: calls that made the host wait for a stream or a value.
    """

    rounds: int
    uploads_per_round: float
    downloads_per_round: float
    graph_launches_per_round: float
    waits: int

    @property
    def expectations(self) -> tuple[tuple[str, float, float], ...]:
        """(what, found, due)."""
        return (
            ("uploads a round by the profiler", self.uploads_per_round, 1),
            ("downloads a round by the profiler", self.downloads_per_round, 1),
            ("graph launches a round by the profiler", self.graph_launches_per_round, 1),
            ("waits by the profiler", self.waits, 0),
        )


@dataclass(frozen=True)
class AuditReport:
    """What crossed between host and device while `rounds` rounds ran.

    `sites`: where the reads and the copies besides the letters came from. `kernels_per_round`: of
    the widest decoding round, the kernels that the profiler saw in its CUDA graph, or the calls of
    its tape; None where rounds run eagerly. `profiler`: the same counts again, where rounds are
    CUDA graphs.
    """

    rounds: int
    host_reads: int
    unplanned_copies: int
    uploads_per_round: float
    downloads_per_round: float
    graph_launches_per_round: float
    kernels_per_round: int | None
    tokens: int
    sites: tuple[str, ...]
    profiler: ProfilerCounts | None = None

    @property
    def passed(self) -> bool:
        """No read, no copy but one letter each way, one graph a round."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """What is not as `passed` demands, in words."""
        counts = (
            ("host reads", self.host_reads, 0),
            ("copies besides letters", self.unplanned_copies, 0),
            ("uploads a round", self.uploads_per_round, 1),
            ("downloads a round", self.downloads_per_round, 1),
            ("graph launches a round", self.graph_launches_per_round, 1),
            *(() if self.profiler is None else self.profiler.expectations),
        )
        return tuple(f"{name}: {n:g}, not {due}" for name, n, due in counts if n != due)

    @property
    def verdict(self) -> str:
        """One line: `passed: ...` or `failed: ...`."""
        if self.passed:
            return "passed: no host read, one letter each way, one graph a round"
        return f"failed: {'; '.join(self.failures)}"


def audit(llm: LLM, rounds: int, seed: int = 0) -> AuditReport:
    """Run at least `rounds` rounds of requests of mixed length and sampling.

    Batches that ask for nothing special alternate with batches that ask for all kinds of things.

    The engine must have been made with `guard=True`. A read that a capture refuses ends the run
    and is reported with what had run until then.
    """
    counters, log = llm.executor.counters, llm.executor.sync_log
    start = (counters.rounds, counters.uploads, counters.downloads, counters.graph_launches)
    tokens = 0
    refused: list[str] = []
    kinds = itertools.cycle([mixed_requests(llm, seed, ask) for ask in (False, True)])
    try:
        while counters.rounds - start[0] < rounds:
            requests = next(kinds)
            batch = [next(requests) for _ in range(2 * llm.config.max_batch)]
            outputs = llm.generate([ids for ids, _ in batch], [params for _, params in batch])
            tokens += sum(len(output.token_ids) for output in outputs)
    except HostSync as error:
        refused.append(str(error))
    ran = counters.rounds - start[0]
    reads = [f"{read.op} at {read.file}:{read.line}" for read in log.reads]
    copies = [f"{copy.op} at {copy.file}:{copy.line}" for copy in log.copies]
    return AuditReport(
        rounds=ran,
        host_reads=len(reads) + len(refused),
        unplanned_copies=len(copies),
        uploads_per_round=(counters.uploads - start[1]) / max(ran, 1),
        downloads_per_round=(counters.downloads - start[2]) / max(ran, 1),
        graph_launches_per_round=(counters.graph_launches - start[3]) / max(ran, 1),
        kernels_per_round=None if refused else count_kernels(llm),
        tokens=tokens,
        sites=tuple(dict.fromkeys([*refused, *reads, *copies])),
        profiler=None if refused else profile_rounds(llm, requests),
    )


def count_kernels(llm: LLM) -> int | None:
    """Of one decoding round at the full batch: kernels of its CUDA graph, or calls of its tape."""
    widest = llm.built.ladder.decode[-1]
    if llm.built.resolved.graph != "cuda":
        return llm.executor.calls(widest)
    trace = traced(lambda: llm.executor.idle_rounds(widest, PROFILED_IDLE))
    return len(trace.kernels) // PROFILED_IDLE


def profile_rounds(
    llm: LLM, requests: Iterator[tuple[list[int], SamplingParams]]
) -> ProfilerCounts | None:
    """Serve some requests under the profiler; None unless rounds are CUDA graphs."""
    if llm.built.resolved.graph != "cuda":
        return None
    batch = [next(requests) for _ in range(2 * llm.config.max_batch)]
    before = llm.executor.counters.rounds
    trace = traced(lambda: llm.generate([ids for ids, _ in batch], [each for _, each in batch]))
    rounds = llm.executor.counters.rounds - before
    return ProfilerCounts(
        rounds=rounds,
        uploads_per_round=trace.uploads / rounds,
        downloads_per_round=trace.downloads / rounds,
        graph_launches_per_round=trace.graph_launches / rounds,
        waits=trace.waits,
    )


def mixed_requests(llm: LLM, seed: int, ask: bool) -> Iterator[tuple[list[int], SamplingParams]]:
    """Endless requests: short and long prompts, greedy and sampled, short and long answers.

    If they `ask`, three of four want more than a filtered choice: some of everything, structured
    output included where what it needs is installed.
    """
    rng = random.Random(seed)
    installed = all(find_spec(name) is not None for name in ("outlines_core", "llguidance"))
    structured = installed and bool(llm.spec.eos_ids)
    room = llm.context_len // 2
    while True:
        length = min(room, rng.choice([1, 2, 7, 30, 63, 64, 65, 150, 400]))
        prompt = [rng.randrange(llm.spec.vocab_size) for _ in range(length)]
        yield (
            prompt,
            SamplingParams(
                temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
                top_k=rng.choice([0, 20]),
                top_p=rng.choice([1.0, 0.9]),
                seed=rng.randrange(2**32),
                max_tokens=min(room, rng.choice([1, 5, 40, 120])),
                **wishes(rng, llm.spec.vocab_size, ask, structured),
            ),
        )


def wishes(rng: random.Random, vocabulary: int, ask: bool, structured: bool) -> dict[str, Any]:
    """Sampling parameters that need rounds which do more than choose, drawn at random."""
    if not ask or rng.random() < 0.25:
        return {"ignore_eos": rng.random() < 0.7}
    found: dict[str, Any] = {
        "presence_penalty": rng.choice([0.0, 0.6]),
        "frequency_penalty": rng.choice([0.0, 0.4]),
        "repetition_penalty": rng.choice([1.0, 1.2]),
        "logit_bias": {rng.randrange(vocabulary): 2.0, rng.randrange(vocabulary): -5.0},
        "bad_words": rng.choice([(), ("the", "was not")]),
        "logprobs": rng.choice([None, 0, 5]),
        "prompt_logprobs": rng.choice([None, None, 3]),
    }
    if structured and rng.random() < 0.4:
        form = rng.choice([{"choice": ("yes", "no", "yes and no")}, {"json_object": True}])
        return found | {"bad_words": ()} | form
    allowed = tuple(range(0, vocabulary, 2)) if rng.random() < 0.2 else None
    return found | {"ignore_eos": rng.random() < 0.7, "allowed_token_ids": allowed}
