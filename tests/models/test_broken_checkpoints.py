# SPDX-License-Identifier: Apache-2.0
"""Released folders with one thing wrong each: one line says what and where, and nothing is read."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from freewheel.errors import CheckpointError, UnsupportedModel
from freewheel.models import load as load_module
from freewheel.models import load_folder, open_folder
from tests.fixtures.closed_form import Config, Tensors, write_json
from tests.fixtures.released import INDEX, RELEASED, stored, write_released

V32, GLM, V4 = "DeepSeek-V3.2-Exp", "GLM-5.2-FP8", "DeepSeek-V4-Flash"
LAYER = "model.layers.1"
WEIGHT = f"{LAYER}.self_attn.o_proj.weight"
EXPERT = f"{LAYER}.mlp.experts.1.up_proj.weight"
FIRST_DOWN = f"{LAYER}.mlp.experts.0.down_proj.weight"
PACKED = "layers.1.ffn.experts.1.w3"
E8M0 = torch.float8_e8m0fnu


@functools.cache
def good(family: str) -> Tensors:
    return stored(RELEASED[family])


class Break(NamedTuple):
    """`tensors`, `config` or `files` change a good folder; `error` and `says` are what follows."""

    family: str
    error: type[Exception]
    says: str
    tensors: Callable[[Tensors], None] = lambda _: None
    config: Config = {}  # noqa: RUF012 (nobody writes to it)
    files: Callable[[Path], None] = lambda _: None


def drop(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def put(name: str, value: Tensor | Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = value if isinstance(value, Tensor) else value(tensors[name])

    return change


def move(name: str, other: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({other: tensors.pop(name)})


def both(*changes: Callable[[Tensors], None]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for own in changes:
            own(tensors)

    return change


def file_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def edit_header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Of the file that holds WEIGHT."""

    def edit(folder: Path) -> None:
        raw = file_of(folder, WEIGHT).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change(header)
        write_raw(folder, json.dumps(header).encode(), raw[8 + length :])

    return edit


def write_raw(folder: Path, header: bytes, data: bytes) -> None:
    header += b" " * (-len(header) % 8)
    file_of(folder, WEIGHT).write_bytes(len(header).to_bytes(8, "little") + header + data)


def edit_raw(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = file_of(folder, WEIGHT)
        file.write_bytes(change(file.read_bytes()))

    return edit


def edit_index(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        write_json(folder / INDEX, index)

    return edit


def shift(header: dict[str, Any], by: int) -> None:
    """All tensors behind the first begin `by` bytes later."""
    entries = sorted((v["data_offsets"], k) for k, v in header.items() if k != "__metadata__")
    for (begin, end), name in entries[1:]:
        header[name]["data_offsets"] = [begin + by, end + by]


def twice(raw: bytes) -> bytes:
    length = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + length].decode().rstrip()
    name, entry = next(iter(json.loads(text).items()))
    header = f'{{"{name}": {json.dumps(entry)}, {text[1:]}'.encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + raw[8 + length :]


def pickled(folder: Path) -> None:
    (folder / INDEX).unlink()
    for file in folder.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))


def bare(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def copied(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / "other.safetensors").write_bytes(file_of_any(folder).read_bytes())


def file_of_any(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def quantization(**changes: Any) -> Config:
    own = RELEASED[V32].config["quantization_config"]
    return {"quantization_config": {k: v for k, v in (own | changes).items() if v is not None}}


def as_float(tensor: Tensor) -> Tensor:
    return tensor.float()


GLM_NAMES = tuple(good(GLM))
SAFE = r"model-0000\d-of-0000\d\.safetensors"
AT = rf" \(in {SAFE}\)"
BROKEN: dict[str, Break] = {
    "a shard is missing": Break(
        V32, CheckpointError, f"missing from .*{SAFE}", files=lambda f: file_of(f, WEIGHT).unlink()
    ),
    "a shard is cut short": Break(
        V32, CheckpointError, f"{SAFE}: truncated: 100 bytes of", files=edit_raw(lambda r: r[:-100])
    ),
    "a shard is empty": Break(
        V32, CheckpointError, f"{SAFE}: truncated: 0 bytes", files=edit_raw(lambda r: b"")
    ),
    "a header is longer than its file": Break(
        V32, CheckpointError, f"{SAFE}: truncated", files=edit_raw(lambda r: b"\xff" * 4 + r[4:])
    ),
    "a header is no JSON": Break(
        V32,
        CheckpointError,
        f"{SAFE}: not a safetensors file",
        files=edit_raw(lambda r: r[:8] + b"#" + r[9:]),
    ),
    "a header names a tensor twice": Break(
        V32, CheckpointError, f"{SAFE}: .*occurs twice", files=edit_raw(twice)
    ),
    "tensors overlap": Break(
        V32, CheckpointError, f"{SAFE}: .* overlaps", files=edit_header(lambda h: shift(h, -1))
    ),
    "bytes belong to no tensor": Break(
        V32,
        CheckpointError,
        f"{SAFE}: 8 bytes before .* belong to no tensor",
        files=edit_header(lambda h: shift(h, 8)),
    ),
    "bytes lie behind the last tensor": Break(
        V32,
        CheckpointError,
        f"{SAFE}: 3 bytes behind .* belong to no tensor",
        files=edit_raw(lambda r: r + b"abc"),
    ),
    "offsets contradict a shape": Break(
        V32,
        CheckpointError,
        rf"{SAFE}: {WEIGHT}: F8_E4M3 \[2, 3\] takes 6 bytes",
        files=edit_header(lambda h: h[WEIGHT].update(shape=[2, 3])),
    ),
    "a dtype is unheard of": Break(
        V32,
        CheckpointError,
        f"{SAFE}: {WEIGHT}: unknown dtype 'F7'",
        files=edit_header(lambda h: h[WEIGHT].update(dtype="F7")),
    ),
    "a shape is negative": Break(
        V32,
        CheckpointError,
        f"{SAFE}: {WEIGHT}: shape and data_offsets",
        files=edit_header(lambda h: h[WEIGHT].update(shape=[-1, -6])),
    ),
    "an entry has no dtype": Break(
        V32,
        CheckpointError,
        f"{SAFE}: {WEIGHT}: the header must give dtype",
        files=edit_header(lambda h: h[WEIGHT].pop("dtype")),
    ),
    "the index lists what no file holds": Break(
        V32,
        CheckpointError,
        rf"model\.extra{AT}",
        files=edit_index(lambda m: m.update({"model.extra": m[WEIGHT]})),
    ),
    "the index forgets a tensor": Break(
        V32,
        CheckpointError,
        f"does not list.*{WEIGHT}",
        files=edit_index(lambda m: m.pop(WEIGHT)),
    ),
    "the index leads elsewhere": Break(
        V32,
        CheckpointError,
        "not a file name",
        files=edit_index(lambda m: m.update({WEIGHT: "../a.safetensors"})),
    ),
    "a tensor is in two files, without an index": Break(
        V32, CheckpointError, "is in both", files=copied
    ),
    "there are only pickled weights": Break(
        V32, CheckpointError, "is not safetensors and is never read", files=pickled
    ),
    "there are no weights": Break(V32, CheckpointError, r"no \*\.safetensors file", files=bare),
    "a tensor is surplus": Break(
        V32,
        CheckpointError,
        rf"not part of the model: model\.extra\.weight{AT}",
        put("model.extra.weight", torch.zeros(2)),
    ),
    "a tensor is missing": Break(
        V32, CheckpointError, "1 tensors missing: model.norm.weight", drop("model.norm.weight")
    ),
    "an expert is missing": Break(
        V32, CheckpointError, rf"1 tensors missing: {EXPERT} \[128, 256\]", drop(EXPERT)
    ),
    "a layer of another model is there": Break(
        V32,
        CheckpointError,
        rf"not part of the model: model\.layers\.20\.eh_proj\.weight{AT}",
        put("model.layers.20.eh_proj.weight", torch.zeros(2)),
    ),
    "a scale is missing": Break(
        V32,
        CheckpointError,
        rf"1 tensors missing: {WEIGHT}_scale_inv \[2, 2\]",
        drop(f"{WEIGHT}_scale_inv"),
    ),
    "a scale has another name": Break(
        V32,
        CheckpointError,
        rf"missing: {WEIGHT}_scale_inv .*not part of the model: {WEIGHT}_junk{AT}",
        move(f"{WEIGHT}_scale_inv", f"{WEIGHT}_junk"),
    ),
    "a scale has another shape": Break(
        V32,
        CheckpointError,
        rf"{WEIGHT}_scale_inv{AT}: expected \[2, 2\], found \[2, 3\]",
        put(f"{WEIGHT}_scale_inv", torch.ones(2, 3)),
    ),
    "one scale serves a whole weight": Break(
        V32,
        CheckpointError,
        rf"{WEIGHT}_scale_inv{AT}: expected \[2, 2\], found \[\]",
        put(f"{WEIGHT}_scale_inv", torch.tensor(1.0)),
    ),
    "a scale is FP8 itself": Break(
        V32,
        CheckpointError,
        rf"{WEIGHT}_scale_inv{AT}: expected one of .*, found F8_E4M3",
        put(f"{WEIGHT}_scale_inv", lambda t: t.to(torch.float8_e4m3fn)),
    ),
    "a weight has two scales": Break(
        V32,
        CheckpointError,
        rf"not part of the model: {WEIGHT}_scale{AT}",
        put(f"{WEIGHT}_scale", torch.ones(2, 2)),
    ),
    "a scale has nothing to scale": Break(
        V32,
        CheckpointError,
        rf"not part of the model: {WEIGHT}_scale_inv{AT}",
        put(WEIGHT, lambda t: t.to(torch.bfloat16)),
    ),
    "activations are scaled by the file": Break(
        V32,
        CheckpointError,
        rf"not part of the model: {LAYER}\.self_attn\.o_proj\.input_scale{AT}",
        put(f"{LAYER}.self_attn.o_proj.input_scale", torch.ones(())),
    ),
    "a weight is of the other FP8": Break(
        V32,
        CheckpointError,
        rf"{WEIGHT}{AT}: expected one of .*, found F8_E5M2",
        put(WEIGHT, lambda t: t.float().to(torch.float8_e5m2)),
    ),
    "a weight has another shape": Break(
        V32,
        CheckpointError,
        rf"{WEIGHT}{AT}: expected \[256, 192\], found \[256, 191\]",
        put(WEIGHT, lambda t: t.view(torch.uint8)[:, 1:].clone().view(torch.float8_e4m3fn)),
    ),
    "an embedding is quantised": Break(
        V32,
        CheckpointError,
        rf"model\.embed_tokens\.weight{AT}: expected one of .*, found F8_E4M3",
        put("model.embed_tokens.weight", lambda t: t.to(torch.float8_e4m3fn)),
    ),
    "experts of one layer are stored in two ways": Break(
        V32,
        UnsupportedModel,
        rf"{EXPERT}{AT}: stored as BF16, and the first .* as fp8 in blocks",
        both(put(EXPERT, lambda t: t.to(torch.bfloat16)), drop(f"{EXPERT}_scale_inv")),
    ),
    "one half of joined experts is missing": Break(
        V32,
        CheckpointError,
        rf"missing: {LAYER}\.mlp\.experts\.down_proj \[4, 256, 128\]",
        put(f"{LAYER}.mlp.experts.gate_up_proj", torch.zeros(4, 256, 256).to(torch.float8_e4m3fn)),
    ),
    "a projection of the first expert is missing": Break(
        V32,
        CheckpointError,
        rf"1 tensors missing: {FIRST_DOWN} \[256, 128\]",
        drop(FIRST_DOWN, f"{FIRST_DOWN}_scale_inv"),
    ),
    "a draft layer is incomplete": Break(
        V32,
        CheckpointError,
        r"missing: model\.layers\.2\.eh_proj\.weight .*multi-token-prediction layer",
        drop("model.layers.2.eh_proj.weight"),
    ),
    "a draft layer is of another kind": Break(
        V32,
        CheckpointError,
        rf"model\.layers\.2\.main_proj\.weight{AT}\. All of them belong to the multi-token",
        put("model.layers.2.main_proj.weight", torch.zeros(2)),
    ),
    "a layer has no indexer": Break(
        GLM,
        CheckpointError,
        r"1 tensors missing: model\.layers\.1\.self_attn\.indexer\.wk\.weight",
        drop(
            "model.layers.1.self_attn.indexer.wk.weight",
            "model.layers.1.self_attn.indexer.wk.weight_scale_inv",
        ),
    ),
    "a draft layer has no indexer": Break(
        GLM,
        UnsupportedModel,
        r"no indexer of its own.*model\.layers\.5\.self_attn\.indexer",
        drop(*(n for n in GLM_NAMES if "layers.5.self_attn.indexer" in n)),
    ),
    "the rotary base is nowhere": Break(
        GLM, CheckpointError, "rope_theta", config={"rope_parameters": {"rope_type": "default"}}
    ),
    "the rotary kind is another": Break(
        GLM,
        UnsupportedModel,
        "rope_type 'llama3'",
        config={"rope_parameters": {"rope_theta": 10000, "rope_type": "llama3"}},
    ),
    "the method is another": Break(
        V32, UnsupportedModel, "names the method 'awq'", config=quantization(quant_method="awq")
    ),
    "blocks are of another size": Break(
        V32,
        UnsupportedModel,
        r"weight_block_size \[1, 128\]",
        config=quantization(weight_block_size=[1, 128]),
    ),
    "activations have fixed scales": Break(
        V32,
        UnsupportedModel,
        "activation_scheme 'static'",
        config=quantization(activation_scheme="static"),
    ),
    "the method has an unknown setting": Break(
        V32, CheckpointError, "twist is not known", config=quantization(twist=1)
    ),
    "the config wants more layers": Break(
        V32,
        CheckpointError,
        r"tensors missing: model\.layers\.3\.",
        config={"num_hidden_layers": 4},
    ),
    "the config names no number of keys": Break(
        V32, CheckpointError, "index_topk is missing", config={"index_topk": None}
    ),
    "the config is of a later model": Break(
        V4,
        UnsupportedModel,
        "engram_dim, kv_source_layer_ids belongs to a later model",
        config={"kv_source_layer_ids": [0], "engram_dim": 4},
    ),
    "the config is of another drafter": Break(
        V4, UnsupportedModel, "dspark_block_size", config={"dspark_block_size": 8}
    ),
    "a later model's blocks": Break(
        V4,
        UnsupportedModel,
        r"weight_block_size \[32, 32\]",
        config=quantization(weight_block_size=[32, 32]),
    ),
    "another drafter's tensors": Break(
        V4,
        CheckpointError,
        rf"mtp\.0\.main_norm\.weight{AT}\. All of them belong to the multi-token",
        put("mtp.0.main_norm.weight", torch.zeros(2)),
    ),
    "a compressor is incomplete": Break(
        V4,
        CheckpointError,
        r"1 tensors missing: layers\.2\.attn\.compressor\.wgate\.weight",
        drop("layers.2.attn.compressor.wgate.weight"),
    ),
    "a scale of another model's name is missing": Break(
        V4,
        CheckpointError,
        r"1 tensors missing: layers\.2\.attn\.wq_a\.scale \[1, 2\]",
        drop("layers.2.attn.wq_a.scale"),
    ),
    "packed experts have wide scales": Break(
        V4,
        CheckpointError,
        rf"{PACKED}\.scale{AT}: expected one of F8_E8M0, U8, found F32",
        put(f"{PACKED}.scale", as_float),
    ),
    "packed experts have groups of 16": Break(
        V4,
        CheckpointError,
        rf"{PACKED}\.scale{AT}: expected \[128, 8\], found \[128, 16\]",
        put(f"{PACKED}.scale", torch.ones(128, 16).to(E8M0)),
    ),
    "experts are not packed": Break(
        V4,
        CheckpointError,
        rf"{PACKED}\.weight{AT}: expected \[128, 128\], found \[128, 256\]",
        put(f"{PACKED}.weight", torch.zeros(128, 256, dtype=torch.int8)),
    ),
    "a projection is packed": Break(
        V4,
        UnsupportedModel,
        r"layers\.1\.attn\.wq_a\.weight: stored as mxfp4, which is supported for routed experts",
        both(
            put("layers.1.attn.wq_a.weight", torch.zeros(128, 128, dtype=torch.int8)),
            put("layers.1.attn.wq_a.scale", torch.ones(128, 8).to(E8M0)),
        ),
    ),
}
assert len(BROKEN) > 50


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_said_in_one_line_before_anything_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were about to be read")

    monkeypatch.setattr(load_module, "SafetensorsSource", refuse)
    broken = BROKEN[name]
    own = RELEASED[broken.family]
    tensors = dict(good(broken.family))
    broken.tensors(tensors)
    folder = write_released(tmp_path / "model", own, tensors)
    config = {k: v for k, v in (own.config | broken.config).items() if v is not None}
    write_json(folder / "config.json", config)
    broken.files(folder)
    with pytest.raises(broken.error, match=broken.says) as raised:
        load_folder(open_folder(folder), torch.float32)
    assert "\n" not in str(raised.value)


def test_each_kind_of_folder_that_is_broken_here_would_load(tmp_path: Path) -> None:
    for family in (V32, GLM, V4):
        folder = write_released(tmp_path / family, RELEASED[family], dict(good(family)))
        assert load_folder(open_folder(folder), torch.bfloat16).weights
