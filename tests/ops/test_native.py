# SPDX-License-Identifier: Apache-2.0
"""Compiling, keeping, listing and launching kernels in CUDA C++, with stand-ins for the machine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

triton: Any = pytest.importorskip("triton")
native: Any = importlib.import_module("freewheel.ops.cuda.native")
compiling: Any = importlib.import_module("freewheel.ops.cuda.compiling")


class Compiler:
    version = "13.0"

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def knows(self, chip: int) -> bool:
        return chip in (90, 100)

    def compile(self, source: str, options: tuple[str, ...]) -> bytes:
        assert "topk_slots(" in source and "follow()" in source
        self.calls.append(options)
        return b"code" + str(len(self.calls)).encode()


class Driver:
    """Takes every call; remembers launches."""

    def __init__(self) -> None:
        self.launches = 0
        self.refuse = False
        self.maps: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: int(self.refuse) * 200

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = 1
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"invalid image"
        return 0

    def cuTensorMapEncodeTiled(self, place: Any, *_: Any) -> int:
        self.maps.append(place.value)
        return int(self.refuse) * 200

    def cuLaunchKernelEx(self, *_: Any) -> int:
        self.launches += 1
        return 0


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    one = Compiler()
    monkeypatch.setattr(native, "find_compiler", lambda: one)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    return one


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> Driver:
    one = Driver()
    monkeypatch.setattr(native, "_driver", lambda: one)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    stream = type("Stream", (), {"cuda_stream": 7})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return one


def test_code_is_compiled_once_for_each_chip_and_set_of_constants(compiler: Compiler) -> None:
    first = native.code_of("topk_slots", "sm_90", {"CLUSTER": 1})
    assert native.code_of("topk_slots", "sm_90", {"CLUSTER": 1}) == first
    others = [
        native.code_of("topk_slots", "sm_100", {"CLUSTER": 1}),
        native.code_of("topk_slots", "sm_90", {"CLUSTER": 2}),
    ]
    compiler.version = "13.1"
    others.append(native.code_of("topk_slots", "sm_90", {"CLUSTER": 1}))
    assert len({first, *others}) == 4 == len(compiler.calls)
    assert "--gpu-architecture=sm_90" in compiler.calls[0] and "-DCLUSTER=1" in compiler.calls[0]


def test_a_launch_loads_its_variant_once(driver: Driver) -> None:
    kernel = native.Kernel("topk_slots", "pi")
    before = compiling.loaded()
    for _ in range(3):
        kernel.launch(1, 32, 0, torch.zeros(1), 5, CLUSTER=1)
    kernel.launch(1, 32, 0, torch.zeros(1), 5, CLUSTER=2)
    assert driver.launches == 4
    assert compiling.loaded() == before + 2


def test_variants_that_are_not_loaded_are_listed_and_not_launched(driver: Driver) -> None:
    kernel = native.Kernel("topk_slots", "p")
    kernel.launch(1, 32, 0, torch.zeros(1), CLUSTER=1)
    with native.left_out() as missed:
        for cluster in (1, 2, 2, 4):
            kernel.launch(1, 32, 0, torch.zeros(1), CLUSTER=cluster)
    assert driver.launches == 2  # of the variant that was loaded
    assert [data for _, data in missed] == ['{"CLUSTER": 2}', '{"CLUSTER": 4}']
    for one, data in missed:
        one.preload(data)
    kernel.launch(1, 32, 0, torch.zeros(1), CLUSTER=4)
    assert driver.launches == 3


def test_a_refusal_of_the_driver_is_raised_with_its_words(driver: Driver) -> None:
    driver.refuse = True
    with pytest.raises(RuntimeError, match="invalid image"):
        native.Kernel("topk_slots", "p").launch(1, 32, 0, torch.zeros(1), CLUSTER=1)


def test_boxes_are_described_to_the_driver_once_where_it_wants_them(driver: Driver) -> None:
    native._map_of.cache_clear()
    kernel, sizes = native.Kernel("topk_slots", "m"), (128, 8, 2, 4, 1)
    for address in (4096, 4096, 8192):
        boxes = native.Boxes(address, sizes, (1, 128, 1024, 2048, 8192), sizes)
        kernel.launch(1, 32, 0, boxes, CLUSTER=1)
    assert driver.launches == 3
    assert len(driver.maps) == 2 and all(place % 64 == 0 for place in driver.maps)
    native._map_of.cache_clear()
    driver.refuse = True
    with pytest.raises(RuntimeError, match="invalid image"):
        kernel.launch(1, 32, 0, boxes, CLUSTER=1)
    native._map_of.cache_clear()


@pytest.mark.parametrize(("chip", "reason"), [((9, 0), None), ((11, 0), "no code for sm_110")])
def test_a_chip_that_the_compiler_does_not_know_gets_stand_ins(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, chip: tuple[int, int], reason: str | None
) -> None:
    most = type("Properties", (), {"shared_memory_per_block_optin": native.SHARED})
    monkeypatch.setattr(native, "CHAINED", True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: most)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: chip)
    found = native.lacking.__wrapped__()
    assert found is None if reason is None else reason in found


def test_a_machine_without_the_compiler_is_told_what_to_install() -> None:
    nvrtc: Any = importlib.import_module("freewheel.ops.cuda.nvrtc")
    with pytest.raises(nvrtc.ConfigError, match=r"libnvrtc.so.97 was not found; install nvidia"):
        nvrtc.find_compiler("97.0")
    with pytest.raises(nvrtc.ConfigError, match="built without CUDA"):
        nvrtc.find_compiler(None)


def test_blocks_of_a_row_follow_scores_and_multiprocessors() -> None:
    plan: Any = importlib.import_module("freewheel.ops.cuda.cluster_selection").plan_of
    assert plan(128, 4096, 132) == (1, 512)
    assert plan(1, 4096, 132)[0] == 2
    assert plan(8, 131072, 132) == (8, 1024)
    assert plan(32, 32768, 132) == (4, 512)
    assert plan(32, 131072, 132) == (3, 1024)
    assert plan(4096, 32768, 132) == (1, 1024)
    assert plan(4096, 1 << 20, 132)[0] == 8


def test_short_rows_have_a_place_for_every_score() -> None:
    module: Any = importlib.import_module("freewheel.ops.cuda.short_selection")
    assert module.plan_of(64) == (128, 1)
    assert module.plan_of(4096) == (1024, 1)
    assert module.plan_of(4608) == (576, 2)
    for length in (16, 1000, 2560, 5000, module.MOST_SCORES):
        threads, fours = module.plan_of(length)
        assert module.is_short(1, length, 64)
        assert length <= 4 * threads * fours
        assert threads % 32 == 0
        assert module.shared_of(threads, fours, module.MOST_SCORES) <= native.SHARED
    assert not module.is_short(1, module.MOST_SCORES + 64, 64)
    assert not module.is_short(module.MOST_QUERIES + 1, 64, 64)
    assert not module.is_short(1, 64, 2)


def test_every_number_of_queries_has_a_plan_that_fits() -> None:
    module: Any = importlib.import_module("freewheel.ops.cuda.group_logits")
    for packed in (True, False):
        for heads in module.HEADS:
            for queries in range(1, module.MOST_QUERIES + 1):
                plan = module.plan_of(queries, heads, packed)
                assert plan.shared <= native.SHARED
                assert queries % plan.joined == 0
                assert plan.joined * plan.buffers * heads <= 128


def test_v4_layers_are_entered_in_cuda_c_whatever_their_norm_s_weight() -> None:
    """A model's norms have float32 weights."""
    threads: Any = importlib.import_module("freewheel.ops.cuda.hyper").threads_for
    for dtype in (torch.bfloat16, torch.float32):
        found = [
            threads(torch.empty(1, 4, d).bfloat16(), torch.empty(d).to(dtype)) for d in (4096, 7168)
        ]
        assert found == [256, 224]
    assert threads(torch.empty(1, 4, 4096), torch.empty(4096)) is None
    assert threads(torch.empty(1, 2, 4096).bfloat16(), torch.empty(4096)) is None
