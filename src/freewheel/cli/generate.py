# SPDX-License-Identifier: Apache-2.0
"""`freewheel generate`: continue a prompt."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.text import Text

from freewheel import LLM, Chunk, Metrics, SamplingParams
from freewheel.cli import options as o
from freewheel.cli.terminal import (
    ACCEPTED,
    is_typed,
    messages,
    open_llm,
    read_input,
    write_json,
    write_pieces,
    write_prompt,
)
from freewheel.errors import RequestError


def generate(
    model: o.Model,
    prompt: Annotated[
        str | None, typer.Option(help="The text to continue; - or none reads standard input.")
    ] = None,
    max_tokens: o.MaxTokens = 128,
    temperature: o.Temperature = 0.6,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = None,
    stop: o.Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end.")] = False,
    speculate: o.Speculate = 3,
    drafter: o.Drafter = "auto",
    device: o.Device = "auto",
    graph: o.Graph = "auto",
    run_ahead: o.RunAhead = 2,
    chunk: o.Chunk = 256,
    context_len: o.ContextLen = None,
    dtype: o.Dtype = "auto",
    threads: o.Threads = 1,
    deterministic: o.Deterministic = False,
    json: o.Json = False,
) -> None:
    """Continue a prompt. The answer streams.

    On a terminal the prompt stands before it, dim, and accepted drafts are green.
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    text = read_prompt(prompt)
    llm = open_llm(
        model,
        speculate=speculate,
        drafter=drafter,
        device=device,
        graph=graph,
        run_ahead=run_ahead,
        chunk=chunk,
        context_len=context_len,
        dtype=dtype,
        threads=threads,
        deterministic=deterministic,
        max_batch=1,
        prefill_batch=1,
        guard=json,
    )
    if json:
        write_json(answer_object(llm, list(llm.stream(text, params))))
        return
    show(llm, text, params)


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
    """Stream an answer to the terminal and a summary to standard error; returns the answer."""
    said, chunks = "", llm.stream(text, params)
    write_prompt(text)
    for chunk in chunks:
        said += chunk.text
        write_pieces(chunk.pieces)
        if chunk.metrics is not None:
            sys.stdout.write("\n")
            sys.stdout.flush()
            messages.print(summary(chunk.metrics), soft_wrap=True)
    return said


def summary(metrics: Metrics) -> Text:
    """One line about a finished request. It says in their colour which text accepted drafts are."""
    decoding = metrics.total_seconds - metrics.first_token_seconds
    rate = (metrics.completion_tokens - 1) / decoding if decoding > 0 else 0.0
    return Text.assemble(
        (
            f"{metrics.completion_tokens} tokens in {metrics.rounds} rounds, "
            f"{metrics.tokens_per_round:.2f} a round ({metrics.accepted} of {metrics.drafted} ",
            "dim",
        ),
        ("drafts accepted", ACCEPTED),
        (f"); first after {metrics.first_token_seconds:.2f} s, then {rate:.0f} tokens/s", "dim"),
    )


def answer_object(llm: LLM, chunks: list[Chunk]) -> dict[str, object]:
    """What `--json` prints of a finished request. `host_reads` is what the guard counted."""
    last = chunks[-1]
    assert last.metrics is not None
    metrics = last.metrics
    return {
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token for chunk in chunks for token in chunk.token_ids],
        "finish_reason": last.finish_reason,
        "prompt_tokens": metrics.prompt_tokens,
        "completion_tokens": metrics.completion_tokens,
        "rounds": metrics.rounds,
        "tokens_per_round": round(metrics.tokens_per_round, 4),
        "drafted": metrics.drafted,
        "accepted": metrics.accepted,
        "host_reads": len(llm.executor.sync_log.reads),
        "first_token_seconds": round(metrics.first_token_seconds, 4),
        "total_seconds": round(metrics.total_seconds, 4),
    }
