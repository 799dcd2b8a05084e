# SPDX-License-Identifier: Apache-2.0
"""The closed-form checkpoints give the answers that they were built to give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from freewheel.models import RandomSource, load_folder, load_model, open_folder
from freewheel.nn import held_tensors
from freewheel.spec import read_model_spec
from tests.fixtures.closed_form import (
    BYTE_EOS,
    PEN_X,
    PEN_Y,
    T32,
    perm_run,
    shapes,
    write_pen,
    write_perm,
    write_perm_x,
    write_t32,
)
from tests.models.paged import Paged

PERM_FROM_7 = [38, 1, 8, 43, 26, 5, 28, 15, 14, 9, 48, 51, 2]


@pytest.mark.parametrize("write", [write_perm, write_perm_x])
def test_perm_follows_its_rule_from_every_token(write, tmp_path: Path) -> None:
    assert perm_run(7, 13) == PERM_FROM_7
    paged = Paged(load_folder(open_folder(write(tmp_path / "model")), torch.float32))
    logits = paged.logits(list(range(64)), [64])
    assert logits.argmax(-1).tolist() == [perm_run(token, 1)[0] for token in range(64)]
    assert logits.max(-1).values.sub(10).abs().max() < 1e-4


def test_pen_has_its_stated_log_probabilities(tmp_path: Path) -> None:
    paged = Paged(load_folder(open_folder(write_pen(tmp_path / "model")), torch.float32))
    chances = paged.logits([3, PEN_X, PEN_Y], [3]).log_softmax(-1)
    others = [token for token in range(64) if token not in (PEN_X, PEN_Y)]
    assert chances[:, PEN_X].tolist() == pytest.approx([-0.0325] * 3, abs=5e-5)
    assert chances[:, PEN_Y].tolist() == pytest.approx([-3.5325] * 3, abs=5e-5)
    assert chances[:, others].flatten().tolist() == pytest.approx([-10.0325] * 186, abs=5e-5)


def test_byte_tokens_are_bytes_and_special_tokens_follow_them(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_t32(tmp_path / "model") / "tokenizer.json"))
    text = "h\u00e9llo \u2603\n\x00"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("a<eos>").ids == [97, BYTE_EOS]
    assert tokenizer.get_vocab_size() == T32["vocab_size"]


def test_perm_tokens_are_printable_characters(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_perm(tmp_path / "model") / "tokenizer.json"))
    assert tokenizer.decode(PERM_FROM_7) == "".join(chr(32 + token) for token in PERM_FROM_7)
    assert tokenizer.encode("HELLO WORLD_").ids == [ord(letter) - 32 for letter in "HELLO WORLD_"]


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    spec = read_model_spec(T32)
    first, again, other = (
        held_tensors(*load_model(spec, RandomSource(seed, torch.float64))) for seed in (5, 5, 6)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    # the rotary table alone does not come from the seed
    assert sum(torch.equal(a, b) for a, b in zip(first, other, strict=True)) == 1
    assert sum(t.numel() for t in first) == 128 * 8 + sum(
        torch.Size(shape).numel() for shape in shapes(T32).values()
    )
