# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's folders: every tensor is there and none is left over, under one name or another."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from freewheel.errors import CheckpointError
from freewheel.models import LoadedModel, has_mtp_weights, load_folder, open_folder
from freewheel.models.deepseek_v4_names import draft_names, module_name, saved_name
from freewheel.nn import held_tensors
from tests.fixtures.closed_form import write_checkpoint
from tests.fixtures.compressed import T4, stream_shapes, stream_tensors, write_t4
from tests.models.paged import Paged
from tests.models.transformers_oracle import CLASSES

TOKENS = list(range(40, 80))


def loaded(path: Path, stored: dict[str, Tensor], **options: Any) -> LoadedModel:
    return load_folder(open_folder(write_checkpoint(path, T4, stored)), torch.float32, **options)


def output(model: LoadedModel) -> Tensor:
    return Paged(model, page_size=8).logits(TOKENS, [len(TOKENS)])


@pytest.mark.parametrize("name", sorted(stream_shapes(T4)))
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    stored = {key: value for key, value in stream_tensors(T4, 0).items() if key != name}
    with pytest.raises(CheckpointError, match=rf"1 tensors missing: {name} \["):
        loaded(tmp_path / "model", stored)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attn.compressor.ape",
        "layers.2.attn.indexer.wq_b.weight",
        "layers.0.ffn.gate.bias",
        "layers.1.ffn.gate.tid2eid",
        "mtp.0.attn.compressor.wkv.weight",
        "mtp.1.e_proj.weight",
        "mtp.0.main_proj.weight",
        "layers.5.attn_norm.weight",
        "layers.1.ffn.experts.4.w1.weight",
    ],
)
def test_a_surplus_tensor_is_named(name: str, tmp_path: Path) -> None:
    stored = stream_tensors(T4, 0) | {name: torch.zeros(2, 2)}
    with pytest.raises(CheckpointError, match=f"not part of the model: {name}"):
        loaded(tmp_path / "model", stored)


def test_the_draft_layer_is_skipped_where_it_is_not_wanted_and_said_to_be_there(
    tmp_path: Path,
) -> None:
    folder = write_t4(tmp_path / "model")
    assert has_mtp_weights(open_folder(folder))
    without = load_folder(open_folder(folder), torch.float32, mtp=False)
    assert without.draft_head is None
    assert any("mtp.0" in note for note in without.report.notes)
    bare = {n: t for n, t in stream_tensors(T4, 0).items() if not n.startswith("mtp.")}
    alone = write_checkpoint(tmp_path / "bare", T4, bare)
    assert not has_mtp_weights(open_folder(alone))
    assert torch.equal(output(without), output(loaded(tmp_path / "bare", bare, mtp=False)))


def test_a_table_of_experts_must_hold_experts(tmp_path: Path) -> None:
    stored = stream_tensors(T4, 0)
    stored["layers.0.ffn.gate.tid2eid"][7, 1] = 4
    with pytest.raises(
        CheckpointError, match="tid2eid: holds numbers from 0 to 4; expected 0 to 3"
    ):
        loaded(tmp_path / "model", stored)
    stored["layers.0.ffn.gate.tid2eid"] = stored["layers.0.ffn.gate.tid2eid"].float()
    with pytest.raises(CheckpointError, match=r"tid2eid .*expected one of I32, I64, found F32"):
        loaded(tmp_path / "other", stored)


def test_weights_that_are_whole_numbers_are_refused(tmp_path: Path) -> None:
    stored = stream_tensors(T4, 0)
    stored["layers.1.attn.wkv.weight"] = stored["layers.1.attn.wkv.weight"].long()
    with pytest.raises(CheckpointError, match="expected one of BF16, F16, F32, F64, found I64"):
        loaded(tmp_path / "model", stored)


def test_a_table_of_experts_may_be_narrow(tmp_path: Path) -> None:
    stored = stream_tensors(T4, 0)
    wide = output(loaded(tmp_path / "wide", stored))
    stored["layers.0.ffn.gate.tid2eid"] = stored["layers.0.ffn.gate.tid2eid"].int()
    assert torch.equal(output(loaded(tmp_path / "narrow", stored)), wide)


@pytest.mark.parametrize("rename", [saved_name, module_name])
def test_other_names_load_the_same_model(rename: Any, tmp_path: Path) -> None:
    stored = stream_tensors(T4, 0)
    own = {n: t for n, t in stored.items() if not n.startswith("mtp.")}
    renamed = {rename(name): tensor for name, tensor in own.items()}
    assert len(renamed) == len(own) and renamed.keys() != own.keys()
    one, two = (loaded(tmp_path / str(at), s, mtp=False) for at, s in enumerate((own, renamed)))
    assert torch.equal(output(one), output(two))


def moved(name: str, form: int) -> str:
    """A draft layer's tensor as one of the layer behind the last."""
    names = draft_names(name, T4["num_hidden_layers"])
    return names[form] if names else name


@pytest.mark.parametrize("form", range(4))
def test_the_draft_layer_may_be_the_layer_behind_the_last(form: int, tmp_path: Path) -> None:
    stored = stream_tensors(T4, 0)
    stored["mtp.0.emb.tok_emb.weight"] = stored["embed.weight"].clone()  # one serves for both
    renamed = {moved(name, form): tensor for name, tensor in stored.items()}
    assert len(renamed) == len(stored)
    assert not any(name.startswith("mtp.") for name in renamed)
    folder = write_checkpoint(tmp_path / "model", T4, renamed)
    assert has_mtp_weights(open_folder(folder))
    one, two = loaded(tmp_path / "own", stored), load_folder(open_folder(folder), torch.float32)
    for here, there in zip(held_tensors(one.draft_head), held_tensors(two.draft_head), strict=True):
        assert torch.equal(here, there)
    without = load_folder(open_folder(folder), torch.float32, mtp=False)
    assert without.draft_head is None
    assert any(f"model.layers.{T4['num_hidden_layers']}." in n for n in without.report.notes)


def test_a_draft_layer_stored_twice_is_named(tmp_path: Path) -> None:
    stored = stream_tensors(T4, 0)
    twice = {moved(name, 0): tensor.clone() for name, tensor in stored.items()}
    with pytest.raises(CheckpointError, match=r"not part of the model: model\.layers\.5\."):
        loaded(tmp_path / "model", stored | twice)


def test_module_names_are_those_of_transformers() -> None:
    make_config, make_model = CLASSES["deepseek_v4"]
    theirs = set(make_model(make_config(**deepcopy(T4))).state_dict())
    ours = {module_name(n) for n in stream_shapes(T4) if not n.startswith("mtp.")}
    assert {n for n in ours if ".mlp.experts." not in n} == {
        n for n in theirs if ".mlp.experts." not in n
    }


def test_loading_twice_gives_the_same_model_and_leaves_the_file_alone(tmp_path: Path) -> None:
    """The bias of a compressor is used as it is stored: nothing is rearranged in place."""
    folder = write_t4(tmp_path / "model")
    before = load_file(folder / "model.safetensors")
    one, two = (load_folder(open_folder(folder), torch.float32) for _ in range(2))
    assert torch.equal(output(one), output(two))
    after = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    compressor = one.model.layers[1].attention.inputs.compressor  # type: ignore[attr-defined]
    assert torch.equal(compressor.bias, before["layers.1.attn.compressor.ape"])


def test_shapes_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    stored = stream_tensors(T4, 0)
    stored["layers.1.attn.compressor.ape"] = stored["layers.1.attn.compressor.ape"].view(8, 32)
    folder = tmp_path / "model"
    write_checkpoint(folder, T4, stored)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"ape .*expected \[4, 64\], found \[8, 32\]"):
        load_folder(open_folder(folder), torch.float32)
