# SPDX-License-Identifier: Apache-2.0
"""Where an engine runs: resolved once, with a reason, and refused in words where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freewheel import LLM, SamplingParams, ops
from freewheel.config import Decisions, EngineConfig
from freewheel.errors import ConfigError
from freewheel.runtime.build import resolve_device, resolve_dtype, resolve_graph
from freewheel.runtime.streams import NoStreams

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def test_auto_takes_what_there_is_and_says_why() -> None:
    decisions, config = Decisions(), EngineConfig(model="demo")
    device = resolve_device(config, decisions)
    graph = resolve_graph(config, device, decisions)
    dtype = resolve_dtype(config, device, decisions)
    there = torch.cuda.is_available()
    found = device, graph, dtype
    assert found == (("cuda", "cuda", "bfloat16") if there else ("cpu", "tape", "float32"))
    assert [d.option for d in decisions.made] == ["device", "graph", "dtype"]
    assert all(d.reason for d in decisions.made)


def test_on_a_cuda_device_the_defaults_are_a_graph_and_bfloat16() -> None:
    config = EngineConfig(model="demo")
    assert resolve_graph(config, "cuda", Decisions()) == "cuda"
    assert resolve_dtype(config, "cuda", Decisions()) == "bfloat16"


@WITHOUT_GPU
def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^device: "):
        LLM("demo", device="cuda")
    with pytest.raises(ConfigError, match=r"^graph: "):
        LLM("demo", device="cpu", graph="cuda")


def test_an_unknown_name_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"^device: must be one of auto, "):
        EngineConfig(model="demo", device="tpu")
    with pytest.raises(ConfigError, match=r"^graph: must be one of auto, "):
        EngineConfig(model="demo", graph="film")


def test_a_graph_made_after_all_were_there_is_counted(folders: dict[str, Path]) -> None:
    llm = LLM(str(folders["t32"]), device="cpu", max_batch=2, prefill_batch=1, chunk=16)
    llm.generate("a", SamplingParams(temperature=0, max_tokens=4))
    assert llm.executor.counters.late_captures == 0
    llm.executor.capture([], lambda _: None)
    llm.generate(["a", "b"], SamplingParams(temperature=0, max_tokens=4))
    assert llm.executor.counters.late_captures > 0


def test_on_the_cpu_a_mark_is_always_passed_and_a_copy_is_done() -> None:
    streams = NoStreams()
    source, target = torch.arange(4, dtype=torch.int32), streams.pages(4)
    with streams.rounds():
        streams.copy(target, source)
        mark = streams.mark()
        mark.set()
    mark.follow()
    mark.wait()
    assert torch.equal(target, source)


def test_a_wide_projection_is_computed_in_the_weight_s_dtype() -> None:
    x, weight = torch.randn(2, 3, 8).bfloat16(), torch.randn(5, 8)
    assert torch.equal(ops.wide_linear(x, weight), x.float() @ weight.T)
    checks = ("test_schema", "test_faketensor")
    wide_linear = torch.ops.freewheel.wide_linear.default
    torch.library.opcheck(wide_linear, (x, weight), test_utils=checks)
