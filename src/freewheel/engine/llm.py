# SPDX-License-Identifier: Apache-2.0
"""`LLM`: a model that answers."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

from freewheel.config import EngineConfig, find_model
from freewheel.engine.output import Chunk, Output
from freewheel.engine.session import Session
from freewheel.engine.tokenizer import Tokenizer
from freewheel.errors import CheckpointError, RequestError
from freewheel.host import Request, Scheduler, TextStream
from freewheel.runtime import build
from freewheel.spec import SamplingParams, StepShape

Prompt = str | Sequence[int]
"""Text, or token ids."""


class LLM:
    """One model, loaded, with its caches and graphs. Not thread-safe.

    `model` is a folder in Hugging Face layout or the name of a shipped model; options are the
    fields of EngineConfig. Raises ConfigError, or CheckpointError for an unusable folder.

    >>> from freewheel import LLM, SamplingParams
    >>> llm = LLM(model="demo", speculate=3)
    >>> llm.generate("Emma was", SamplingParams(temperature=0, max_tokens=16))[0].text
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> None:
        """`progress` is called with (bytes read, bytes in all) while weights load."""
        self.config = EngineConfig(model=model, **options)
        self.tokenizer = Tokenizer(find_model(model))
        self.built = build(self.config, progress)
        self.spec, self.executor = self.built.spec, self.built.executor
        if self.tokenizer.size > self.spec.vocab_size:
            raise CheckpointError(
                f"tokenizer.json: knows {self.tokenizer.size} tokens, but the model has "
                f"{self.spec.vocab_size}; the folder mixes two models"
            )
        self._session = Session(self._new_scheduler(), self.executor)
        self._ids = (f"request-{n}" for n in itertools.count())

    @property
    def context_len(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.built.sizes.row_width

    def capture(self, progress: Callable[[StepShape], None] = lambda _: None) -> None:
        """Make every graph now, rather than each when it is first needed."""
        self.executor.capture(self.built.ladder.shapes(), progress)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """One output for each prompt, in order. `params`: one for all, or one each.

        Raises RequestError, naming the field, before anything runs if any request is invalid.
        """
        many = _prompt_list(prompts)
        requests = [
            self._request(p, s) for p, s in zip(many, _param_list(params, len(many)), strict=True)
        ]
        order = {request.id: index for index, request in enumerate(requests)}
        chunks: list[list[Chunk]] = [[] for _ in requests]
        try:
            for request in requests:
                self._session.add(request, self._text_of(request))
            while self._session.busy:
                for request_id, chunk in self._session.step():
                    chunks[order[request_id]].append(chunk)
        finally:
            self._close(requests)
        return [_join(parts) for parts in chunks]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Chunk]:
        """The answer, round by round; the last chunk carries the finish reason and metrics.

        Closing the iterator early aborts the request.
        """
        request = self._request(prompt, params or SamplingParams())
        self._session.add(request, self._text_of(request))
        return self._chunks(request)

    def _chunks(self, request: Request) -> Generator[Chunk]:
        try:
            while self._session.busy:
                for _, chunk in self._session.step():
                    yield chunk
        finally:
            self._close([request])

    def _close(self, requests: list[Request]) -> None:
        for request in requests:
            self._session.abort(request.id)
        self._session.drain()

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        ids = tuple(self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt)
        self._check_ids("prompt", ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        eos = () if params.ignore_eos else self.spec.eos_ids
        stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return Request(next(self._ids), ids, params, seed, self.context_len, stop_ids)

    def _check_ids(self, field: str, ids: tuple[int, ...]) -> None:
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(field, f"must hold token ids, got {token!r}")
            if not 0 <= token < self.spec.vocab_size:
                raise RequestError(
                    field, f"token id {token} is outside the vocabulary of {self.spec.vocab_size}"
                )

    def _text_of(self, request: Request) -> TextStream:
        params = request.params
        decode = partial(self.tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        return TextStream(decode, params.stop, params.include_stop_str_in_output, params.min_tokens)

    def _new_scheduler(self) -> Scheduler:
        built = self.built
        return Scheduler(
            built.ladder,
            built.groups,
            built.sizes.pages,
            built.sizes.rows,
            built.sizes.row_width,
            built.sizes.row_width,
            self.config.run_ahead,
        )


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A lone prompt, as text or as ids, is a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [[item for item in items if isinstance(item, int)]]
    return [item for item in items if not isinstance(item, int)]


def _param_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError("params", f"{len(params)} given for {count} prompts")
    return list(params)


def _join(chunks: list[Chunk]) -> Output:
    last = chunks[-1]
    assert last.finish_reason is not None and last.metrics is not None
    return Output(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        finish_reason=last.finish_reason,
        metrics=last.metrics,
    )
