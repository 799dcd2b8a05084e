# SPDX-License-Identifier: Apache-2.0
"""`freewheel bench kernels`: what it refuses, and that its cells are calls that their ops take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from freewheel.bench import kernel_summary
from freewheel.engine import KernelTime, PeerTime, bench_kernels, choose_cells
from freewheel.errors import ConfigError
from freewheel.ops import load_kernels
from freewheel.ops.rows import write_keys
from freewheel.runtime.kernel_cells import CELLS, EXPERTS, QUICK, Cell
from freewheel.runtime.kernel_inputs import draw_sets
from freewheel.runtime.kernel_peers import PEERS, fp8_index_keys, fp8_keys, fp8_latents


@pytest.mark.parametrize("cell", QUICK, ids=lambda cell: cell.op)
def test_a_cell_s_error_is_nothing_but_rounding(cell: Cell) -> None:
    load_kernels("cpu")
    small = replace(cell, batch=2, width=2, context=min(cell.context, 2112))
    if cell.op in EXPERTS:
        small = replace(small, dims=(256, 128, 8, 2))
    sets = draw_sets(small, torch.device("cpu"))
    assert len(sets) >= 2
    assert sets[0].error(sets[0].call()) < 2**-8
    wrong = torch.zeros_like(sets[0].call())
    assert sets[0].error(wrong) >= 0.9


def test_floors_are_positive_and_grow_with_the_batch() -> None:
    for cell in CELLS:
        assert 0 < cell.floor_us < replace(cell, batch=2 * cell.batch).floor_us


def test_every_op_has_a_quick_cell_and_peers_are_for_ops_that_are_measured() -> None:
    assert {cell.op for cell in QUICK} == {cell.op for cell in CELLS}
    assert {peer.op for peer in PEERS} <= {cell.op for cell in CELLS}


def test_packed_rows_hold_their_values_to_within_fp8() -> None:
    latent = torch.randn(2, 64, 576, dtype=torch.bfloat16)
    raw = fp8_latents(latent).view(torch.uint8)[:, :, 0]
    scales = raw[..., 512:528].contiguous().view(torch.float32)
    values = raw[..., :512].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    found = (values * scales[..., None]).flatten(-2)
    assert (found - latent[..., :512].float()).norm() < 0.05 * found.norm()
    assert torch.equal(raw[..., 528:].contiguous().view(torch.bfloat16), latent[..., 512:])
    keys = torch.randn(2, 64, 128, dtype=torch.bfloat16)
    packed = fp8_index_keys(keys).view(2, -1)
    scale = packed[:, 64 * 128 :].contiguous().view(torch.float32)
    rows = packed[:, : 64 * 128].contiguous().view(torch.float8_e4m3fn).float().view(2, 64, 128)
    assert (rows * scale[..., None] - keys.float()).norm() < 0.05 * keys.float().norm()


def test_a_peer_s_pages_of_packed_keys_are_ours_further_apart() -> None:
    keys = torch.randn(3, 64, 512, dtype=torch.bfloat16)
    packed = torch.zeros(3, 64, 584, dtype=torch.uint8)
    write_keys(packed, keys, torch.arange(192).view(3, 64), 64)
    for given in (keys, packed):
        spread = fp8_keys(given)
        assert spread.shape == (3, 64, 1, 584)
        assert spread.stride(0) % 576 == 0
        assert torch.equal(spread.view(torch.uint8)[:, :, 0], packed)


@pytest.mark.parametrize("op", ["block_experts", "mxfp4_experts"])
def test_floors_of_experts_count_the_experts_that_tokens_reach(op: str) -> None:
    one = Cell(op, 1, 1, dims=(1024, 128, 64, 4))
    bits = 8 if op == "block_experts" else 4.25
    weights = 4 * 3 * 1024 * 128 * bits / 8
    assert one.floor_us == pytest.approx(1e6 * (weights + 4 * 1024) / 4.25e12)
    every = replace(one, batch=4096, width=1)
    assert every.floor_us > 16 * (one.floor_us - 1e6 * 4 * 1024 / 4.25e12)


def test_an_unknown_op_and_a_missing_device_or_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="ops: 'nonsense'"):
        choose_cells(("nonsense",), quick=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device"):
        next(bench_kernels(QUICK, None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="peers"):
        next(bench_kernels(QUICK, tmp_path / "none"))


def test_the_ratio_is_ours_over_the_fastest_peer_that_ran() -> None:
    peers = (PeerTime("a", 4.0), PeerTime("b", 2.0), PeerTime("c", None, "absent"))
    row = kernel_summary(KernelTime("topk_slots", "b1", 3.0, 4.0, 1.5, 0.0, peers))
    assert (row["ratio"], row["over_floor"]) == (1.5, 2.0)
    assert row["peers"]["c"] == {"us": None, "reason": "absent"}
    assert (
        kernel_summary(KernelTime("topk_slots", "b1", 3.0, 4.0, 1.5, 0.0, peers[2:]))["ratio"]
        is None
    )
