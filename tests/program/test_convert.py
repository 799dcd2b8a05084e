# SPDX-License-Identifier: Apache-2.0
"""Weights change their precision as the field stores them; a folder appears whole or not at all."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from freewheel.config import EngineConfig, find_model
from freewheel.engine import convert, survey, verify
from freewheel.errors import CheckpointError, ConfigError
from freewheel.models import LoadedModel, load_folder, open_folder
from freewheel.models.manifest import MANIFEST
from tests.fixtures.closed_form import Tensors
from tests.fixtures.released import RELEASED, dequantised, write_released, write_twin
from tests.models.paged import Paged

V32, V4, BASE = "DeepSeek-V3.2-Exp", "DeepSeek-V4-Flash", "DeepSeek-V4-Flash-Base"
TOKENS = list(range(40, 60))


def tensors_of(folder: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def load(folder: Path) -> LoadedModel:
    return load_folder(open_folder(folder), torch.float32)


def same_bytes(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@pytest.mark.parametrize("family", [V32, BASE])
def test_a_model_in_full_precision_becomes_what_its_family_releases(
    family: str, tmp_path: Path
) -> None:
    """Names, dtypes, shapes and config fields; numbers wherever they had been exact before."""
    own = RELEASED[family]
    released, twin = write_released(tmp_path / "a", own), write_twin(tmp_path / "twin", own)
    convert(str(twin), tmp_path / "b", "fp8")
    want, got = tensors_of(released), tensors_of(tmp_path / "b")
    quantised = {n for n, t in want.items() if t.dtype == torch.float8_e4m3fn}
    assert {n for n, t in got.items() if t.dtype == torch.float8_e4m3fn} == quantised
    assert {n: t.shape for n, t in got.items()} == {n: t.shape for n, t in want.items()}
    config = config_of(tmp_path / "b")
    assert config.get("expert_dtype") == own.config.get("expert_dtype")
    expected = own.config["quantization_config"]
    powers = {} if own.stream else {"scale_fmt": expected["scale_fmt"]}  # its own scales are float
    assert config["quantization_config"] | powers == expected
    before, after = dequantised(want), dequantised(got)
    for name in quantised:
        most = before[name].abs().max()
        assert (after[name] - before[name]).abs().max() <= most / 15  # half a step of e4m3


def test_fp8_and_back_is_the_number_rounded_once_to_bf16(tmp_path: Path) -> None:
    released = write_released(tmp_path / "a", RELEASED[V4])
    convert(str(released), tmp_path / "b", "bf16")
    got, want = tensors_of(tmp_path / "b"), dequantised(tensors_of(released))
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, want[name].to(tensor.dtype)), name
    assert not {torch.float8_e4m3fn, torch.int8, torch.float8_e8m0fnu} & {
        t.dtype for t in got.values()
    }
    config = config_of(tmp_path / "b")
    assert "quantization_config" not in config and "expert_dtype" not in config
    assert load(tmp_path / "b").report.notes


def test_what_is_stored_as_asked_stays_bit_for_bit(tmp_path: Path) -> None:
    for family, to in ((V32, "fp8"), (V4, "mxfp4")):
        released = write_released(tmp_path / family, RELEASED[family])
        assert convert(str(released), tmp_path / f"{family}-2", to) == ("0 weights converted",)
        one, two = tensors_of(released), tensors_of(tmp_path / f"{family}-2")
        assert one.keys() == two.keys()
        assert all(same_bytes(tensor, two[name]) for name, tensor in one.items())
        assert config_of(tmp_path / f"{family}-2") == config_of(released)
        files = [
            sorted(f.name for f in p.glob("model*")) for p in (released, tmp_path / f"{family}-2")
        ]
        assert files[0] == files[1]


@pytest.mark.parametrize("family", [V32, V4])
def test_experts_go_to_mxfp4_and_all_else_to_fp8(family: str, tmp_path: Path) -> None:
    twin = write_twin(tmp_path / "twin", RELEASED[family])
    convert(str(twin), tmp_path / "b", "mxfp4")
    got = tensors_of(tmp_path / "b")
    experts = {n for n in got if ".experts." in n and n.endswith(".weight")}
    assert {n for n, t in got.items() if t.dtype == torch.int8} == experts
    logits = Paged(load(tmp_path / "b"), page_size=128).logits(TOKENS, [20])
    assert logits.isfinite().all()
    held = survey(EngineConfig(model=str(tmp_path / "b"), page_size=128)).precisions
    assert {p.held for p in held if "experts" in str(p.modules) and p.stored == "I8"} == {"mxfp4"}


def test_joined_experts_are_converted_as_one(tmp_path: Path) -> None:
    twin = write_twin(tmp_path / "twin", RELEASED[V32])
    tensors = tensors_of(twin)
    for layer in {n.split(".mlp.")[0] for n in tensors if ".experts." in n}:
        own = [f"{layer}.mlp.experts.{e}" for e in range(4)]
        joined = [
            torch.cat([tensors.pop(f"{e}.{p}_proj.weight") for p in ("gate", "up")]) for e in own
        ]
        tensors[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(joined)
        down = [tensors.pop(f"{e}.down_proj.weight") for e in own]
        tensors[f"{layer}.mlp.experts.down_proj"] = torch.stack(down)
    apart = tmp_path / "apart"
    convert(str(twin), apart, "fp8")
    save_file(tensors, twin / "model.safetensors")
    convert(str(twin), tmp_path / "joined", "fp8")
    found = tensors_of(tmp_path / "joined")
    assert found["model.layers.1.mlp.experts.gate_up_proj_scale_inv"].shape == (4, 2, 2)
    one, two = (Paged(load(p)).logits(TOKENS, [20]) for p in (apart, tmp_path / "joined"))
    assert torch.equal(one, two)


def test_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="taken is there already"):
        convert("demo", tmp_path / "taken", "fp8")
    with pytest.raises(ConfigError, match="to: must be one of fp8, mxfp4, bf16; got 'int4'"):
        convert("demo", tmp_path / "new", "int4")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_a_folder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    twin = write_twin(tmp_path / "twin", RELEASED[V32])
    tensors = tensors_of(twin)
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name][3, 4] = float("inf")
    save_file(tensors, twin / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} \(in model\.safetensors\): .*infinity"):
        convert(str(twin), tmp_path / "out", "fp8")
    assert [p.name for p in tmp_path.iterdir()] == ["twin"]


@pytest.fixture(scope="module")
def demo_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "fp8"
    convert("demo", out, "fp8")
    return out


def test_the_demo_in_fp8_is_half_as_large_and_accounted_for(demo_fp8: Path) -> None:
    files = [p / "model.safetensors" for p in (find_model("demo"), demo_fp8)]
    assert files[1].stat().st_size < 0.6 * files[0].stat().st_size
    assert load(demo_fp8).report.notes == ()
    assert {p.name for p in demo_fp8.iterdir()} == {p.name for p in find_model("demo").iterdir()}


def test_greedy_tokens_of_the_demo_seldom_differ_in_fp8(demo_fp8: Path) -> None:
    """Along its own greedy text. The figure over all prompts is in the model's card."""
    exact, rounded = load(find_model("demo")), load(demo_fp8)
    prompt = [0, *random.Random(0).choices(range(7, 1024), k=4)]
    row = Paged(exact, length=64, page_size=16)
    hidden = row.forward(prompt)[-1:]
    text = list(prompt)
    for at in range(len(prompt), 60):
        text.append(int(row.model.logits(hidden)[-1].argmax()))
        hidden = row.forward(text[-1:], start=at)
    found = Paged(rounded, length=64, page_size=16).logits(text, [len(text)]).argmax(-1)
    differing = sum(
        int(a) != b for a, b in zip(found[len(prompt) - 1 : -1], text[len(prompt) :], strict=True)
    )
    assert differing <= 2


def test_a_manifest_is_written_and_checked(demo_fp8: Path) -> None:
    files = {p.name for p in demo_fp8.iterdir()} - {MANIFEST}
    assert verify(str(demo_fp8)) == len(files)
    assert verify("demo") == len(list(find_model("demo").iterdir())) - 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: (p / "config.json").write_text("{}"), "SHA256SUMS says: config.json; fetch"),
        (lambda p: (p / "tokenizer.json").unlink(), "are missing: tokenizer.json"),
        (lambda p: save_file({}, p / "b.safetensors"), "does not list b.safetensors"),
        (lambda p: (p / MANIFEST).write_text("00  a\n"), "line 1 is not a digest"),
        (lambda p: (p / MANIFEST).unlink(), "SHA256SUMS: the file is missing"),
    ],
)
def test_what_differs_from_the_manifest_is_named(change: Any, says: str, tmp_path: Path) -> None:
    for file in find_model("demo").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change(tmp_path)
    with pytest.raises(CheckpointError, match=says):
        verify(str(tmp_path))


def test_only_weights_that_change_are_counted(tmp_path: Path) -> None:
    """The demo is stored in bfloat16 already."""
    assert convert("demo", tmp_path / "same", "bf16") == ("0 weights converted",)
