# SPDX-License-Identifier: Apache-2.0
"""What a request asks to change about logits, from words to token ids."""

from __future__ import annotations

from freewheel.engine.tokenizer import Tokenizer
from freewheel.errors import RequestError
from freewheel.spec import Adjustments, SamplingParams
from freewheel.spec.adjustments import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS


def adjustments_of(
    params: SamplingParams, prompt_len: int, tokenizer: Tokenizer
) -> Adjustments | None:
    """The adjustments of a request, or None if it changes no logit.

    Raises RequestError for words that do not fit a row of the device state.
    """
    found = Adjustments(
        prompt_len=prompt_len,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
        biases=params.biases,
        allowed=params.allowed_token_ids,
        bad_words=bad_word_tokens(params.bad_words, tokenizer),
    )
    return found if found.uses else None


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
