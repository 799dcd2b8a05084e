# SPDX-License-Identifier: Apache-2.0
"""Two cards of one machine: what is under way ends when a rank is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from freewheel import LLM, SamplingParams
from freewheel.errors import RankError
from freewheel.runtime.parallel.crew import LocalCrew, assemble, dismiss

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SMALL: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "chunk": 64,
    "context_len": 2048,
    "max_batch": 1,
    "prefill_batch": 1,
}


def test_a_lost_rank_ends_what_is_under_way_and_another_engine_starts_anew() -> None:
    """The card of rank 0 waits for a card that does not answer any more."""
    endless = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
    try:
        llm = LLM("demo", **SMALL, tp=2)
        llm.capture()
        expected = llm.generate("Emma was", SamplingParams(temperature=0, max_tokens=8))
        crew = assemble("cuda", 2)
        assert isinstance(crew, LocalCrew)
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.monotonic())
            os.kill(crew.pids[1], signal.SIGKILL)

        threading.Timer(0.3, kill).start()
        with pytest.raises(RankError, match="rank 1 ended"):
            while True:
                llm.generate("Emma was", endless)
        assert time.monotonic() - killed[0] < 10
        again = LLM("demo", **SMALL, tp=2)
        found = again.generate("Emma was", SamplingParams(temperature=0, max_tokens=8))
        assert found[0].token_ids == expected[0].token_ids
    finally:
        dismiss()
