# SPDX-License-Identifier: Apache-2.0
"""What a request asks to change about logits, from words to token ids."""

from __future__ import annotations

from freewheel.engine.tokenizer import Tokenizer
from freewheel.errors import RequestError
from freewheel.spec import Adjustments, Form, Grammar, HostGrammar, SamplingParams
from freewheel.spec.adjustments import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS

THINKING = ("<think>", "</think>")
"""The tokens between which models of these families think."""


def adjustments_of(
    params: SamplingParams,
    prompt: tuple[int, ...],
    tokenizer: Tokenizer,
    form: Form | None,
) -> Adjustments | None:
    """The adjustments of a request, or None if it changes no logit.

    `form`: what its structure was compiled to, if it has one.

    Raises RequestError for words that do not fit a row of the device state.
    """
    structure = params.structure
    budget = params.thinking_token_budget
    trigger = -1
    optional = params.grammar_trigger is not None
    if params.grammar_trigger is not None:
        trigger = params.grammar_trigger
    elif structure is not None or budget is not None:
        trigger = open_thinking(prompt, tokenizer)
    found = Adjustments(
        prompt_len=len(prompt),
        grammar=form if isinstance(form, Grammar) else None,
        guided=isinstance(form, HostGrammar),
        optional=optional,
        trigger=trigger,
        budget=-1 if budget is None or trigger < 0 else budget,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
        biases=params.biases,
        allowed=params.allowed_token_ids,
        bad_words=bad_word_tokens(params.bad_words, tokenizer),
    )
    return found if found.uses else None


def open_thinking(prompt: tuple[int, ...], tokenizer: Tokenizer) -> int:
    """The token that ends the thinking which `prompt` leaves open; -1 if it leaves none open."""
    begin, end = (tokenizer.token_id(token) for token in THINKING)
    if begin is None or end is None:
        return -1
    marks = [token for token in prompt if token in (begin, end)]
    return end if marks and marks[-1] == begin else -1


def bad_word_tokens(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell the words, as they stand and behind a space.

    Raises RequestError if one is too long, or all are too many.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word}"):
            tokens = tuple(tokenizer.encode_text(text))
            if len(tokens) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    "bad_words",
                    f"{word!r} takes {len(tokens)} tokens; at most {MAX_BAD_WORD_TOKENS} fit",
                )
            if tokens:
                found[tokens] = None
    if len(found) > MAX_BAD_WORDS:
        raise RequestError(
            "bad_words",
            f"{len(words)} words take {len(found)} token sequences; at most {MAX_BAD_WORDS} fit",
        )
    return tuple(found)
