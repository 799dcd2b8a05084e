# SPDX-License-Identifier: Apache-2.0
"""A folder is read as its index says, or refused with the file's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from freewheel.config import find_model
from freewheel.errors import CheckpointError, UnsupportedModel
from freewheel.models import load_folder, open_folder
from tests.fixtures.closed_form import T32, random_tensors, write_checkpoint, write_json, write_t32

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"
TENSORS = random_tensors(T32, seed=0)


def weights(folder: Path) -> tuple[Tensor, ...]:
    return load_folder(open_folder(folder), torch.float32).weights


def assert_same(one: tuple[Tensor, ...], two: tuple[Tensor, ...]) -> None:
    assert len(one) == len(two) > 70
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_t32(tmp_path / "single")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_t32(tmp_path / "sharded", shards=3)


def edit_index(folder: Path, **changes: str | None) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].update(changes)
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v is not None}
    write_json(folder / INDEX, index)


def test_one_file_and_several_hold_the_same_model(single: Path, sharded: Path) -> None:
    assert_same(weights(single), weights(sharded))
    assert open_folder(sharded).notes == ()


def test_without_an_index_all_files_are_read(single: Path, sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert_same(weights(single), weights(sharded))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    with pytest.raises(CheckpointError, match=SECOND):
        open_folder(sharded)


def test_a_missing_shard_without_an_index_shows_as_missing_tensors(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    (sharded / SECOND).unlink()
    with pytest.raises(CheckpointError, match=r"\d+ tensors missing: lm_head|missing: model"):
        weights(sharded)


@pytest.mark.parametrize("keep", [0, 5, 40, -100, -1])
def test_a_truncated_file_is_named(single: Path, keep: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
        open_folder(single)


def test_a_file_that_is_not_safetensors_is_named(single: Path) -> None:
    (single / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0" + b"x" * 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_folder(single)


def test_a_shard_that_the_index_does_not_name_changes_nothing(single: Path, sharded: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    save_file({name: torch.zeros_like(TENSORS[name])}, sharded / "model-stray.safetensors")
    assert_same(weights(single), weights(sharded))
    assert any("model-stray.safetensors" in note for note in open_folder(sharded).notes)


def test_a_copy_that_the_index_does_not_point_to_changes_nothing(
    single: Path, sharded: Path
) -> None:
    where = json.loads((sharded / INDEX).read_text())["weight_map"]
    name = next(tensor for tensor, file in where.items() if file != SECOND)
    stored = load_file(sharded / SECOND) | {name: torch.zeros_like(TENSORS[name])}
    save_file(stored, sharded / SECOND)
    assert_same(weights(single), weights(sharded))
    assert any(name in note for note in open_folder(sharded).notes)


def test_a_stale_index_is_refused(sharded: Path) -> None:
    edit_index(sharded, **{"model.layers.0.invented.weight": SECOND})
    with pytest.raises(CheckpointError, match=rf"model\.layers\.0\.invented\.weight \(in {SECOND}"):
        open_folder(sharded)
    edit_index(sharded, **{"model.layers.0.invented.weight": None, "model.norm.weight": None})
    with pytest.raises(CheckpointError, match=r"does not list.*model\.norm\.weight"):
        open_folder(sharded)


def test_an_index_may_not_lead_out_of_the_folder(sharded: Path) -> None:
    edit_index(sharded, **{"model.norm.weight": f"../{SECOND}"})
    with pytest.raises(CheckpointError, match="not a file name"):
        open_folder(sharded)


def test_duplicates_without_an_index_are_refused(single: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(64)}, single / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is in both model\.saf.* other"):
        open_folder(single)


def test_missing_and_broken_files_are_named(single: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        open_folder(tmp_path / "nowhere")
    (single / "generation_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: must hold a JSON object"):
        open_folder(single)
    (single / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        open_folder(single)
    (single / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: the file is missing"):
        open_folder(single)


JSON_FILES = ["config.json", "generation_config.json", INDEX]
NO_OBJECTS = {
    "empty": b"",
    "deep": b'{"a": ' + b"[" * 100_000,
    "long": b'{"a": 1' + b"0" * 5000 + b"}",
    "marked": b"\xef\xbb\xbf{}",
    "binary": b"\xff{}",
    "list": b"[]",
}


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize(
    "text",
    ["", '{"a": ' + "[" * 100_000, '{"a": 1' + "0" * 5000 + "}", "\ufeff{}", b"\xff{}", "[]"],
)
def test_what_is_no_json_object_is_refused_by_file(
    single: Path, name: str, text: str | bytes
) -> None:
    (single / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        open_folder(single)


@pytest.mark.parametrize("name", [*JSON_FILES, "model.safetensors"])
@pytest.mark.parametrize("kind", ["folder", "dangling", "loop", "unreadable"])
def test_what_cannot_be_read_as_a_file_is_named(
    single: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = single / name
    file.unlink(missing_ok=True)
    if kind == "folder":
        file.mkdir()
    elif kind == "unreadable":
        file.write_bytes(b"{}")
        refuse(monkeypatch, file)
    else:
        file.symlink_to(name if kind == "loop" else "nowhere")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        open_folder(single)


def refuse(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Let `file` be one that this user may not read, whoever runs the tests."""
    read, opened = Path.read_bytes, Path.open

    def checked(path: Path) -> None:
        if path == file:
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", lambda p: (checked(p), read(p))[1])
    monkeypatch.setattr(Path, "open", lambda p, *a, **k: (checked(p), opened(p, *a, **k))[1])


def test_a_link_to_a_weight_file_is_followed(single: Path) -> None:
    before = weights(single)
    (single / "model.safetensors").rename(single / "blob")
    (single / "model.safetensors").symlink_to("blob")
    assert_same(before, weights(single))


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/passwd", "a/b", "a\0b", "x" * 300, 5, None])
def test_an_index_may_name_only_what_can_be_a_file_of_the_folder(
    sharded: Path, name: object
) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    write_json(sharded / INDEX, index)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .*not a file name"):
        open_folder(sharded)


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 4096, "n_routed_experts": 16384}, {"n_routed_experts": 16384}]
)
def test_a_config_of_far_more_tensors_than_there_are_is_refused_soon(
    single: Path, changes: dict[str, int]
) -> None:
    write_json(single / "config.json", T32 | changes)
    with pytest.raises(CheckpointError, match="num_hidden_layers and n_routed_experts"):
        weights(single)


@pytest.mark.parametrize(
    "name",
    "hidden_size q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim vocab_size intermediate_size "
    "moe_intermediate_size index_head_dim".split(),
)
def test_the_largest_sizes_that_are_taken_overflow_nothing(single: Path, name: str) -> None:
    write_json(single / "config.json", T32 | {name: 1 << 20})
    with pytest.raises(CheckpointError, match="of another shape"):
        weights(single)


def test_pickled_weights_are_never_read(single: Path) -> None:
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not safetensors"):
        open_folder(single)


def test_another_method_is_refused_before_its_weights_are_looked_at(tmp_path: Path) -> None:
    method = {"quant_method": "awq", "bits": 4}
    write_json(tmp_path / "config.json", T32 | {"quantization_config": method})
    with pytest.raises(UnsupportedModel, match="names the method 'awq'"):
        open_folder(tmp_path)


def test_generation_config_adds_end_of_sequence_ids(tmp_path: Path) -> None:
    generation = {"eos_token_id": [5, 9]}
    folder = write_checkpoint(tmp_path / "m", T32, TENSORS, generation=generation)
    assert open_folder(folder).spec.eos_ids == (257, 5, 9)


def test_the_shipped_demo_folder_is_complete() -> None:
    folder = open_folder(find_model("demo"))
    loaded = load_folder(folder, torch.bfloat16, positions=128)
    assert loaded.draft_head is not None
    assert loaded.report.notes == ()
    assert 10_000_000 < loaded.report.read_bytes < 11_000_000
