# SPDX-License-Identifier: Apache-2.0
"""Logits and greedy tokens equal those of transformers, below, at and above index_topk."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from freewheel.models import LoadedModel, load_folder, open_folder
from tests.fixtures.closed_form import T32, TG, YARN, write_t32, write_tg
from tests.models.paged import Paged
from tests.models.transformers_oracle import CLASSES, LowestPositionTies, Oracle

TOKENS = random.Random(4).choices(range(256), k=40)
TOLERANCE = 1e-4

VARIANTS = {
    "deepseek": T32,
    "deepseek-yarn": T32 | {"rope_scaling": YARN},
    "deepseek-dense": T32 | {"index_topk": 64},
    "deepseek-many-groups": T32
    | {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    "glm": TG,
    "glm-yarn": TG | {"rope_scaling": YARN},
    "glm-big-epsilon": TG | {"rms_norm_eps": 0.05},
}
"""A big epsilon would show if the norms of the latents used it: theirs is 1e-6 in any case."""


@dataclass
class Pair:
    oracle: Oracle
    ours: LoadedModel
    logits: Tensor  # float32 [40, V]  the oracle's of TOKENS


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    oracle = Oracle(VARIANTS[request.param], seed=11)
    folder = oracle.save(tmp_path_factory.mktemp("saved") / "model")
    ours = load_folder(open_folder(folder), torch.float32, mtp=False)
    return Pair(oracle, ours, oracle.logits(TOKENS))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).abs().max() < TOLERANCE


def test_prompts_of_every_length_give_the_logits_of_transformers(pair: Pair) -> None:
    for length in range(1, len(TOKENS) + 1):
        ours = Paged(pair.ours, seed=length).logits(TOKENS[:length], [length])
        assert_close(ours, pair.logits[:length])


@pytest.mark.parametrize("chunks", [(1,), (3,), (7,), (16, 1), (15, 2, 5), (17, 23)])
def test_decoding_and_chunks_give_the_logits_of_transformers(
    pair: Pair, chunks: tuple[int, ...]
) -> None:
    assert_close(Paged(pair.ours).logits(TOKENS, chunks), pair.logits)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 28])
def test_greedy_tokens_equal_those_of_transformers(pair: Pair, length: int) -> None:
    prompt = TOKENS[:length]
    paged = Paged(pair.ours)
    hidden = paged.forward(prompt)[-1:]
    answer: list[int] = []
    for step in range(10):
        answer.append(int(paged.model.logits(hidden)[-1].argmax()))
        hidden = paged.forward(answer[-1:], start=length + step)
    assert answer == pair.oracle.greedy(prompt, 10)


@pytest.mark.parametrize("write", [write_t32, write_tg])
def test_transformers_reads_our_fixture_folders_the_same_way(write, tmp_path) -> None:
    folder = write(tmp_path / "model")
    family = "deepseek_v32" if write is write_t32 else "glm_moe_dsa"
    theirs = CLASSES[family][1].from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode(), LowestPositionTies():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    ours = load_folder(open_folder(folder), torch.float32)
    assert_close(Paged(ours).logits(TOKENS, [len(TOKENS)]), expected)
