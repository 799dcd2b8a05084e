# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints mean what transformers takes them to mean, however they are spelt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from freewheel.models import SafetensorsSource, load_folder, open_folder
from freewheel.models.storage import PlainStorage, find_storage
from tests.fixtures.closed_form import Tensors, write_checkpoint
from tests.fixtures.released import (
    RELEASED,
    Released,
    dequantised,
    present,
    stored,
    write_released,
    write_twin,
)
from tests.models.paged import Paged
from tests.models.transformers_oracle import CLASSES, LowestPositionTies

V32, GLM, V4, BASE = "DeepSeek-V3.2-Exp", "GLM-5.2-FP8", "DeepSeek-V4-Flash", "DeepSeek-V4-Pro-Base"
TOKENS = list(range(40, 60))


def logits(folder: Path) -> Tensor:
    loaded = load_folder(open_folder(folder), torch.float32)
    return Paged(loaded, page_size=128).logits(TOKENS, [13, 1, 6])


@pytest.mark.parametrize("family", [V32, V4, BASE])
def test_numbers_equal_those_of_transformers_own_dequantisation(
    family: str, tmp_path: Path
) -> None:
    """Bit for bit. It reads no block that is partly empty, so those are left out."""
    folder = open_folder(write_released(tmp_path / "model", RELEASED[family]))
    theirs = Fp8Dequantize(SimpleNamespace())
    tensors: Tensors = {}
    for file in {s.file for s in folder.tensors.values()}:
        tensors |= load_file(file)
    compared = set()
    with SafetensorsSource(folder.tensors, torch.float32) as source:
        for name, tensor in tensors.items():
            packed = 2 if tensor.dtype == torch.int8 else 1
            shape = (*tensor.shape[:-1], packed * tensor.shape[-1])
            found = find_storage(folder.tensors, name, shape)
            if isinstance(found, PlainStorage) or name == found.scale:
                continue
            if packed == 1 and any(size % 128 for size in shape):
                continue
            want = theirs._dequantize_one(tensor, tensors[found.scale], torch.float32)
            assert torch.equal(source.dense(name, shape), want), name
            compared.add(found.__class__.__name__)
    assert compared == {"BlockStorage"} | ({"PackedStorage"} if family == V4 else set())


@pytest.mark.parametrize("family", [V32, GLM, V4, BASE])
def test_logits_equal_those_of_transformers_with_the_same_numbers(
    family: str, tmp_path: Path
) -> None:
    own = RELEASED[family]
    twin = write_twin(tmp_path / "twin", own)
    model = CLASSES[own.config["model_type"]][1].from_pretrained(twin, dtype=torch.float32).eval()
    with LowestPositionTies(), torch.inference_mode():
        theirs = model(torch.tensor([TOKENS])).logits[0]
    ours = logits(write_released(tmp_path / "model", own))
    assert (ours - theirs).abs().max() < 1e-4


def spelt(ending: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        return {
            ending(n.removesuffix("_scale_inv")) if n.endswith("_scale_inv") else n: t
            for n, t in tensors.items()
        }

    return change


def joined(tensors: Tensors) -> Tensors:
    """All experts of a layer in one tensor, and their scales in another."""
    tensors = dict(tensors)
    for layer in {n.split(".mlp.")[0] for n in tensors if ".experts." in n}:
        for end in ("", "_scale_inv"):
            parts = {
                part: [
                    tensors.pop(f"{layer}.mlp.experts.{e}.{part}_proj.weight{end}")
                    for e in range(4)
                ]
                for part in ("gate", "up", "down")
            }
            both = [as_bytes(g, u) for g, u in zip(parts["gate"], parts["up"], strict=True)]
            tensors[f"{layer}.mlp.experts.gate_up_proj{end}"] = torch.stack(both)
            tensors[f"{layer}.mlp.experts.down_proj{end}"] = torch.stack(parts["down"])
    return tensors


def as_bytes(one: Tensor, two: Tensor) -> Tensor:
    return torch.cat((one.view(torch.uint8), two.view(torch.uint8))).view(one.dtype)


def powers(tensors: Tensors) -> Tensors:
    """Scales as powers of two in a byte that has no dtype of its own."""
    return {
        n: t.to(torch.float8_e8m0fnu).view(torch.uint8) if n.endswith("_scale_inv") else t
        for n, t in tensors.items()
    }


SPELLINGS: dict[str, Callable[[Tensors], Tensors]] = {
    "weight_scale": spelt(lambda name: f"{name}_scale"),
    "scale": spelt(lambda name: f"{name.removesuffix('.weight')}.scale"),
    "joined": joined,
    "powers": powers,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings_are_the_same_model(name: str, tmp_path: Path) -> None:
    own = RELEASED[V32]
    want = logits(write_released(tmp_path / "one", own))
    tensors = SPELLINGS[name](stored(own))
    assert (logits(write_released(tmp_path / "two", own, tensors)) - want).abs().max() < 2e-5


@pytest.mark.parametrize("dtype", ["U8", "F4"])
def test_packed_numbers_may_be_called_otherwise(dtype: str, tmp_path: Path) -> None:
    """I8 and U8 count bytes, F4 counts numbers."""
    own = RELEASED[V4]
    want = logits(write_released(tmp_path / "one", own))
    folder = write_released(tmp_path / "two", own)
    for file in folder.glob("*.safetensors"):
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        for entry in header.values():
            if entry.get("dtype") == "I8":
                rows, columns = entry["shape"]
                entry |= {"dtype": dtype, "shape": [rows, columns * (2 if dtype == "F4" else 1)]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    assert torch.equal(logits(folder), want)


def test_what_config_and_headers_tell_differently_is_said(tmp_path: Path) -> None:
    own = RELEASED[V4]
    odd = own.config | {"expert_dtype": "fp8"}
    method = own.config["quantization_config"] | {"modules_to_not_convert": ["layers.0.attn.wq_a"]}
    odd |= {"quantization_config": method}
    folder = write_released(tmp_path / "model", Released(odd, own.kind, own.tables))
    notes = " ".join(load_folder(open_folder(folder), torch.float32).report.notes)
    assert "expert_dtype is 'fp8', but experts are stored as mxfp4" in notes
    assert "excludes modules that are stored quantised, and run so: layers.0.attn.wq_a" in notes


@pytest.mark.parametrize("quantised", [True, False])
def test_a_method_that_is_said_and_not_found_is_worth_a_note(
    quantised: bool, tmp_path: Path
) -> None:
    own = RELEASED[V32]
    config = {k: v for k, v in present(own.config).items() if k != "quantization_config"}
    tensors = stored(own) if quantised else dequantised(stored(own))
    if not quantised:
        config |= {"quantization_config": own.config["quantization_config"]}
    folder = write_checkpoint(tmp_path / "model", config, tensors)
    notes = " ".join(load_folder(open_folder(folder), torch.float32).report.notes)
    want = "has no quantization_config, but" if quantised else "announces quantised weights, but"
    assert want in notes


def test_indexers_of_layers_that_share_may_be_stored_quantised(tmp_path: Path) -> None:
    """They are ignored with their scales."""
    own = RELEASED[GLM]
    tensors = stored(own)
    extra = {
        n.replace("layers.1.", "layers.3."): t
        for n, t in tensors.items()
        if "layers.1.self_attn.indexer" in n
    }
    folder = write_released(tmp_path / "model", own, tensors | extra)
    notes = " ".join(load_folder(open_folder(folder), torch.float32).report.notes)
    assert "picks of a layer below" in notes


def test_tables_that_a_draft_layer_does_not_repeat_are_shared(tmp_path: Path) -> None:
    for family in (V32, V4):
        own = RELEASED[family]
        tensors = {n: t for n, t in stored(own).items() if n not in own.tables}
        loaded = load_folder(
            open_folder(write_released(tmp_path / family, own, tensors)), torch.float32
        )
        assert loaded.draft_head is not None
        assert loaded.draft_head.embedding is loaded.model.embedding  # type: ignore[attr-defined]


def test_an_unwanted_draft_layer_is_left_with_its_scales(tmp_path: Path) -> None:
    folder = write_released(tmp_path / "model", RELEASED[V4])
    loaded = load_folder(open_folder(folder), torch.float32, mtp=False)
    assert loaded.draft_head is None
    assert any("multi-token-prediction layer is off" in note for note in loaded.report.notes)
