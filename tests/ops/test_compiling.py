# SPDX-License-Identifier: Apache-2.0
"""Kernels that are compiled before they are needed. A driver without a card stands for one."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from freewheel import LLM
from freewheel.ops import load_kernels
from freewheel.runtime.rehearsal import rehearse

triton: Any = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="stands for a card where there is none, and compiles in earnest",
)


class Card:
    """A Hopper card that takes every kernel and runs none.

    Launchers are modules of one name, which share what Python keeps under it (single-phase
    initialisation): one that is read while a second thread reads another may get its function.
    `mistaken`: launches by one that was not read by the thread that launches.
    """

    def __init__(self) -> None:
        self.launches = self.mistaken = 0
        self.loads: list[str] = []
        self.utils = SimpleNamespace(
            load_binary=self._load,
            get_device_properties=lambda _: {"max_shared_mem": 232448},
        )

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        assert device == 0

    def get_current_stream(self, device: int) -> int:
        return device

    def launcher_cls(self, source: Any, found: Any) -> Any:
        reader = threading.get_ident()

        def launch(*_: Any) -> None:
            self.launches += 1
            self.mistaken += reader != threading.get_ident()

        return launch

    def _load(self, name: str, *_: Any) -> tuple[str, str, int, int, int]:
        self.loads.append(name)
        return name, name, 0, 0, 1024


@pytest.fixture
def card(tmp_path: Path) -> Iterator[Card]:
    load_kernels("cuda")
    one = Card()
    before = triton.knobs.cache.dir
    triton.knobs.cache.dir = str(tmp_path)
    triton.runtime.driver.set_active(one)
    yield one
    triton.knobs.cache.dir = before


def test_a_rehearsed_round_finds_every_kernel_loaded(card: Card) -> None:
    llm = LLM("demo", max_batch=1, prefill_batch=1, device="cpu", graph="eager", dtype="bfloat16")
    shape = llm.shapes("Emma was")[-1]
    one_round = llm.executor._advance(shape)
    found = rehearse([one_round], "cuda")
    assert found > 20
    assert card.launches == 0
    assert len(card.loads) == found
    assert rehearse([one_round], "cuda") == 0
    assert card.launches > found
    assert len(card.loads) == found
    assert not card.mistaken
