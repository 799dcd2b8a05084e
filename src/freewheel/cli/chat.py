# SPDX-License-Identifier: Apache-2.0
"""`freewheel chat`: talk to a model, turn by turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from freewheel.chat import NO_THINK, Ask, Chat, Effort, Message, Prompt, open_chat
from freewheel.cli import options as o
from freewheel.cli.generate import answer_object, summary
from freewheel.cli.later import Later
from freewheel.cli.terminal import (
    drop_unwritten,
    fail,
    is_typed,
    messages,
    open_llm,
    read_first,
    read_input,
    write_json,
    write_pieces,
    write_text,
)
from freewheel.config import EngineConfig, find_model
from freewheel.spec import FinishReason, SamplingParams
from freewheel.spec.sampling import DEFAULT_MAX_TOKENS

if TYPE_CHECKING:
    from freewheel import LLM, Chunk, engine
else:
    engine = Later("freewheel.engine")

System = Annotated[str | None, typer.Option(help="What the model is told first.")]
Thinking = Annotated[bool, typer.Option("--thinking", help="Let it think first.")]
HowMuch = Annotated[
    Effort | None,
    typer.Option(help="How much it thinks, which it then does. A model of one effort takes any."),
]


def chat(
    model: o.Model,
    system: System = None,
    thinking: Thinking = False,
    effort: HowMuch = None,
    max_tokens: o.MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: o.Temperature = 0.6,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = None,
    stop: o.Stop = None,
    speculate: o.Speculate = "3",
    drafter: o.Drafter = "auto",
    device: o.Device = "auto",
    graph: o.Graph = "auto",
    run_ahead: o.RunAhead = 2,
    chunk: o.Chunk = 256,
    context_len: o.ContextLen = None,
    dtype: o.Dtype = "auto",
    kv_cache_dtype: o.KvCacheDtype = "auto",
    threads: o.Threads = 1,
    json: o.Json = False,
) -> None:
    """Talk to a model. One line is one turn; an empty line or the end of the input ends it.

    Ctrl-C stops an answer, of which the conversation keeps what was said; at the prompt it ends it.
    A turn that no longer fits the context is refused, and the conversation goes on without it.
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    options = EngineConfig(
        model=model,
        speculate=o.depth(speculate),
        drafter=drafter,
        device=device,
        graph=graph,
        run_ahead=run_ahead,
        chunk=chunk,
        context_len=context_len,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        max_batch=1,
        prefill_batch=1,
        guard=json,
    )
    encoding = _encoding(options)
    try:
        llm = open_llm(**asdict(options))
        _converse(llm, encoding, system, params, Ask(thinking or effort is not None, effort), json)
    finally:
        encoding.close()


def _converse(
    llm: LLM,
    encoding: Chat,
    system: str | None,
    params: SamplingParams,
    ask: Ask,
    json: bool,
) -> None:
    turns = [Message("system", system)] if system else []
    for line in _questions():
        asked = [*turns, Message("user", line)]
        prompt = encoding.prompt(asked, ask)
        if len(prompt.ids) >= llm.context_len:
            _refuse(len(prompt.ids), llm.context_len, json)
            continue
        chunks: list[Chunk] = []
        try:
            _answer(llm, prompt, params, json, chunks)
        except KeyboardInterrupt:
            if not is_typed():
                raise
            drop_unwritten()
            _say_stopped(chunks, json)
        said = _said(llm, chunks, prompt)
        if said or (chunks and chunks[-1].finish_reason is not None):
            turns = [*asked, Message("assistant", said)]


def _encoding(options: EngineConfig) -> Chat:
    """How to talk to the model. Raises UnsupportedModel, before weights are read, if nobody can."""
    folder = find_model(options.model)
    tokenizer = engine.Tokenizer(folder)
    found = open_chat(folder, engine.survey(options).spec.family, tokenizer)
    found.prompt([Message("user", "hello")])
    return found


def _refuse(tokens: int, context_len: int, json: bool) -> None:
    """Say that a turn was not asked. With `--json` it has its line too, as every turn has."""
    message = (
        f"this turn is refused: with it the conversation has {tokens} tokens, and a context of "
        f"{context_len} leaves no room for an answer; nothing was dropped. Ask something shorter, "
        f"or end this conversation and start another"
    )
    fail(message)
    if json:
        write_json({"error": message})


def _questions() -> Iterator[str]:
    """Lines of standard input, with a prompt on a terminal."""
    interactive = is_typed()
    if interactive:
        messages.print("[dim]an empty line or Ctrl-D ends the conversation; Ctrl-C stops an answer")
    while True:
        if interactive:
            messages.print("[bold]> ", end="")
        line = read_input(line=True).rstrip("\n")
        if not line:
            return
        yield line


def _say_stopped(chunks: list[Chunk], json: bool) -> None:
    """Of an answer that Ctrl-C stopped. With `--json` it has its line, as every turn has."""
    if chunks and chunks[-1].finish_reason is not None:
        return
    text = "".join(chunk.text for chunk in chunks)
    if json:
        ids = [token for chunk in chunks for token in chunk.token_ids]
        write_json({"text": text, "token_ids": ids, "finish_reason": FinishReason.ABORT})
    else:
        write_text("\n")
        messages.print("[dim]stopped; Ctrl-C at the prompt ends the conversation")


def _answer(
    llm: LLM, prompt: Prompt, params: SamplingParams, json: bool, chunks: list[Chunk]
) -> None:
    """Stream an answer to the terminal, and add it to `chunks`. An interrupt aborts it."""
    with closing(llm.stream(prompt.ids, params)) as stream:
        _show(read_first(llm, len(prompt.ids), stream), prompt, json, chunks)
    if json:
        write_json(answer_object(llm, chunks))
    else:
        write_text("\n")
        metrics = chunks[-1].metrics
        assert metrics is not None
        messages.print(summary(metrics), soft_wrap=True)


def _show(stream: Iterator[Chunk], prompt: Prompt, json: bool, chunks: list[Chunk]) -> None:
    end, thinking = prompt.end_of_thought, prompt.end_of_thought is not None
    for chunk in stream:
        if not chunks and prompt.start_of_thought is not None:
            thinking = chunk.token_ids[:1] == (prompt.start_of_thought,)
        chunks.append(chunk)
        ends = thinking and end in chunk.token_ids
        if not json:
            thought = _thought_pieces(chunk, end if ends else None) if thinking else 0
            write_pieces(chunk.pieces[:thought], thought)
            if ends:
                write_text("\n\n")
            write_pieces(chunk.pieces[thought:])
        thinking = thinking and not ends


def _thought_pieces(chunk: Chunk, end: int | None) -> int:
    """How many pieces of a chunk are thought; `end`: the token in it that ends thinking, if any.

    A tokenizer may leave the mark out of the text. Then the other tokens tell, if each has a piece;
    if not, the whole chunk counts as the answer.
    """
    if end is None:
        return len(chunk.pieces)
    marked = (i + 1 for i, piece in enumerate(chunk.pieces) if NO_THINK in piece.text)
    silent = len(chunk.pieces) == len(chunk.token_ids) - 1
    return next(marked, chunk.token_ids.index(end) if silent else 0)


def _said(llm: LLM, chunks: list[Chunk], prompt: Prompt) -> str:
    """What later turns are told of an answer: not the thoughts before it."""
    ids = [token for chunk in chunks for token in chunk.token_ids]
    start, end = prompt.start_of_thought, prompt.end_of_thought
    if end is None or (start is not None and ids[:1] != [start]):
        return "".join(chunk.text for chunk in chunks)
    return llm.tokenizer.decode(ids[ids.index(end) + 1 :]) if end in ids else ""
