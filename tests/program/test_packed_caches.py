# SPDX-License-Identifier: Apache-2.0
"""Caches of FP8 rows: quantised once, so whoever reads a row later reads the same bytes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM
from freewheel.config import EngineConfig
from freewheel.engine import survey
from freewheel.errors import ConfigError
from tests.fixtures import closed_form, compressed
from tests.program.whitebox import (
    GREEDY,
    PoisonedEngine,
    answers,
    engine,
    mixed_params,
    prompts,
    same_bytes,
)

ROWS = {"kv_lora_rank": 128, "qk_rope_head_dim": 8, "index_head_dim": 128}
KEYS = {"head_dim": 136, "qk_rope_head_dim": 8, "index_head_dim": 128}
REQUESTS = prompts(seed=1, count=2, longest=40)


@pytest.fixture(scope="module")
def fitting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny checkpoints, with rows as wide as the formats ask for."""
    root = tmp_path_factory.mktemp("fitting")
    return {
        "t32": closed_form.write_t32(root / "t32", **ROWS),
        "tg": closed_form.write_tg(root / "tg", **ROWS),
        "t4": compressed.write_t4(root / "t4", **KEYS),
    }


def packed(folder: Path, rows: str = "fp8", **options: Any) -> LLM:
    return engine(folder, kv_cache_dtype=rows, **options)


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        *((family, "fp8") for family in ("t32", "tg", "t4")),
        ("t32", "fp8-index"),
        ("t4", "fp8-index"),
    ],
)
def test_an_answer_does_not_depend_on_how_it_is_computed(
    fitting: dict[str, Path], family: str, rows: str
) -> None:
    folder, most = fitting[family], {"max_batch": 1, "prefill_batch": 1}
    alone = packed(folder, rows, speculate=0, graph="eager", run_ahead=0, **most)
    want = [answers(alone, [prompt])[0] for prompt in REQUESTS]
    for ahead, (depth, graph) in enumerate([(3, "eager"), (1, "eager"), (7, "eager"), (3, "tape")]):
        chunk = 9 + 8 * ahead
        llm = packed(folder, rows, speculate=depth, graph=graph, run_ahead=ahead, chunk=chunk)
        assert answers(llm, REQUESTS) == want
    assert answers(llm, REQUESTS[::-1]) == want[::-1]  # rows and pages found again


@pytest.mark.parametrize(
    ("family", "seed", "rows"),
    [
        *((family, seed, "fp8") for family in ("t32", "tg", "t4") for seed in range(2)),
        ("t32", 2, "fp8-index"),
        ("t4", 2, "fp8-index"),
    ],
)
def test_bytes_below_computed_are_those_of_a_one_shot_prefill_after_any_schedule(
    fitting: dict[str, Path], family: str, seed: int, rows: str
) -> None:
    rng = random.Random(seed)
    llm = packed(
        fitting[family],
        rows,
        speculate=rng.choice([1, 3, 7]),
        run_ahead=rng.randint(0, 3),
        chunk=rng.choice([9, 16, 33]),
        graph=["eager", "tape"][seed % 2],
        max_batch=3,
        prefill_batch=2,
        context_len=96,
        prefix_cache=seed == 0,
    )
    watched = PoisonedEngine(llm, seed)
    requests = prompts(seed, count=4, longest=50)
    params = [p for p, _ in zip(mixed_params(seed), requests, strict=False)]
    assert len(answers(llm, requests, params)) == len(requests)
    watched.check_some_row()
    assert watched.checked >= 3


@pytest.mark.parametrize("family", ["t32", "t4"])
def test_a_cache_in_fp8_takes_fewer_bytes_in_every_group_that_is_read(
    fitting: dict[str, Path], family: str
) -> None:
    plain = EngineConfig(model=str(fitting[family]), kv_cache_dtype="bf16", cache_bytes=1 << 26)
    small = EngineConfig(model=str(fitting[family]), kv_cache_dtype="fp8", cache_bytes=1 << 26)
    for before, after in zip(survey(plain).groups, survey(small).groups, strict=True):
        assert after.page_bytes < before.page_bytes or after.name.startswith("tail")
        for field in after.fields:
            assert field.packed is None or field.row_bytes == field.packed.bytes == field.width


@pytest.mark.parametrize("family", ["t32", "t4"])
def test_index_keys_alone_may_be_packed(fitting: dict[str, Path], family: str) -> None:
    def rows(stored: str) -> dict[str, int]:
        found = survey(EngineConfig(model=str(fitting[family]), kv_cache_dtype=stored))
        return {field.name: field.row_bytes for group in found.groups for field in group.fields}

    index = "index_key" if family == "t32" else "index_entry"
    assert rows("fp8-index") == {**rows("auto"), index: 132}


@pytest.mark.parametrize("model", ["demo", "demo-v4"])
def test_rows_of_the_demos_are_those_that_the_field_stores(model: str) -> None:
    found = survey(EngineConfig(model=model, kv_cache_dtype="fp8"))
    rows = {field.name: field.row_bytes for group in found.groups for field in group.fields}
    wanted = {"latent": 656, "index_key": 132}
    if model == "demo-v4":
        wanted = {"key": 584, "entry": 584, "index_entry": 132, "index_raw": 2048}
    assert {name: rows[name] for name in wanted} == wanted


@pytest.mark.parametrize("family", ["t32", "tg", "t4"])
def test_rows_that_do_not_fit_a_model_are_refused_by_name_before_loading(
    folders: dict[str, Path], family: str
) -> None:
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype: .*fit.*use \"bf16\"$"):
        survey(EngineConfig(model=str(folders[family]), kv_cache_dtype="fp8"))
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype: .*index_head_dim.*use \"bf16\"$"):
        survey(EngineConfig(model=str(folders[family]), kv_cache_dtype="fp8-index"))
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype: must be one of auto, bf16, fp8"):
        EngineConfig(model="demo", kv_cache_dtype="int8")


def test_bf16_rows_are_bfloat16_whatever_is_computed_in(folders: dict[str, Path]) -> None:
    llm = engine(folders["t32"], kv_cache_dtype="bf16", speculate=2)
    assert {field.dtype for group in llm.built.groups for field in group.fields} == {"bfloat16"}
    alone = engine(folders["t32"], kv_cache_dtype="bf16", speculate=0, max_batch=1, prefill_batch=1)
    assert answers(llm, REQUESTS) == [answers(alone, [p], GREEDY)[0] for p in REQUESTS]


def test_rejected_drafts_leave_packed_rows_of_others_unchanged(fitting: dict[str, Path]) -> None:
    """A row's bytes stay as they are from the round that computes it to the request's end."""
    llm = packed(fitting["t32"], speculate=3, run_ahead=0, max_batch=1, prefill_batch=1)
    arena, launch = llm.executor.arena, llm.executor.launch
    names = [f"cache.{g.name}.{f.name}" for g in llm.built.groups for f in g.fields]
    seen: list[tuple[int, list[Any]]] = []

    def watch(plan: Any) -> None:
        launch(plan)
        state = llm.executor.state
        computed, pages = int(state.computed_lens[1]), state.page_tables[0, 1].long()
        if not int(state.known_lens[1]):
            return
        rows = [arena[name].index_select(1, pages)[:, : computed // 4].clone() for name in names]
        for before, held in seen[-1:]:
            whole = min(before, computed) // 4
            assert all(
                same_bytes(a[:, :whole], b[:, :whole]) for a, b in zip(held, rows, strict=True)
            )
        seen.append((computed, rows))

    llm.executor.launch = watch  # type: ignore[method-assign]
    answers(llm, REQUESTS[:1])
    assert len(seen) > 3
