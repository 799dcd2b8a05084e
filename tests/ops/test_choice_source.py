# SPDX-License-Identifier: Apache-2.0
"""The choice of tokens in CUDA C++, compiled for this machine's processor, as the specification."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from freewheel.ops import SPECIFICATIONS
from freewheel.ops.choosing import gumbel, mask_stop_ids
from tests.ops.test_choosing import rows_of
from tests.ops.test_cuda_sources import COMPILER, Call, built, compile_for_hopper, places

pytest.importorskip("triton")
module: Any = importlib.import_module("freewheel.ops.cuda.cluster_choice")

ENTRY = """
extern "C" void run(const float* logits, const int* positions, const int* rows,
                    const float* temperature, const int* top_k, const float* top_p,
                    const float* min_p, const long long* seeds, const int* stop_ids,
                    const int* minimum_lens, const float* values, const int* ids, int* out,
                    int queries, int bytes, int choices, int size, int parts) {
  run_blocks(queries * CLUSTER, CLUSTER, THREADS, bytes, [=] {
    choose_tokens(logits, positions, rows, temperature, top_k, top_p, min_p, seeds, stop_ids,
                  minimum_lens, values, ids, out, choices, size, parts);
  });
}
"""
OTHERS = {"temperature": 1.3}
ASKED: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 3},
    {"top_k": 1, "top_p": 0.5},
    {"top_p": 0.6} | OTHERS,
    {"top_p": 0.0},
    {"top_p": 0.97, "temperature": 3.0},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01} | OTHERS,
    {"top_k": 200, "min_p": 0.3, "temperature": 5.0},
]


@pytest.fixture(scope="module", params=[(32, 1, 1), (64, 2, 0)], ids=str)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(kernel, blocks of a query), by threads of a block, those, and by vectors or not."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    threads, cluster, vector = request.param
    constants = {"THREADS": threads, "CLUSTER": cluster, "STOPS": 8, "VECTOR": vector}
    folder = tmp_path_factory.mktemp("built")
    return built(folder, "choose_tokens", ENTRY, constants), cluster


def chosen(source: tuple[Call, int], logits: Tensor, positions: Tensor, rows: Any) -> Tensor:
    run, cluster = source
    out = torch.full(positions.shape, -7, dtype=torch.int32)
    size = logits.shape[2]
    values, ids = best_of_parts(logits, positions, *rows)
    sizes = out.numel(), module.shared_bytes(size, cluster), logits.shape[1], size, ids.shape[2]
    run(*places(logits, positions, *rows, values, ids, out), *sizes)
    return out


def best_of_parts(
    logits: Tensor, positions: Tensor, rows: Tensor, *state: Tensor
) -> tuple[Tensor, Tensor]:
    """What the launch in front finds of queries that do not filter, in parts of 8 tokens."""
    warm, seeds, stops, minimum = (state[nth][rows.long()] for nth in (0, 4, 5, 6))
    logits = mask_stop_ids(logits, stops, positions + 1 < minimum[:, None])
    noise = gumbel(seeds, positions, logits.shape[2])
    hot = warm[:, None, None] > 0
    scores = torch.where(hot, logits / warm[:, None, None].clamp(min=0.1) + noise, logits)
    best = pad(scores, (0, -logits.shape[2] % 8), value=-math.inf).unflatten(2, (-1, 8)).max(3)
    first = torch.arange(best.indices.shape[2]) * 8
    return best.values.contiguous(), (best.indices + first).int().contiguous()


def draw_logits(kind: str, batch: int, size: int) -> Tensor:
    logits = torch.randn(batch, 2, size) * 3
    match kind:
        case "ties":
            return (logits * 2).round() / 2  # both zeros among them
        case "equal":
            return torch.full_like(logits, -2.5)
        case "special":
            chance = torch.rand(logits.shape)
            logits = logits.masked_fill(chance < 0.5, -math.inf)
            logits[1, 0, size // 2], logits[2, 1] = math.nan, -math.inf
            logits[3, 1], logits[3, 1, size - 1] = -math.inf, -5.0
            return logits
        case "one":
            logits = torch.zeros_like(logits)
            logits[:, :, size // 3] = 30
            return logits
        case "denormal":
            return logits * 1e-41
        case _:
            return logits


@pytest.mark.parametrize("kind", ["random", "ties", "equal", "special", "one", "denormal"])
def test_the_source_chooses_as_the_specification(source: tuple[Call, int], kind: str) -> None:
    torch.manual_seed(len(kind))
    count = len(ASKED)
    seeds = [3, -5, 2**62, *range(count - 3)]
    state = rows_of(*ASKED, seeds=seeds, stop=2, minimum=12)
    logits = draw_logits(kind, count, 52 if kind == "denormal" else 300)
    positions = torch.randint(0, 30, (count, 2), dtype=torch.int32)
    rows = torch.randperm(count).add(1).int()
    found = chosen(source, logits, positions, (rows, *state))
    assert torch.equal(found, SPECIFICATIONS["choose"](logits, positions, rows, *state))


def test_of_equal_tokens_the_lowest_are_kept(source: tuple[Call, int]) -> None:
    """Across blocks: as many as top-k and top-p leave of them, however often it is drawn."""
    draws = 4
    asked: list[dict[str, float]] = [
        {"top_k": 700},
        {"top_p": 0.4999},
        {"top_k": 800, "top_p": 0.4999},
    ]
    logits = torch.zeros(3, draws, 900)
    logits[:, :, 5] = -3.0
    positions = torch.arange(draws, dtype=torch.int32).expand(3, draws).contiguous()
    rows = torch.tensor([1, 2, 3], dtype=torch.int32)
    state = rows_of(*asked, seeds=[1, 2, 3])
    found = chosen(source, logits, positions, (rows, *state))
    assert torch.equal(found, SPECIFICATIONS["choose"](logits, positions, rows, *state))
    assert (found.amax(1) < torch.tensor([701, 451, 401])).all()


@pytest.mark.parametrize("vocabulary", [40, 4096, 16384, 129_280, 200_000])
def test_a_vocabulary_fits_its_blocks(vocabulary: int) -> None:
    blocks = module.blocks_for(vocabulary)
    assert blocks == 1 or vocabulary > blocks // 2 * module.TOKENS
    assert module.shared_bytes(vocabulary, blocks) <= module.SHARED


@pytest.mark.parametrize("blocks", [1, 8])
def test_the_choice_compiles_for_hopper(blocks: int) -> None:
    sizes = {"THREADS": module.THREADS, "CLUSTER": blocks, "STOPS": 8, "VECTOR": 1}
    compile_for_hopper("choose_tokens", sizes)
