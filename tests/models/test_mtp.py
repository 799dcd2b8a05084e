# SPDX-License-Identifier: Apache-2.0
"""The MTP layer against a slow float64 reference: catching up, and the chain that goes on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from freewheel.models import LoadedModel, load_folder, open_folder
from freewheel.nn import Embedding, MtpLayer
from tests.fixtures.closed_form import (
    T32,
    perm,
    perm_run,
    random_tensors,
    write_checkpoint,
    write_perm,
    write_perm_x,
    write_t32,
    write_tg,
)
from tests.models.dense_reference import DenseReference
from tests.models.paged import Paged

TOKENS = random.Random(9).choices(range(256), k=30)
TOLERANCE = 1e-9


def write_own_tables(folder: Path) -> Path:
    """T32 whose MTP layer has an embedding and a head of its own."""
    tensors = random_tensors(T32, seed=0)
    other = random_tensors(T32, seed=1)
    tensors["model.layers.3.embed_tokens.weight"] = other["model.embed_tokens.weight"]
    tensors["model.layers.3.shared_head.head.weight"] = other["lm_head.weight"]
    return write_checkpoint(folder, T32, tensors)


WRITERS = {"t32": write_t32, "tg": write_tg, "own-tables": write_own_tables}


@pytest.fixture(scope="module", params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("mtp") / "model")


def load(folder: Path) -> LoadedModel:
    return load_folder(open_folder(folder), torch.float64)


def reference_chain(reference: DenseReference, prompt: list[int], depth: int) -> list[int]:
    """The target's token after `prompt`, then `depth` drafts, all recomputed at each step."""
    hidden = reference.hidden(prompt)
    tokens = [int(reference.logits(hidden[-1:]).argmax())]
    for _ in range(depth):
        after = [*prompt[1:], *tokens]
        own = reference.mtp_hidden(after, hidden)
        tokens.append(int(reference.mtp_logits(own[-1:]).argmax()))
        hidden = torch.cat((hidden, own[-1:]))
    return tokens


def our_chain(paged: Paged, prompt: list[int], depth: int, chunks: list[int]) -> list[int]:
    """The same, fed in chunks: at a chunk's tail the layer reads the next token of the prompt."""
    assert paged.draft_head is not None
    hidden = paged.hidden(prompt, chunks)
    tokens = [int(paged.model.logits(hidden[-1]).argmax())]
    after = [*prompt[1:], *tokens]
    start, sizes = 0, list(chunks)
    own = hidden
    while start < len(prompt):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        own = paged.draft(after[start : start + size], start, hidden[start : start + size])
        start += size
    for step in range(depth):
        tokens.append(int(paged.draft_head.logits(own[-1]).argmax()))
        if step + 1 < depth:
            own = paged.draft(tokens[-1:], len(prompt) + step, own[-1:])
    return tokens


@pytest.mark.parametrize("chunks", [(30,), (1,), (4,), (16, 7)])
def test_the_layer_equals_the_reference_whatever_the_chunks(
    folder: Path, chunks: tuple[int, ...]
) -> None:
    reference, paged = DenseReference.read(folder), Paged(load(folder))
    hidden = reference.hidden(TOKENS)
    assert (paged.hidden(TOKENS, chunks) - hidden).abs().max() < TOLERANCE
    after = [*TOKENS[1:], 5]
    parts, start, sizes = [], 0, list(chunks)
    while start < len(TOKENS):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        span = slice(start, start + size)
        parts.append(paged.draft(after[span], start, hidden[span]))
        start += size
    ours = torch.cat(parts)
    assert (ours - reference.mtp_hidden(after, hidden)).abs().max() < TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 14, 15, 16, 17, 29])
def test_the_chain_equals_the_reference(folder: Path, length: int) -> None:
    reference, loaded = DenseReference.read(folder), load(folder)
    prompt = TOKENS[:length]
    expected = reference_chain(reference, prompt, depth=5)
    assert our_chain(Paged(loaded), prompt, 5, [length]) == expected
    assert our_chain(Paged(loaded), prompt, 5, [3]) == expected


def test_the_embedding_half_of_the_join_comes_first(tmp_path: Path) -> None:
    loaded = load(write_perm(tmp_path / "model"))
    assert our_chain(Paged(loaded), [7], 5, [1]) == perm_run(7, 6)


def test_a_head_of_its_own_is_used_for_drafts_alone(tmp_path: Path) -> None:
    loaded = load(write_perm_x(tmp_path / "model"))
    chain = our_chain(Paged(loaded), [7], 3, [1])
    assert chain[:3] == perm_run(7, 3)
    assert chain[2] % 4 == 0
    assert chain[3] == (perm(chain[2]) + 1) % 64


def test_absent_tables_are_the_targets_and_equal_copies_become_the_targets(tmp_path: Path) -> None:
    shared, copied = load(write_t32(tmp_path / "t32")), load(write_perm_x(tmp_path / "perm-x"))
    for loaded in (shared, copied):
        assert isinstance(loaded.draft_head, MtpLayer)
        embedding = loaded.draft_head.embedding
        assert isinstance(embedding, Embedding)
        target = next(t for t in loaded.weights if t.shape == embedding.weight.shape)
        assert embedding.weight is target
    assert any("embed_tokens" in note for note in copied.report.notes)
