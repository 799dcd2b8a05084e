# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 and its draft layer against a slow float64 reference that shares no code with it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from freewheel.models import LoadedModel, load_folder, open_folder
from freewheel.nn import Embedding, StreamMtp
from tests.fixtures.closed_form import Config, write_checkpoint
from tests.fixtures.compressed import PUBLISHED_RATIOS, T4, stream_tensors, write_t4
from tests.models.paged import Paged
from tests.models.stream_reference import StreamReference

TOKENS = random.Random(9).choices(range(256), k=45)
TOLERANCE = 1e-9
NO_YARN: Config = {"rope_scaling": None}


def write_plain(folder: Path) -> Path:
    return write_t4(folder, **NO_YARN)


def write_own_tables(folder: Path) -> Path:
    """T4 whose draft layer has an embedding and a head of its own, and twice the window."""
    config = T4 | NO_YARN | {"sliding_window": 16}
    tensors, other = stream_tensors(config, seed=0), stream_tensors(config, seed=1)
    tensors["mtp.0.emb.tok_emb.weight"] = other["embed.weight"]
    tensors["mtp.0.head.weight"] = other["head.weight"]
    return write_checkpoint(folder, config, tensors)


def write_first_layer_compressed(folder: Path) -> Path:
    """The draft layer must not take the ratio or the rotation of any layer of the model's."""
    ratios = {"compress_ratios": [8, 4, 8, 4, 8, 0], "layer_types": None}
    return write_t4(folder, **(NO_YARN | ratios | {"num_hash_layers": 5}))


WRITERS = {
    "t4": write_plain,
    "own-tables": write_own_tables,
    "no-sliding-layer": write_first_layer_compressed,
}


@pytest.fixture(scope="module", params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("mtp") / "model")


def load(folder: Path) -> LoadedModel:
    return load_folder(open_folder(folder), torch.float64)


def paged_of(folder: Path) -> Paged:
    return Paged(load(folder), page_size=8)


def in_chunks(count: int, chunks: list[int]) -> list[slice]:
    """Spans of `count` tokens; the last size is repeated."""
    spans: list[slice] = []
    start, sizes = 0, list(chunks)
    while start < count:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        spans.append(slice(start, min(start + size, count)))
        start += size
    return spans


@pytest.mark.parametrize("chunks", [(45,), (1,), (4,), (16, 7), (3, 2, 5)])
def test_the_model_and_its_draft_layer_equal_the_reference_whatever_the_chunks(
    folder: Path, chunks: tuple[int, ...]
) -> None:
    reference, paged = StreamReference.read(folder), paged_of(folder)
    streams = reference.streams(TOKENS)
    ours = paged.hidden(TOKENS, chunks)
    assert (ours - streams.flatten(1)).abs().max() < TOLERANCE
    assert (paged.model.logits(ours) - reference.logits(streams)).abs().max() < TOLERANCE
    after = [*TOKENS[1:], 5]
    spans = in_chunks(len(TOKENS), list(chunks))
    drafted = torch.cat([paged.draft(after[s], s.start, ours[s]) for s in spans])
    wanted = reference.mtp_streams(after, streams)
    assert (drafted - wanted.flatten(1)).abs().max() < TOLERANCE
    assert paged.draft_head is not None
    logits = paged.draft_head.logits(drafted)
    assert (logits - reference.mtp_logits(wanted)).abs().max() < TOLERANCE


def reference_chain(reference: StreamReference, prompt: list[int], depth: int) -> list[int]:
    """The target's token after `prompt`, then `depth` drafts, all recomputed at each step."""
    streams = reference.streams(prompt)
    tokens = [int(reference.logits(streams)[-1].argmax())]
    for _ in range(depth):
        own = reference.mtp_streams([*prompt[1:], *tokens], streams)
        tokens.append(int(reference.mtp_logits(own)[-1].argmax()))
        streams = torch.cat((streams, own[-1:]))
    return tokens


def our_chain(paged: Paged, prompt: list[int], depth: int, chunks: list[int]) -> list[int]:
    """The same, fed in chunks: at a chunk's tail the layer reads the next token of the prompt."""
    assert paged.draft_head is not None
    hidden = paged.hidden(prompt, chunks)
    tokens = [int(paged.model.logits(hidden[-1]).argmax())]
    after, own = [*prompt[1:], *tokens], hidden
    for span in in_chunks(len(prompt), chunks):
        own = paged.draft(after[span], span.start, hidden[span])
    for step in range(depth):
        tokens.append(int(paged.draft_head.logits(own[-1]).argmax()))
        if step + 1 < depth:
            own = paged.draft(tokens[-1:], len(prompt) + step, own[-1:])
    return tokens


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 9, 17, 40])
def test_the_chain_equals_the_reference(folder: Path, length: int) -> None:
    prompt = TOKENS[:length]
    expected = reference_chain(StreamReference.read(folder), prompt, depth=5)
    loaded = load(folder)
    assert our_chain(Paged(loaded, page_size=8), prompt, 5, [length]) == expected
    assert our_chain(Paged(loaded, page_size=8), prompt, 5, [3]) == expected


def test_the_published_ratios_and_window_equal_the_reference(tmp_path: Path) -> None:
    config = PUBLISHED_RATIOS | NO_YARN
    folder = write_checkpoint(tmp_path / "model", config, stream_tensors(config, 3))
    tokens = random.Random(2).choices(range(256), k=261)
    paged = Paged(load(folder), page_size=128, length=300)
    wanted = StreamReference.read(folder).streams(tokens).flatten(1)
    assert (paged.hidden(tokens, [261]) - wanted).abs().max() < TOLERANCE
    again = Paged(load(folder), page_size=256, length=300)
    assert (again.hidden(tokens, [100, 27, 1, 1, 4]) - wanted).abs().max() < TOLERANCE


def test_the_relay_is_as_wide_as_all_streams(tmp_path: Path) -> None:
    """Collapsed streams would load and run, and nearly every draft would be wrong."""
    loaded = load(write_t4(tmp_path / "model"))
    hidden = Paged(loaded, page_size=8).hidden(TOKENS[:5], [5])
    assert hidden.shape == (5, T4["hc_mult"] * T4["hidden_size"])
    assert isinstance(loaded.draft_head, StreamMtp)


def test_absent_tables_are_the_targets_and_equal_copies_become_the_targets(tmp_path: Path) -> None:
    tensors = stream_tensors(T4, 0)
    tensors["mtp.0.emb.tok_emb.weight"] = tensors["embed.weight"].clone()
    tensors["mtp.0.head.weight"] = tensors["head.weight"].clone()
    shared = load(write_t4(tmp_path / "shared"))
    copied = load(write_checkpoint(tmp_path / "copied", T4, tensors))
    for loaded in (shared, copied):
        assert isinstance(loaded.draft_head, StreamMtp)
        embedding = loaded.draft_head.embedding
        assert isinstance(embedding, Embedding)
        assert any(embedding.weight is w for w in loaded.weights[:1])
    assert any("mtp.0.head.weight" in note for note in copied.report.notes)
