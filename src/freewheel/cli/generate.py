# SPDX-License-Identifier: Apache-2.0
"""`freewheel generate`: continue a prompt."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from freewheel.cli import options as o
from freewheel.cli.sampling import takes_sampling
from freewheel.cli.terminal import (
    ACCEPTED,
    is_typed,
    messages,
    open_llm,
    read_first,
    read_input,
    write_json,
    write_pieces,
    write_prompt,
)
from freewheel.config import MAX_RUN_AHEAD, EngineConfig
from freewheel.errors import RequestError
from freewheel.spec import SamplingParams

if TYPE_CHECKING:
    from freewheel import LLM, Chunk, Logprobs, Metrics


RATE_SECONDS = 0.1
"""From which on a time has a rate, however few letters came in it."""

SEED_BITS = 32
"""Of a seed that is drawn: few enough to be typed again."""

PromptText = Annotated[
    str | None, typer.Option(help="The text to continue; - or none reads standard input.")
]


@takes_sampling
def generate(
    model: o.Model,
    prompt: PromptText = None,
    *,
    params: SamplingParams,
    speculate: o.Speculate = "3",
    drafter: o.Drafter = "auto",
    device: o.Device = "auto",
    graph: o.Graph = "auto",
    run_ahead: o.RunAhead = 2,
    chunk: o.Chunk = 256,
    context_len: o.ContextLen = None,
    dtype: o.Dtype = "auto",
    kv_cache_dtype: o.KvCacheDtype = "auto",
    host_cache_gb: o.HostCacheGb = 0.0,
    disk_cache_gb: o.DiskCacheGb = 0.0,
    disk_cache_dir: o.DiskCacheDir = None,
    canary: o.Canary = "off",
    strict: o.Strict = False,
    perturb: o.Perturb = 0,
    perturb_seed: o.PerturbSeed = 0,
    threads: o.Threads = 1,
    deterministic: o.Deterministic = False,
    tp: o.Tp = 1,
    dp: o.Dp = 1,
    ep: o.Ep = False,
    check_ranks: o.CheckRanks = False,
    json: o.Json = False,
) -> None:
    """Continue a prompt. The answer streams; on a terminal, accepted drafts are green."""
    given: dict[str, Any] = locals()
    text = read_prompt(prompt)
    options = {one.name: given[one.name] for one in fields(EngineConfig) if one.name in given}
    options |= {"speculate": o.depth(speculate), "canary": o.canary(canary)}
    llm = open_llm(**options, prompt=text, max_batch=1, prefill_batch=1, guard=json)
    _answer(llm, text, params, json)


def _answer(llm: LLM, text: str, params: SamplingParams, json: bool) -> None:
    """A sampled answer without a seed is given one that is told, so that it can be repeated."""
    drawn = params.temperature > 0 and params.seed is None
    if drawn:
        params = replace(params, seed=secrets.randbits(SEED_BITS))
    llm.check_room(text, params)
    if json:
        write_json(answer_object(llm, list(llm.stream(text, params))) | {"seed": params.seed})
        return
    show(llm, text, params)
    if drawn:
        messages.print(f"[dim]--seed {params.seed} gives this answer again", highlight=False)


def read_prompt(prompt: str | None) -> str:
    """The option's text, or all of standard input. Raises RequestError if the latter is empty.

    An empty option is passed on: the tokenizer may put a begin token before it.
    """
    if prompt is None and is_typed():
        raise RequestError("prompt", "give --prompt TEXT, or pipe the text in")
    if prompt is not None and prompt != "-":
        return prompt
    text = read_input()
    if not text:
        raise RequestError("prompt", "standard input is empty; pipe text in or give --prompt TEXT")
    return text


def show(llm: LLM, text: str, params: SamplingParams) -> str:
    """Stream an answer to the terminal and a summary to standard error; returns the answer.

    Log-probabilities, if asked for, come on standard error before the summary.
    """
    tokens = len(llm.tokenizer.encode_prompt(text))
    said, chunks = "", read_first(llm, tokens, llm.stream(text, params))
    scores: list[Logprobs] = []
    write_prompt(text)
    for chunk in chunks:
        said += chunk.text
        scores += chunk.logprobs or ()
        write_pieces(chunk.pieces)
        if chunk.metrics is not None:
            sys.stdout.write("\n")
            sys.stdout.flush()
            show_logprobs(llm, "prompt", chunk.prompt_logprobs)
            show_logprobs(llm, "answer", tuple(scores) if params.logprobs is not None else None)
            messages.print(summary(chunk.metrics), soft_wrap=True)
    return said


def show_logprobs(llm: LLM, what: str, logprobs: tuple[Logprobs | None, ...] | None) -> None:
    """One line a token: its log-probability, itself, and the likeliest in its place."""
    if logprobs is None:
        return
    messages.print(Text(f"log-probabilities of the {what}", style="dim"))
    for one in logprobs:
        if one is None:
            messages.print(Text("     none  the first token"))
            continue
        line = f"{one.logprob:9.4f}  {spelt(llm, one.token_id)}"
        others = ", ".join(f"{spelt(llm, token)} {value:.4f}" for token, value in one.top)
        messages.print(Text.assemble(line, (f"  {others}", "dim")), soft_wrap=True)


def spelt(llm: LLM, token: int) -> str:
    """A token's text in quotes."""
    return repr(llm.tokenizer.decode([token], skip_special_tokens=False))


def logprob_objects(
    llm: LLM, logprobs: Iterable[Logprobs | None]
) -> list[dict[str, object] | None]:
    """What `--json` prints of log-probabilities."""
    return [
        None
        if one is None
        else {
            "token_id": one.token_id,
            "text": llm.tokenizer.decode([one.token_id], skip_special_tokens=False),
            "logprob": round(one.logprob, 6),
            "top": [{"token_id": t, "logprob": round(value, 6)} for t, value in one.top],
        }
        for one in logprobs
    ]


def summary(metrics: Metrics) -> Text:
    """One line about a finished request. It says in their colour which text accepted drafts are."""
    rate = rate_after_first(metrics)
    then = "" if rate is None else f", then {rate:.0f} tokens/s"
    return Text.assemble(
        (
            f"{metrics.completion_tokens} tokens in {metrics.rounds} rounds, "
            f"{metrics.tokens_per_round:.2f} a round ({metrics.accepted} of {metrics.drafted} ",
            "dim",
        ),
        ("drafts accepted", ACCEPTED),
        (f"); first after {metrics.first_token_seconds:.2f} s{then}", "dim"),
    )


def rate_after_first(metrics: Metrics) -> float | None:
    """Tokens a second from the first letter with tokens to the last; None: there is no such rate.

    Letters of rounds that were under way at once may be read at once, so the time between a few of
    them is the host's and says nothing of rounds. Either more rounds than can be under way follow
    the first, or RATE_SECONDS pass.
    """
    if metrics.rounds < 2:
        return None
    first, last = metrics.arrivals[0], metrics.arrivals[-1]
    seconds = last.seconds - first.seconds
    if seconds <= 0 or (metrics.rounds <= MAX_RUN_AHEAD + 2 and seconds < RATE_SECONDS):
        return None
    return (metrics.completion_tokens - first.tokens) / seconds


def answer_object(llm: LLM, chunks: list[Chunk]) -> dict[str, object]:
    """What `--json` prints of a finished request. `host_reads` is what the guard counted."""
    last = chunks[-1]
    assert last.metrics is not None
    metrics = last.metrics
    scores: dict[str, object] = {}
    if last.logprobs is not None:
        every = [one for chunk in chunks for one in chunk.logprobs or ()]
        scores["logprobs"] = logprob_objects(llm, every)
    if last.prompt_logprobs is not None:
        scores["prompt_logprobs"] = logprob_objects(llm, last.prompt_logprobs)
    return {
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token for chunk in chunks for token in chunk.token_ids],
        "finish_reason": last.finish_reason,
        "prompt_tokens": metrics.prompt_tokens,
        "cached_tokens": metrics.cached_tokens,
        "cached_host_tokens": metrics.cached_host_tokens,
        "cached_disk_tokens": metrics.cached_disk_tokens,
        "completion_tokens": metrics.completion_tokens,
        "rounds": metrics.rounds,
        "tokens_per_round": round(metrics.tokens_per_round, 4),
        "drafted": metrics.drafted,
        "accepted": metrics.accepted,
        "host_reads": len(llm.executor.sync_log.reads),
        "first_token_seconds": round(metrics.first_token_seconds, 4),
        "total_seconds": round(metrics.total_seconds, 4),
    } | scores
