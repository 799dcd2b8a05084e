# SPDX-License-Identifier: Apache-2.0
"""Train the byte-level BPE tokenizer of the demo checkpoint: 1024 tokens, specials first."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 1024
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"

# Tokens that carry text structure are not "special": a decoder that skips specials keeps them.
STRUCTURE = (
    THINK,
    END_THINK,
    "｜DSML｜",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
)
SPECIAL_TOKENS = (BOS, EOS, PAD, USER, ASSISTANT, *STRUCTURE, "<｜place▁holder▁no▁0｜>")


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE with single digits and `SPECIAL_TOKENS` as ids 0..15."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(t, special=t not in STRUCTURE) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 0)]
    )
    _check(tokenizer)
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": 8192,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(tokenizer_config(), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text`, whose special tokens are spelled out; nothing is added."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def _check(tokenizer: Tokenizer) -> None:
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"vocabulary has {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    for i, token in enumerate(SPECIAL_TOKENS):
        if tokenizer.token_to_id(token) != i:
            raise ValueError(f"special token {token} has id {tokenizer.token_to_id(token)}")
