# SPDX-License-Identifier: Apache-2.0
"""`freewheel chat`: talk to a model, turn by turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from freewheel import LLM, Chunk, SamplingParams
from freewheel.chat import NO_THINK, Message, encode_chat
from freewheel.cli import options as o
from freewheel.cli.generate import answer_object, summary
from freewheel.cli.terminal import (
    is_typed,
    messages,
    open_llm,
    read_input,
    write_json,
    write_pieces,
)


def chat(
    model: o.Model,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let it think first.")] = False,
    max_tokens: o.MaxTokens = 256,
    temperature: o.Temperature = 0.6,
    top_p: o.TopP = 1.0,
    seed: o.Seed = None,
    speculate: o.Speculate = 3,
    drafter: o.Drafter = "auto",
    device: o.Device = "auto",
    graph: o.Graph = "auto",
    run_ahead: o.RunAhead = 2,
    chunk: o.Chunk = 256,
    context_len: o.ContextLen = None,
    threads: o.Threads = 1,
    json: o.Json = False,
) -> None:
    """Talk to a model. One line is one turn; an empty line or the end of the input ends it."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    llm = open_llm(
        model,
        speculate=speculate,
        drafter=drafter,
        device=device,
        graph=graph,
        run_ahead=run_ahead,
        chunk=chunk,
        context_len=context_len,
        threads=threads,
        max_batch=1,
        prefill_batch=1,
        guard=json,
    )
    turns = [Message("system", system)] if system else []
    for line in _questions():
        turns.append(Message("user", line))
        prompt = encode_chat(
            llm.spec.family, turns, llm.tokenizer.encode_text, llm.tokenizer.token_id, thinking
        )
        chunks = _answer(llm, prompt, params, json)
        turns.append(Message("assistant", _said(llm, chunks, thinking)))


def _questions() -> Iterator[str]:
    """Lines of standard input, with a prompt on a terminal."""
    interactive = is_typed()
    while True:
        if interactive:
            messages.print("[bold]> ", end="")
        line = read_input(line=True).rstrip("\n")
        if not line:
            return
        yield line


def _answer(llm: LLM, prompt: list[int], params: SamplingParams, json: bool) -> list[Chunk]:
    chunks: list[Chunk] = []
    for chunk in llm.stream(prompt, params):
        chunks.append(chunk)
        if not json:
            write_pieces(chunk.pieces)
    if json:
        write_json(answer_object(llm, chunks))
    else:
        sys.stdout.write("\n")
        sys.stdout.flush()
        metrics = chunks[-1].metrics
        assert metrics is not None
        messages.print(f"[dim]{summary(metrics)}", soft_wrap=True)
    return chunks


def _said(llm: LLM, chunks: list[Chunk], thinking: bool) -> str:
    """What later turns are told of an answer: not the thoughts before it."""
    if not thinking:
        return "".join(chunk.text for chunk in chunks)
    ids = [token for chunk in chunks for token in chunk.token_ids]
    end = llm.tokenizer.token_id(NO_THINK)
    return llm.tokenizer.decode(ids[ids.index(end) + 1 :]) if end in ids else ""
