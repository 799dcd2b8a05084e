# SPDX-License-Identifier: Apache-2.0
"""Where an engine runs: resolved once, with a reason, and refused in words where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freewheel import LLM, SamplingParams, ops
from freewheel.config import CACHE_VARIABLES, Decisions, EngineConfig, kernel_cache_folder
from freewheel.errors import ConfigError
from freewheel.runtime import executor
from freewheel.runtime.build import resolve_device, resolve_dtype, resolve_graph
from freewheel.runtime.streams import NoStreams
from freewheel.spec import StepPlan

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


def test_compiled_kernels_are_kept_where_the_nearest_setting_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*CACHE_VARIABLES, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = [kernel_cache_folder(EngineConfig(model="demo"), Decisions())]
    for name in ("XDG_CACHE_HOME", *reversed(CACHE_VARIABLES)):
        monkeypatch.setenv(name, str(tmp_path / name))
        found.append(kernel_cache_folder(EngineConfig(model="demo"), Decisions()))
    own = EngineConfig(model="demo", kernel_cache=str(tmp_path / "own"))
    found.append(kernel_cache_folder(own, Decisions()))
    below = [str(folder.relative_to(tmp_path)) for folder in found]
    assert below == [
        ".cache/freewheel/kernels",
        "XDG_CACHE_HOME/freewheel/kernels",
        *reversed(CACHE_VARIABLES),
        "own",
    ]
    assert all(folder.is_dir() for folder in found)


def test_a_kernel_cache_that_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"^kernel_cache: "):
            config = EngineConfig(model="demo", kernel_cache=str(folder))
            kernel_cache_folder(config, Decisions())
    with pytest.raises(ConfigError, match=r"^kernel_cache: "):
        EngineConfig(model="demo", kernel_cache="")


def test_a_kernel_loaded_after_all_graphs_were_there_is_counted(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device compiles kernels, each makes its first launch wait."""
    counts = iter(range(1000))
    monkeypatch.setattr(executor, "kernels_loaded", lambda: next(counts))
    llm = LLM(str(folders["t32"]), device="cpu", max_batch=1, prefill_batch=1, chunk=16)
    llm.generate("a", SamplingParams(temperature=0, max_tokens=4))
    assert llm.executor.counters.late_kernels == 0
    llm.capture()
    before = llm.executor.counters.rounds
    llm.generate("a", SamplingParams(temperature=0, max_tokens=4))
    counters = llm.executor.counters
    assert counters.late_kernels == counters.rounds - before > 0


@pytest.mark.parametrize("chunk", [9, 64, 300])
@pytest.mark.parametrize("depth", [0, 3])
def test_every_captured_shape_can_occur_and_every_other_is_not_captured(
    chunk: int, depth: int
) -> None:
    ladder = EngineConfig(model="demo", chunk=chunk, speculate=depth, max_batch=4).ladder()
    found = {
        ladder.fit_prefill(rows, longest, ready)
        for rows in (1, 2)
        for longest in range(1, 2 * chunk)
        for ready in (True, False)
    }
    assert found | set(ladder.decode) == set(ladder.shapes())
    widest = {shape.width for shape in found if shape.depth < depth}
    assert widest == ({chunk} if depth else set())


@pytest.mark.parametrize("prompt", [1, 16, 17, 20, 21, 36, 37, 40, 41, 60])
def test_the_graphs_of_a_lone_prompt_are_all_that_it_needs(
    folders: dict[str, Path], prompt: int
) -> None:
    llm = LLM(str(folders["perm"]), device="cpu", max_batch=2, chunk=20)
    ids = [n % 50 for n in range(prompt)]
    llm.capture(prompt=ids)
    made = set(llm.executor._lanes)
    assert made == set(llm.shapes(ids)) < set(llm.shapes())
    used = set()
    launch = llm.executor.launch

    def watch(plan: StepPlan) -> None:
        used.add(plan.shape)
        launch(plan)

    llm.executor.launch = watch  # type: ignore[method-assign]
    llm.generate([ids], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert used == made
    assert llm.executor.counters.late_captures == 0


def test_an_idle_round_does_all_its_work_and_changes_nothing(folders: dict[str, Path]) -> None:
    llm = LLM(str(folders["t32"]), device="cpu", max_batch=2, prefill_batch=1, chunk=16)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    wanted = llm.generate("ab", params)[0].token_ids
    tensors = {name: llm.executor.arena[name].clone() for name in llm.executor.arena.names()}
    rounds = llm.executor.counters.rounds
    llm.executor.idle_rounds(llm.built.ladder.decode[-1], 3)
    assert llm.executor.counters.rounds == rounds + 3 and llm.executor.in_flight == 0
    for name, before in tensors.items():
        if not name.startswith("letters."):
            assert same_but_scratch(name, before, llm.executor.arena[name]), name
    assert llm.generate("ab", params)[0].token_ids == wanted


def same_but_scratch(name: str, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Padding writes to the scratch page of a cache."""
    if name.startswith("cache."):
        one, other = one[:, 1:], other[:, 1:]
    return torch.equal(one.nan_to_num(), other.nan_to_num())
