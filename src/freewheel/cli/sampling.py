# SPDX-License-Identifier: Apache-2.0
"""The options that say how tokens are chosen, for a command to take as one SamplingParams."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from freewheel.cli import options as o
from freewheel.errors import RequestError
from freewheel.spec import SamplingParams
from freewheel.spec.sampling import DEFAULT_MAX_TOKENS

Ids = list[int] | None
Words = list[str] | None
Presence = Annotated[
    float, typer.Option(help="Taken off the logit of every token of the answer so far.")
]
Frequency = Annotated[
    float, typer.Option(help="Taken off as often as the token stands in the answer.")
]
Repetition = Annotated[
    float, typer.Option(help="Divides logits of tokens of prompt and answer; 1 is off.")
]
Bias = Annotated[Words, typer.Option(help="ID=VALUE, added to a token's logit; repeatable.")]
Allowed = Annotated[Ids, typer.Option(help="Choose among these ids alone; repeatable.")]
Schema = Annotated[Path | None, typer.Option(help="Answer with JSON of the schema in this file.")]
Regex = Annotated[str | None, typer.Option(help="Answer with a text that this expression matches.")]
JsonObject = Annotated[bool, typer.Option("--json-object", help="Answer with a JSON object.")]
GrammarFile = Annotated[
    Path | None, typer.Option(help="Answer by the grammar in this file: Lark, or BNF with ::=.")
]
Budget = Annotated[int | None, typer.Option(help="Tokens after which an open thinking ends.")]
Scores = Annotated[
    int | None, typer.Option(help="Report log-probabilities, and so many alternatives.")
]
PromptScores = Annotated[int | None, typer.Option(help="The same of the prompt's tokens.")]


def sampling_params(
    max_tokens: o.MaxTokens = DEFAULT_MAX_TOKENS,
    min_tokens: Annotated[int, typer.Option(help="Tokens before which nothing ends it.")] = 0,
    temperature: o.Temperature = 0.6,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    presence_penalty: Presence = 0.0,
    frequency_penalty: Frequency = 0.0,
    repetition_penalty: Repetition = 1.0,
    logit_bias: Bias = None,
    bad_word: Annotated[Words, typer.Option(help="Never say this; repeatable.")] = None,
    allowed_token_id: Allowed = None,
    schema: Schema = None,
    regex: Regex = None,
    choice: Annotated[Words, typer.Option(help="Answer with this text; repeatable.")] = None,
    json_object: JsonObject = False,
    grammar: GrammarFile = None,
    thinking_token_budget: Budget = None,
    seed: o.Seed = None,
    stop: o.Stop = None,
    stop_token_id: Annotated[Ids, typer.Option(help="End at this token; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end.")] = False,
    logprobs: Scores = None,
    prompt_logprobs: PromptScores = None,
) -> SamplingParams:
    """Raises RequestError, naming the field, for what is out of range."""
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=tuple(_bias(text) for text in logit_bias or ()),
        bad_words=tuple(bad_word or ()),
        allowed_token_ids=tuple(allowed_token_id) if allowed_token_id else None,
        json_schema=_text("json_schema", schema) if schema else None,
        json_object=json_object,
        grammar=_text("grammar", grammar) if grammar else None,
        regex=regex,
        choice=tuple(choice) if choice else None,
        thinking_token_budget=thinking_token_budget,
        seed=seed,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def takes_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the options of `sampling_params` in the place of its parameter `params`."""
    asked, own = inspect.signature(sampling_params), inspect.signature(command)

    @functools.wraps(command)
    def run(**values: Any) -> None:
        wishes = {name: values.pop(name) for name in asked.parameters}
        command(params=sampling_params(**wishes), **values)

    parameters = [p for p in own.parameters.values() if p.name != "params"]
    parameters += asked.parameters.values()
    hints = get_type_hints(command, include_extras=True)
    hints |= get_type_hints(sampling_params, include_extras=True)
    vars(run)["__signature__"] = own.replace(
        parameters=[
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name])
            for p in parameters
        ],
        return_annotation=None,
    )
    run.__annotations__ = {p.name: hints[p.name] for p in parameters}
    return run


def _text(field: str, file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(field, f"{file} cannot be read: {error}") from error


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError as error:
        raise RequestError(
            "logit_bias", f"must read ID=VALUE, such as 5=-2.5; got {text!r}"
        ) from error
