# SPDX-License-Identifier: Apache-2.0
"""Every tensor is there, of the right shape and kind, none is left over: or nothing is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.errors import CheckpointError, UnsupportedModel
from freewheel.models import LoadedModel, has_mtp_weights, load_folder, open_folder
from freewheel.models import load as load_module
from tests.fixtures.closed_form import T32, TG, Config, random_tensors, write_checkpoint
from tests.models.paged import Paged

TOKENS = list(range(40, 80))
MTP = "model.layers.3."


def tensors(config: Config = T32) -> dict[str, Tensor]:
    return random_tensors(config, seed=0)


def loaded(
    path: Path, stored: dict[str, Tensor], config: Config = T32, **options: Any
) -> LoadedModel:
    folder = open_folder(write_checkpoint(path / "model", config, stored))
    return load_folder(folder, options.pop("dtype", torch.float32), **options)


def output(model: LoadedModel) -> Tensor:
    return Paged(model).logits(TOKENS, [len(TOKENS)])


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening weights for reading fails the test."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were about to be read")

    monkeypatch.setattr(load_module, "SafetensorsSource", refuse)


def drop(name: str) -> dict[str, Tensor]:
    return {key: value for key, value in tensors().items() if key != name}


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.self_attn.kv_b_proj.weight",
        "model.layers.1.self_attn.indexer.k_norm.bias",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.experts.3.down_proj.weight",
        "model.layers.2.mlp.shared_experts.up_proj.weight",
        "model.layers.3.eh_proj.weight",
    ],
)
def test_a_missing_tensor_is_named_before_anything_is_read(
    name: str, tmp_path: Path, no_reading: None
) -> None:
    with pytest.raises(CheckpointError, match=rf"1 tensors missing: {name} \["):
        loaded(tmp_path, drop(name))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.extra.weight",
        "model.layers.3.extra.weight",
        "model.layers.30.eh_proj.weight",
        "model.layers.1.mlp.experts.4.up_proj.weight",
        "model.layers.0.self_attn.q_a_proj.weight_scale_inv",
        "vision.weight",
    ],
)
def test_a_surplus_tensor_is_named_with_its_file(
    name: str, tmp_path: Path, no_reading: None
) -> None:
    with pytest.raises(CheckpointError, match=rf"not part of the model: {name} \(in model\.saf"):
        loaded(tmp_path, tensors() | {name: torch.zeros(2)})


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path, no_reading: None) -> None:
    name = "model.layers.2.self_attn.o_proj.weight"
    stored = tensors() | {name: torch.zeros(64, 63)}
    message = rf"{name} \(in model\.safetensors\): expected \[64, 64\], found \[64, 63\]"
    with pytest.raises(CheckpointError, match=message):
        loaded(tmp_path, stored)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.int64, "I64")]
)
def test_an_unsupported_dtype_is_named(
    dtype: torch.dtype, name: str, tmp_path: Path, no_reading: None
) -> None:
    stored = tensors()
    stored["model.norm.weight"] = torch.ones(64).to(dtype)
    with pytest.raises(CheckpointError, match=rf"model\.norm\.weight .*found {name}"):
        loaded(tmp_path, stored)


def test_all_kinds_of_difference_are_reported_at_once(tmp_path: Path, no_reading: None) -> None:
    stored = drop("lm_head.weight") | {"model.norm.weight": torch.ones(3), "new": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"lm_head.*; .*new.*; .*model\.norm\.weight"):
        loaded(tmp_path, stored)


def test_a_model_without_its_promised_mtp_layer_loads_only_without_drafts(tmp_path: Path) -> None:
    stored = {k: v for k, v in tensors().items() if not k.startswith(MTP)}
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\..*multi-token-prediction"):
        loaded(tmp_path, stored)
    model = loaded(tmp_path, stored, mtp=False)
    assert model.draft_head is None
    assert not has_mtp_weights(open_folder(tmp_path / "model"))
    whole = loaded(tmp_path, tensors())
    assert has_mtp_weights(open_folder(tmp_path / "model"))
    assert torch.equal(output(model), output(whole))


def test_an_mtp_layer_that_nobody_wants_is_skipped_with_a_note(tmp_path: Path) -> None:
    stored = tensors() | {f"{MTP}main_proj.weight": torch.zeros(2)}
    model = loaded(tmp_path, stored, mtp=False)
    assert model.draft_head is None
    (note,) = [note for note in model.report.notes if MTP in note]
    assert "multi-token-prediction layer is off" in note
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.main_proj\.weight"):
        loaded(tmp_path, stored)


def test_an_mtp_layer_that_the_config_does_not_announce_is_surplus(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers"):
        loaded(tmp_path, tensors(), T32 | {"num_nextn_predict_layers": 0})


def test_an_mtp_layer_without_an_indexer_is_refused_by_name(tmp_path: Path) -> None:
    stored = {k: v for k, v in tensors(TG).items() if "layers.6.self_attn.indexer" not in k}
    with pytest.raises(UnsupportedModel, match=r"no indexer of its own.*layers\.6\.self_attn"):
        loaded(tmp_path, stored, TG)
    assert loaded(tmp_path, stored, TG, mtp=False).draft_head is None


def test_indexers_of_layers_that_share_are_ignored_with_a_note(tmp_path: Path) -> None:
    plain = output(loaded(tmp_path, tensors(TG), TG))
    extra = {
        name.replace("layers.1.", f"layers.{layer}."): torch.full_like(tensor, 3.0)
        for name, tensor in tensors(TG).items()
        if "layers.1.self_attn.indexer" in name
        for layer in (2, 3, 5)
    }
    model = loaded(tmp_path, tensors(TG) | extra, TG)
    assert torch.equal(output(model), plain)
    assert any(
        "indexer" in note and "picks of a layer below" in note for note in model.report.notes
    )


def test_rotary_buffers_are_ignored_with_a_note(tmp_path: Path) -> None:
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
    model = loaded(tmp_path, tensors() | {name: torch.zeros(4) for name in names})
    (note,) = model.report.notes
    assert all(name in note for name in names)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_tied_heads(tied: bool, present: bool, tmp_path: Path) -> None:
    config = T32 | {"tie_word_embeddings": tied}
    stored = tensors() if present else drop("lm_head.weight")
    if not tied and not present:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
            loaded(tmp_path, stored, config)
        return
    model = loaded(tmp_path, stored, config)
    name = "lm_head.weight" if present else "model.embed_tokens.weight"
    hidden = torch.randn(5, 64)
    assert torch.equal(model.model.logits(hidden), hidden @ tensors()[name].T)
    tables = [weight for weight in model.weights if weight.shape == (264, 64)]
    assert len(tables) == (2 if present else 1)


@pytest.mark.parametrize("config", [T32, TG])
def test_experts_may_be_stored_as_one_tensor(config: Config, tmp_path: Path) -> None:
    apart, joined = tensors(config), tensors(config)
    layers = {name.split(".mlp.")[0] for name in apart if ".mlp.experts." in name}
    for layer in layers:
        own = [f"{layer}.mlp.experts.{expert}" for expert in range(4)]
        gate_up = [
            torch.cat([joined.pop(f"{e}.{part}.weight") for part in ("gate_proj", "up_proj")])
            for e in own
        ]
        down = [joined.pop(f"{e}.down_proj.weight") for e in own]
        joined[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        joined[f"{layer}.mlp.experts.down_proj"] = torch.stack(down)
    one = loaded(tmp_path, apart, config)
    two = loaded(tmp_path, joined, config)
    assert all(torch.equal(a, b) for a, b in zip(one.weights, two.weights, strict=True))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_weights_are_cast_once_to_the_dtype_of_computation(
    stored: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    values = {name: tensor.to(stored) for name, tensor in tensors().items()}
    model = loaded(tmp_path, values, dtype=dtype)
    assert torch.equal(model.weights[0], values["model.embed_tokens.weight"].to(dtype))
    logits = output(model)
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert logits.isfinite().all()


def test_a_dtype_that_cannot_be_computed_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="float16"):
        loaded(tmp_path, tensors(), dtype=torch.float16)


def test_progress_counts_every_stored_byte_once(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    stored = tensors()
    stored[f"{MTP}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    model = loaded(tmp_path, stored, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.numel() * 4 for tensor in stored.values())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (total, total) and {t for _, t in seen} == {total}
    assert model.report.read_bytes == total


def test_every_tensor_that_a_model_holds_is_listed_once(tmp_path: Path) -> None:
    model = loaded(tmp_path, tensors())
    assert len({id(weight) for weight in model.weights}) == len(model.weights)
    held = sum(weight.numel() for weight in model.weights)
    table = 128 * 8
    assert held == table + sum(tensor.numel() for tensor in tensors().values())
