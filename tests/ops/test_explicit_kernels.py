# SPDX-License-Identifier: Apache-2.0
"""Kernels with their layouts written out compile for Hopper, where there is no card too.

No interpreter runs them: on a card, test_packed_kernels.py and test_cuda_kernels.py compare them
with the specifications.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from freewheel.ops import load_kernels

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="compiles in earnest"
)
MOST_SHARED = 232448
"""Bytes that a program may have on an H200."""

POINTERS = {"slots": "*i32", "codes": "*u8", "scales": "*fp32"}
RUNS = ("part_out", "high_out", "total_out")
NUMBERS = {"scale": "fp32", "K": "i32", "H": "i32", "LANES": "i32", "groups": "i32"}
PRODUCT = {"pairs": "*u16", "scale": "*fp32"} | dict.fromkeys(
    ("M", "N", "HALF", "BLOCK_N", "SHARE"), "i32"
)
FLOATS, INTS = ("gates", "out"), ("table", "rows", "kv_lens")
LOGITS = dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(INTS, "*i32")
LOGITS |= dict.fromkeys(("W", "P", "S", "SKIP", "qb", "qw", "qh", "gb", "gw"), "i32")

CACHES = ("keys", "entries")
WINDOWS = {"sinks": "*fp32", "table": "*fp32", "scale": "fp32"}
WINDOWS |= dict.fromkeys(("slots", "entry_slots", "positions"), "*i32")
WINDOWS |= dict.fromkeys(("K", "E", "H", "TILES", "groups", "key_pairs", "entry_pairs"), "i32")


def compiled(kernel: Any, warps: int, **constants: Any) -> Any:
    constants = {"BYTES": 656, "CHAINED": True, "SPAN": 2048} | constants
    kinds = NUMBERS | POINTERS | ({} if constants["WHOLE"] else dict.fromkeys(RUNS, "*fp32"))
    return compiled_for(kernel, warps, kinds, constants)


def compiled_for(
    kernel: Any, warps: int, kinds: dict[str, str], constants: dict[str, Any], even: str = ""
) -> Any:
    """`even`: names of numbers that 16 divides, as it does all pointers."""
    compiler = importlib.import_module("triton.compiler")
    runtime = importlib.import_module("triton.experimental.gluon._runtime")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    names: list[str] = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "*bf16") for name in names
    }
    aligned = {
        (nth,): [["tt.divisibility", 16]]
        for nth, name in enumerate(names)
        if signature[name].startswith("*") or name in even.split()
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = runtime.GluonASTSource(kernel, signature, values, aligned)
    options = {"num_warps": warps, "launch_pdl": True}
    return compiler.compile(source, target=target, options=options)


@pytest.mark.parametrize("whole", [False, True])
def test_few_heads_over_packed_rows_leave_room_for_two_programs(whole: bool) -> None:
    load_kernels("cuda")
    module: Any = importlib.import_module("freewheel.ops.cuda.packed_few")
    tile = module.TILE
    found = compiled(module._attend, tile.warps, STEP=tile.step, BUFFERS=tile.stages, WHOLE=whole)
    assert 2 * (found.metadata.shared + 1024) <= MOST_SHARED + 1024
    assert "mma.sync.aligned.m16n8k16" in found.asm["ptx"]


@pytest.mark.parametrize("packed", [False, True])
def test_many_heads_multiply_by_groups_of_warps(packed: bool) -> None:
    load_kernels("cuda")
    module: Any = importlib.import_module("freewheel.ops.cuda.many_heads")
    found = compiled(module._attend, module.TILE.warps, PACKED=packed, WHOLE=True)
    assert found.metadata.shared <= MOST_SHARED
    assert "wgmma.mma_async" in found.asm["ptx"]


def usage(found: Any, cache: Path) -> dict[str, int]:
    """What the assembler says of a compiled kernel: registers of a thread, and bytes it spills."""
    knobs = importlib.import_module("triton.knobs")
    text = cache / "kernel.ptx"
    text.write_text(found.asm["ptx"], encoding="utf-8")
    said = subprocess.run(
        [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(text), "-o", str(cache / "out")],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    (registers,), spilled = re.findall(r"Used (\d+) registers", said), r"(\d+) bytes spill stores"
    return {"registers": int(registers), "spilled": sum(map(int, re.findall(spilled, said)))}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_windows_of_many_heads_stay_in_registers(packed: bool, whole: bool, tmp_path: Path) -> None:
    """A thread loads the codes of a packed key by 16 bytes; no loop spills."""
    load_kernels("cuda")
    module: Any = importlib.import_module("freewheel.ops.cuda.window_heads")
    sizes = {"SPAN": 1024, "WHOLE": whole, "TURNED": True, "PACKED": packed, "CHAINED": True}
    kinds = WINDOWS | (dict.fromkeys(CACHES, "*u8") if packed else {})
    kinds |= {} if whole else dict.fromkeys(RUNS, "*fp32")
    found = compiled_for(module._attend, module.TILE.warps, kinds, sizes)
    assert found.metadata.shared <= MOST_SHARED
    assert "wgmma.mma_async" in found.asm["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\S* .*, (0x\w+), ", found.asm["ptx"])
    assert set(copies) == {"0x10"}
    assert found.asm["ptx"].count("ld.global.v4.b32") == (14 if packed else 0)
    assert usage(found, tmp_path)["spilled"] <= 8


@pytest.mark.parametrize("tokens", [32, 64, 128])
def test_products_that_begin_early_fit_and_copy_whole_vectors(tokens: int) -> None:
    load_kernels("cuda")
    module: Any = importlib.import_module("freewheel.ops.cuda.early_products")
    tile = module.early_tile(tokens, 2240, 7168)
    assert tile.tokens == tokens
    sizes = {"TOKENS": tokens, "STAGES": tile.stages, "CODES": tile.codes, "CHAINED": True}
    found = compiled_for(module.early_products, 8, PRODUCT, sizes, "N HALF BLOCK_N")
    assert found.metadata.shared <= MOST_SHARED
    assert "wgmma.mma_async" in found.asm["ptx"]
    assert set(re.findall(r"cp\.async\.c[ag]\S* .*, (0x\w+), ", found.asm["ptx"])) == {"0x10"}


@pytest.mark.parametrize("queries", [1, 4])
def test_index_logits_of_four_queries_leave_room_for_two_programs(queries: int) -> None:
    load_kernels("cuda")
    module: Any = importlib.import_module("freewheel.ops.cuda.early_logits")
    sizes = {"HEADS": 64, "QUERIES": queries, "PAGE": 64, "BUFFERS": module.BUFFERS}
    sizes |= {"FILL": False, "CHAINED": True}
    found = compiled_for(module.early_logits, 4, LOGITS, sizes, "qb qw qh S")
    assert 2 * (found.metadata.shared + 1024) <= MOST_SHARED + 1024
    assert "wgmma.mma_async" in found.asm["ptx"]
