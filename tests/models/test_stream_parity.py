# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's logits and greedy tokens equal those of transformers, at every offset."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from freewheel.models import LoadedModel, load_folder, open_folder
from tests.fixtures.closed_form import Config, write_checkpoint, write_json
from tests.fixtures.compressed import KINDS, PUBLISHED_RATIOS, RATES, T4, stream_tensors, write_t4
from tests.models.paged import Paged
from tests.models.transformers_oracle import CLASSES, LowestPositionTies, Oracle

TOKENS = random.Random(4).choices(range(256), k=60)
LONG = random.Random(5).choices(range(256), k=330)
TOLERANCE = 1e-4


def without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


def kinds(*ratios: int) -> Config:
    return {"layer_types": [KINDS[r] for r in ratios], "compress_ratios": [*ratios, 0]}


VARIANTS: dict[str, Config] = {
    "t4": T4,
    "no-yarn": T4 | {"rope_scaling": None},
    "entries-alone": T4 | kinds(8, 4, 8, 4, 4),
    "windows-alone": T4 | kinds(0, 0, 0, 0, 0),
    "every-layer-by-token": T4 | {"num_hash_layers": 5},
    "no-layer-by-token": T4 | {"num_hash_layers": 0, "num_experts_per_tok": 3},
    "two-streams": T4 | {"hc_mult": 2, "hc_sinkhorn_iters": 3, "hc_eps": 1e-3},
    "wide-window": T4 | {"sliding_window": 20, "index_topk": 64, "o_groups": 4},
    "big-epsilon": T4 | {"rms_norm_eps": 0.05},
    "loose-clamp": T4 | {"swiglu_limit": 10.0, "routed_scaling_factor": 2.0},
}


@dataclass
class Pair:
    config: Config
    theirs: torch.nn.Module
    ours: LoadedModel
    logits: Tensor  # float32 [60, V]  of TOKENS


def theirs_of(folder: Path) -> torch.nn.Module:
    return CLASSES["deepseek_v4"][1].from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def their_logits(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    with LowestPositionTies():
        return model(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A folder in DeepSeek's layout, read by both."""
    config = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp("model") / "model"
    write_checkpoint(folder, config, stream_tensors(config, seed=11))
    theirs = theirs_of(folder)
    ours = load_folder(open_folder(folder), torch.float32)
    return Pair(config, theirs, ours, their_logits(theirs, TOKENS))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).abs().max() < TOLERANCE


def test_prompts_of_every_length_give_the_logits_of_transformers(pair: Pair) -> None:
    """Every one for T4; those around the ends of windows for its variants."""
    lengths = range(1, 42) if pair.config is T4 else (1, 3, 4, 5, 7, 8, 9, 41)
    for length in lengths:
        ours = Paged(pair.ours, page_size=8, seed=length).logits(TOKENS[:length], [length])
        assert_close(ours, pair.logits[:length])


@pytest.mark.parametrize("chunks", [(13, *[1] * 12, 9), (15, 2, 5), (60,)])
def test_decoding_and_chunks_give_the_logits_of_transformers(
    pair: Pair, chunks: tuple[int, ...]
) -> None:
    assert_close(Paged(pair.ours, page_size=16).logits(TOKENS, chunks), pair.logits)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = write_t4(tmp_path_factory.mktemp("base") / "model", seed=11)
    theirs, ours = theirs_of(folder), load_folder(open_folder(folder), torch.float32)
    return Pair(T4, theirs, ours, their_logits(theirs, TOKENS))


@pytest.mark.parametrize("chunks", [(1,), (2,), (3,), (7,), (16, 1), (17, 23)])
def test_any_chunks_give_the_logits_of_transformers(base: Pair, chunks: tuple[int, ...]) -> None:
    assert_close(Paged(base.ours, page_size=8).logits(TOKENS, chunks), base.logits)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 9, 31])
def test_greedy_tokens_equal_those_of_transformers(base: Pair, length: int) -> None:
    pair = base
    prompt = TOKENS[:length]
    paged = Paged(pair.ours, page_size=8)
    hidden = paged.forward(prompt)[-1:]
    answer: list[int] = []
    for step in range(10):
        answer.append(int(paged.model.logits(hidden)[-1].argmax()))
        hidden = paged.forward(answer[-1:], start=length + step)
    known = list(prompt)
    for _ in range(10):
        known.append(int(their_logits(pair.theirs, known)[-1].argmax()))
    assert answer == known[length:]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("published") / "model"
    write_checkpoint(folder, PUBLISHED_RATIOS, stream_tensors(PUBLISHED_RATIOS, seed=2))
    theirs = theirs_of(folder)
    ours = load_folder(open_folder(folder), torch.float32)
    return Pair(PUBLISHED_RATIOS, theirs, ours, their_logits(theirs, LONG))


@pytest.mark.parametrize("length", [1, 4, 127, 128, 129, 255, 256, 257, 301, 330])
def test_the_published_ratios_give_the_logits_of_transformers(published: Pair, length: int) -> None:
    ours = Paged(published.ours, page_size=256, length=336).logits(LONG[:length], [length])
    assert_close(ours, published.logits[:length])


@pytest.mark.parametrize("chunks", [(120, 3), (128,), (127, 1, 129), (200, 2, 60)])
def test_chunks_across_published_windows_give_the_logits_of_transformers(
    published: Pair, chunks: tuple[int, ...]
) -> None:
    ours = Paged(published.ours, page_size=128, length=336).logits(LONG, chunks)
    assert_close(ours, published.logits)


def test_swapping_either_rotation_would_show(pair: Pair, tmp_path: Path) -> None:
    """Layers with entries turn by the compressed base, stretched; the others by the plain one."""
    thetas = {"rope_theta": pair.config["compress_rope_theta"]}
    stretched = {"compress_rope_theta": pair.config["rope_theta"]}
    ratios = pair.config["compress_ratios"]
    tensors = stream_tensors(pair.config, seed=11)
    for change, concerned in ((thetas, 0 in ratios[:-1]), (stretched, any(ratios))):
        folder = write_checkpoint(tmp_path / str(change), pair.config | change, tensors)
        other = load_folder(open_folder(folder), torch.float32)
        logits = Paged(other, page_size=8).logits(TOKENS, [60])
        assert ((logits - pair.logits).abs().max() > 1e-2) == concerned


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Path]:
    """A model made by transformers, as it saves it."""
    made = without(T4, "compress_ratios", "num_hash_layers", "qk_rope_head_dim", "topk_method")
    made |= {"mlp_layer_types": ["hash_moe", *["moe"] * 4], "partial_rotary_factor": 0.25}
    oracle = Oracle(made | {"compress_rates": dict(RATES)}, seed=11)
    return oracle, oracle.save(tmp_path_factory.mktemp("saved") / "model")


def test_folders_that_transformers_saves_give_its_logits(saved: tuple[Oracle, Path]) -> None:
    oracle, folder = saved
    ours = load_folder(open_folder(folder), torch.float32, mtp=False)
    assert_close(Paged(ours, page_size=8).logits(TOKENS, [60]), oracle.logits(TOKENS))


def test_folders_in_transformers_own_names_give_its_logits(
    saved: tuple[Oracle, Path], tmp_path: Path
) -> None:
    """Module by module, with all experts of a layer in one tensor."""
    oracle, folder = saved
    own = tmp_path / "model"
    own.mkdir()
    save_file(dict(oracle.model.state_dict()), own / "model.safetensors")
    write_json(own / "config.json", {**oracle.model.config.to_dict(), "dtype": "float32"})
    ours = load_folder(open_folder(own), torch.float32, mtp=False)
    assert_close(Paged(ours, page_size=8).logits(TOKENS, [60]), oracle.logits(TOKENS))
    assert folder != own


def test_a_bfloat16_checkpoint_is_close_to_its_float32_one(tmp_path: Path) -> None:
    tensors = stream_tensors(T4, seed=0)
    halved = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    exact = {n: t.float() if t.is_floating_point() else t for n, t in halved.items()}
    stored = load_folder(
        open_folder(write_checkpoint(tmp_path / "bf16", T4, halved)), torch.float32
    )
    wide = load_folder(open_folder(write_checkpoint(tmp_path / "fp32", T4, exact)), torch.float32)
    one, two = (Paged(m, page_size=8).logits(TOKENS, [60]) for m in (stored, wide))
    assert torch.equal(one, two)
    rounded = load_folder(open_folder(tmp_path / "bf16"), torch.bfloat16)
    logits = Paged(rounded, page_size=8).logits(TOKENS[:4], [4])
    assert logits.dtype == torch.float32 and (logits - one[:4]).abs().max() < 0.5


def test_the_fixture_is_read_by_its_shards_too(tmp_path: Path) -> None:
    whole = load_folder(open_folder(write_t4(tmp_path / "one")), torch.float32)
    parts = load_folder(open_folder(write_t4(tmp_path / "three", shards=3)), torch.float32)
    one, two = (Paged(m, page_size=8).logits(TOKENS, [60]) for m in (whole, parts))
    assert torch.equal(one, two)


def test_an_oracle_leaves_its_configuration_as_it_was() -> None:
    config, before = deepcopy(T4), deepcopy(T4)
    Oracle(config, seed=0)
    assert config == before
