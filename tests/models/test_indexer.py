# SPDX-License-Identifier: Apache-2.0
"""What the indexer picks: its rotary layout is the config's, and only picks depend on it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from freewheel.models import load_folder, open_folder
from freewheel.models.deepseek_v32 import DeepseekV32
from freewheel.nn import indexer as indexer_module
from freewheel.nn.rows import latents_of
from tests.fixtures.closed_form import write_t32, write_tg
from tests.models.dense_reference import DenseReference
from tests.models.paged import ROW, Paged

TOKENS = random.Random(2).choices(range(256), k=40)
TOPK = 16


def hidden(folder: Path, chunks: tuple[int, ...] = (40,)) -> Tensor:
    loaded = load_folder(open_folder(folder), torch.float64, mtp=False)
    return Paged(loaded).hidden(TOKENS, chunks)


@pytest.mark.parametrize("write", [write_t32, write_tg])
def test_both_layouts_equal_the_reference_and_differ_past_index_topk(write, tmp_path) -> None:
    results = []
    for flag in (False, True):
        folder = write(tmp_path / str(flag), indexer_rope_interleave=flag)
        results.append(hidden(folder))
        expected = DenseReference.read(folder).hidden(TOKENS)
        assert (results[-1] - expected).abs().max() < 1e-9
    assert (results[0][:TOPK] - results[1][:TOPK]).abs().max() < 1e-9
    assert (results[0][TOPK:] - results[1][TOPK:]).abs().max() > 1e-2


@pytest.mark.parametrize(("write", "default"), [(write_t32, False), (write_tg, True)])
def test_an_absent_flag_means_the_familys_layout(write, default: bool, tmp_path) -> None:
    absent = write(tmp_path / "absent", indexer_rope_interleave=None)
    given = write(tmp_path / "given", indexer_rope_interleave=default)
    assert torch.equal(hidden(absent), hidden(given))


@pytest.mark.parametrize("write", [write_t32, write_tg])
def test_index_topk_of_the_whole_row_is_dense_attention(write, tmp_path) -> None:
    sparse, dense = write(tmp_path / "sparse"), write(tmp_path / "dense", index_topk=64)
    assert (hidden(sparse)[:TOPK] - hidden(dense)[:TOPK]).abs().max() < 1e-9
    assert (hidden(sparse) - hidden(dense)).abs().max() > 1e-2


def first_picks(folder: Path, dtype: torch.dtype, tokens: list[int]) -> list[set[int]]:
    """Slots that each query of the first layer picks."""
    loaded = load_folder(open_folder(folder), dtype, mtp=False)
    assert isinstance(loaded.model, DeepseekV32)
    paged = Paged(loaded, length=len(tokens))
    view = paged.view(tokens, 0, len(tokens))
    layer = loaded.model.layers[0]
    x = layer.attention_norm(loaded.model.embedding(view.tokens))
    attention, latent = layer.attention, latents_of(paged.cache, "latent", 0)
    key, gates, query, heads = attention.project(x, latent, view)
    assert attention.indexer is not None
    heads = heads.unflatten(-1, (attention.spec.heads, -1))
    own = (heads, attention.key_up, attention.spec.interleaved)
    slots, _ = attention.indexer.select(gates, key, query, view, paged.cache, own)
    return [{slot for slot in row if slot >= 0} for row in slots[ROW - 1].tolist()]


def test_picks_agree_wholly_in_float32_and_to_99_percent_in_bfloat16(tmp_path) -> None:
    folder = write_t32(tmp_path / "model")
    tokens = random.Random(3).choices(range(256), k=128)
    exact = first_picks(folder, torch.float64, tokens)
    assert [len(picks) for picks in exact] == [min(TOPK, i + 1) for i in range(128)]
    assert first_picks(folder, torch.float32, tokens) == exact
    rounded = first_picks(folder, torch.bfloat16, tokens)
    shares = [len(a & b) / len(a) for a, b in zip(exact, rounded, strict=True)]
    assert sum(shares) / len(shares) >= 0.99


@pytest.mark.parametrize("columns", [1, 7, 1000])
def test_picks_do_not_depend_on_how_a_rectangle_is_cut(columns, tmp_path, monkeypatch) -> None:
    folder = write_tg(tmp_path / "model")
    whole = hidden(folder)
    # 64 positions a row, two rows in the harness's batch
    monkeypatch.setattr(indexer_module, "LOGITS_LIMIT", columns * 2 * 64)
    assert torch.equal(hidden(folder), whole)


def test_shared_layers_store_no_index_keys(tmp_path) -> None:
    loaded = load_folder(open_folder(write_tg(tmp_path / "model")), torch.float32)
    (group,) = loaded.model.cache_groups(4, "float32")
    fields = {field.name: field for field in group.fields}
    assert fields["latent"].layers == (0, 1, 2, 3, 4, 5, 6)
    assert fields["latent"].width == 32 + 8
    assert fields["index_key"].layers == (0, 1, 4, 6)
    assert fields["index_key"].width == 16
    without = load_folder(open_folder(tmp_path / "model"), torch.float32, mtp=False)
    (group,) = without.model.cache_groups(4, "float32")
    assert group.fields[1].layers == (0, 1, 4)


def test_gates_stay_in_float32_in_a_bfloat16_model(tmp_path) -> None:
    loaded = load_folder(open_folder(write_t32(tmp_path / "model")), torch.bfloat16)
    wide = [weight for weight in loaded.weights if weight.dtype == torch.float32]
    # rotary table; a gate and a router and its bias for each layer that has them
    assert sorted(tuple(weight.shape) for weight in wide) == sorted(
        [(128, 8), *[(2, 64)] * 4, *[(4, 64)] * 3, *[(4,)] * 3]
    )
