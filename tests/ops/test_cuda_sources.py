# SPDX-License-Identifier: Apache-2.0
"""Kernels in CUDA C++, compiled for this machine's processor, against the specifications."""

from __future__ import annotations

import ctypes
import importlib
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.errors import ConfigError
from freewheel.ops import SPECIFICATIONS
from freewheel.ops.rows import write_index_keys
from tests.ops.cases import draw, draw_pages, ints

SOURCES = Path(__file__).parents[2] / "src/freewheel/ops/cuda/sources"
COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

TOPK = """
extern "C" void run(const float* logits, const int* table, const int* rows, const int* lens,
                    int* out, int queries, int width, int length, int pages, int k, int held) {
  int bytes = 50368 + 4 * ((k + 3) / 4 * 4 + held + length / PAGE + 2);
  run_blocks(queries * CLUSTER, CLUSTER, THREADS, bytes,
             [=] { topk_slots(logits, table, rows, lens, out, width, length, pages, k, held); });
}
"""

SHORT = """
extern "C" void run(const float* logits, const int* table, const int* rows, const int* lens,
                    int* out, int queries, int width, int length, int pages, int k, int) {
  run_blocks(queries, 1, THREADS, sizeof(Space) + 4 * k,
             [=] { topk_short(logits, table, rows, lens, out, width, length, pages, k); });
}
"""

LOGITS = """
extern "C" void run(const void* query, const float* gates, const unsigned char* keys,
                    const int* table, const int* rows, const int* lens, float* out, int batch,
                    int width, int parts, int share, int pages, int length, int skip) {
  int bytes = QUERIES * HEADS * (ROW + 4) + GROUPS * STAGES * (STAGE + 8);
  run_blocks(batch * parts * share, 1, THREADS, bytes, [=] {
    index_logits((const unsigned short*)query, gates, keys, table, rows, lens, out, width, parts,
                 share, pages, length, skip, width * HEADS * DIM, HEADS * DIM, DIM, width * HEADS,
                 HEADS);
  });
}
"""

Call = Callable[..., None]


def built(folder: Path, name: str, entry: str, constants: dict[str, int]) -> Call:
    """`entry`, which runs `sources/NAME.cu` for `constants`."""
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    defined = [f"#define {word} {value}" for word, value in constants.items()]
    files = (Path(__file__).parent / "on_host.h", SOURCES / "pieces.cuh", SOURCES / f"{name}.cu")
    source.write_text("\n".join((*defined, *(one.read_text() for one in files), entry)))
    command = [str(COMPILER), "-std=c++20", "-O1", "-shared", "-fPIC", str(source)]
    subprocess.run([*command, "-o", str(library)], check=True)
    return ctypes.CDLL(str(library)).run


def compile_for_hopper(name: str, constants: dict[str, int], chip: str = "sm_90") -> None:
    """`sources/NAME.cu` without a card; skips the test where its compiler is missing."""
    pytest.importorskip("triton")
    nvrtc: Any = importlib.import_module("freewheel.ops.cuda.nvrtc")
    try:
        compiler = nvrtc.find_compiler("13.0")
    except ConfigError as error:
        pytest.skip(str(error))
    files = (*sorted(SOURCES.glob("*.cuh")), SOURCES / f"{name}.cu")
    text = "\n".join(file.read_text() for file in files)
    defined = (f"-D{word}={value}" for word, value in constants.items())
    options = (f"--gpu-architecture={chip}", "--std=c++17", "-default-device", *defined)
    assert compiler.compile(text, options).startswith(b"\x7fELF")


def places(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(one.data_ptr()) for one in tensors]


@pytest.fixture(scope="module", params=[(64, 1, 1), (64, 2, 0), (32, 4, 1)], ids=str)
def topk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Call:
    """By so many threads a block, blocks of a row, and by vectors or not."""
    threads, cluster, vector = request.param
    constants = {"THREADS": threads, "CLUSTER": cluster, "PAGE": 16, "VECTOR": vector}
    return built(tmp_path_factory.mktemp("built"), "topk_slots", TOPK, constants)


def picked(run: Call, logits: Tensor, pages: Tensor, rows: Tensor, lens: Tensor, k: int) -> Tensor:
    out = torch.full((*lens.shape, k), -7, dtype=torch.int32)
    sizes = lens.numel(), lens.shape[1], logits.shape[2], pages.shape[1], k, 1024
    run(*places(logits, pages, rows, lens, out), *sizes)
    return out


@pytest.fixture(scope="module", params=[(128, 5, 0), (288, 3, 1), (640, 1, 1)], ids=str)
def short(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Call:
    """By so many threads, fours of each, and by vectors or not."""
    threads, fours, vector = request.param
    constants = {"THREADS": threads, "FOURS": fours, "PAGE": 16, "VECTOR": vector}
    return built(tmp_path_factory.mktemp("built"), "topk_short", SHORT, constants)


KINDS = pytest.mark.parametrize(
    "kind", ["random", "ties", "special", "equal", "one", "denormal", "near"]
)


def takes_the_best(run: Call, kind: str, k: int) -> None:
    pages = draw_pages(k, batch=2, width=3, columns=150, size=16)
    logits = draw(7, 2, 3, pages.length)
    if kind == "near":
        logits = 1 + logits / 8192  # many that begin with the same 12 bits
    if kind == "ties":
        logits = (logits * 2).round() / 2  # few values, both zeros among them
    if kind == "special":
        chance = draw(8, *logits.shape)
        logits = logits.masked_fill(chance < -0.3, math.nan).masked_fill(chance > 0.3, -math.inf)
        logits[0, 0, 3] = math.inf
    if kind == "equal":
        logits = torch.full_like(logits, -2.5)
    if kind == "one":
        logits = torch.zeros_like(logits)
        logits[:, :, 517] = 1
    if kind == "denormal":
        logits = logits * 1e-42
    lens = ints(pages.length, 1100, k, 0, k + 1, pages.length - 3).view(2, 3)
    found = picked(run, logits, pages.table, pages.rows, lens, k)
    args = (logits, pages.table, pages.rows, lens, 16, k)
    assert torch.equal(found, SPECIFICATIONS["topk_slots"](*args))


@pytest.mark.parametrize("k", [1, 64, 300])
@KINDS
def test_topk_takes_the_best_and_of_equals_the_lowest_positions(
    topk: Call, kind: str, k: int
) -> None:
    takes_the_best(topk, kind, k)


@pytest.mark.parametrize("k", [1, 64, 300, 1150])
@KINDS
def test_one_block_s_registers_take_the_same(short: Call, kind: str, k: int) -> None:
    takes_the_best(short, kind, k)


@pytest.mark.parametrize(
    ("packed", "heads", "width", "parts", "page"),
    [(1, 32, 1, 1, 64), (1, 32, 3, 2, 128), (0, 32, 2, 1, 128), (1, 64, 2, 1, 64)],
)
def test_index_logits_agree_up_to_rounding(
    tmp_path: Path, packed: int, heads: int, width: int, parts: int, page: int
) -> None:
    constants = {"FP8": packed, "HEADS": heads, "QUERIES": -(-width // parts), "GROUPS": 1 + packed}
    constants |= {"STAGES": 2, "PAGE": page, "BLOCKS": 1, "JOINED": 2 - width % 2}
    constants["BUFFERS"] = 2 if parts > 1 else 1
    run = built(tmp_path, "index_logits", LOGITS, constants)
    pages = draw_pages(3, batch=3, width=width, columns=5, size=page)
    lens = pages.kv_lens.clone()
    lens[0], lens[1] = pages.length - width + torch.arange(width), 70
    query, gates = draw(2, 3, width, heads, 128).bfloat16(), draw(3, 3, width, heads)
    query[0, 0, 1] = 0
    if packed:
        keys = torch.full((pages.count, page, 132), 255, dtype=torch.uint8)
        slots = torch.arange(pages.count * page).view(pages.count, page)
        write_index_keys(keys, draw(1, pages.count, page, 128), slots)
    else:
        keys = draw(1, pages.count, page, 128).bfloat16()
    name = "fp8_index_logits" if packed else "index_logits"
    args = (query, gates, keys, pages.table, pages.rows, lens)
    expected = SPECIFICATIONS[name](query, gates.double(), *args[2:])
    for skip in (0, 80):
        out = torch.full((3, width, pages.length), math.nan)
        sizes = 3, width, parts, 2, pages.table.shape[1], pages.length, skip
        run(*places(*args, out), *sizes)
        seen = (lens > skip)[..., None] & expected.isfinite()
        off = (out - expected)[seen].abs().max()
        assert off <= 2e-5 * expected[seen].abs().max()
        if skip == 0:
            assert torch.equal(out.isneginf(), expected.isneginf())


@pytest.mark.parametrize("kind", ["equal", "near"])
def test_topk_counts_again_what_no_list_has_room_for(topk: Call, kind: str) -> None:
    pages = draw_pages(3, batch=1, width=1, columns=1100, size=16)
    logits = 1 + draw(7, 1, 1, pages.length) / 8192
    if kind == "equal":
        logits = torch.ones_like(logits)
    lens = ints(pages.length).view(1, 1)
    found = picked(topk, logits, pages.table, pages.rows, lens, 700)
    args = (logits, pages.table, pages.rows, lens, 16, 700)
    assert torch.equal(found, SPECIFICATIONS["topk_slots"](*args))
