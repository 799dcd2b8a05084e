# SPDX-License-Identifier: Apache-2.0
"""What `LLM.selection` shows is what the model's definition selects, and asking disturbs nobody."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from freewheel import LLM, SamplingParams
from freewheel.engine import Selection
from freewheel.errors import RequestError
from tests.fixtures.closed_form import write_t32, write_tg
from tests.fixtures.compressed import write_t4
from tests.models.dense_reference import DenseReference
from tests.models.stream_reference import StreamReference
from tests.program.whitebox import PoisonedEngine, engine, watch_requests

TEXT = random.Random(21).choices(range(256), k=120)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LENGTHS = (1, 3, 4, 5, 8, 15, 16, 17, 33, 50, 64, 65, 100, 119)
"""Around the ends of pages, entries, chunks and of the first `index_topk` tokens."""

Lists = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def plain_v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without YaRN, which the plain reference does not have."""
    return write_t4(tmp_path_factory.mktemp("v4") / "t4", rope_scaling=None)


def dense_lists(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Lists]:
    """For each token of TEXT, the positions that each layer with an indexer picks."""
    found: list[torch.Tensor] = []
    picks = DenseReference._picks

    def noted(self: DenseReference, *args: Any) -> torch.Tensor:
        found.append(picks(self, *args))
        return found[-1]

    monkeypatch.setattr(DenseReference, "_picks", noted)
    DenseReference.read(folder).hidden(TEXT)
    return by_token(found)


def stream_lists(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Lists]:
    """The same of the numbers of entries."""
    found: list[torch.Tensor] = []
    picks = StreamReference._picks

    def noted(self: StreamReference, *args: Any) -> torch.Tensor:
        chosen = picks(self, *args)
        found.append(chosen & args[-1])
        return chosen

    monkeypatch.setattr(StreamReference, "_picks", noted)
    StreamReference.read(folder).streams(TEXT)
    return by_token(found)


def by_token(layers: list[torch.Tensor]) -> list[Lists]:
    counts = range(len(TEXT))
    return [[tuple(map(int, layer[q].nonzero()[:, 0])) for layer in layers] for q in counts]


def selections(llm: LLM) -> list[Selection]:
    return [llm.selection(TEXT[:length]) for length in LENGTHS]


@pytest.mark.parametrize("write", [write_t32, write_tg], ids=["t32", "tg"])
@pytest.mark.parametrize("graph", ["eager", "tape"])
def test_tokens_selected_are_those_of_the_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, graph: str
) -> None:
    folder = write(tmp_path / "model")
    llm = engine(folder, context_len=128, graph=graph)
    wanted = dense_lists(folder, monkeypatch)
    shown = selections(llm)
    assert [list(one.picks) for one in shown] == [wanted[length - 1] for length in LENGTHS]
    topk = llm.spec.indexer.topk  # type: ignore[attr-defined]
    assert {len(one) for one in shown[-1].picks} == {topk}, "the bound was reached"
    assert len(shown[-1].of.layers) == len(shown[-1].picks)
    assert shown[-1].of.tokens(7) == range(7, 8)


@pytest.mark.parametrize("graph", ["eager", "tape"])
def test_entries_selected_are_those_of_the_definition(
    plain_v4: Path, monkeypatch: pytest.MonkeyPatch, graph: str
) -> None:
    llm = engine(plain_v4, context_len=128, graph=graph)
    wanted = stream_lists(plain_v4, monkeypatch)
    shown = selections(llm)
    assert [list(one.picks) for one in shown] == [wanted[length - 1] for length in LENGTHS]
    assert shown[-1].of.layers == (1, 3)
    assert {len(one) for one in shown[-1].picks} == {4}
    assert [shown[-1].of.tokens(entry) for entry in (0, 1, 5)] == [
        range(4),
        range(8),
        range(16, 24),
    ]
    assert shown[-1].of.window == 8


@pytest.mark.parametrize("family", ["t32", "tg", "t4"])
def test_the_choice_behind_the_text_is_the_answers_first_token(
    folders: dict[str, Path], family: str
) -> None:
    llm = engine(folders[family], context_len=128)
    texts = [TEXT[:length] for length in LENGTHS]
    answers = llm.generate(texts, GREEDY)
    assert [one.token_id for one in selections(llm)] == [one.token_ids[0] for one in answers]


@pytest.mark.parametrize("family", ["t32", "t4"])
def test_asking_changes_no_token_of_others(folders: dict[str, Path], family: str) -> None:
    """All that no live row has computed is NaN before each round, temporaries too."""
    options: dict[str, Any] = {"context_len": 128, "max_batch": 3}
    prompts = [TEXT[:40], TEXT[5:80], TEXT[9:12]]
    alone = [one.token_ids for one in engine(folders[family], **options).generate(prompts, GREEDY)]
    llm = engine(folders[family], graph="tape", **options)
    wanted = selections(llm)
    PoisonedEngine(llm, seed=3, chance=0.1)
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    got: list[list[int]] = [[] for _ in streams]
    shown: list[Selection] = []
    for step in range(len(LENGTHS)):
        for tokens, stream in zip(got, streams, strict=True):
            tokens += [
                token for chunk in [next(stream, None)] if chunk for token in chunk.token_ids
            ]
        shown.append(llm.selection(TEXT[: LENGTHS[step]]))
    for tokens, stream in zip(got, streams, strict=True):
        tokens += [token for chunk in stream for token in chunk.token_ids]
    assert [tuple(tokens) for tokens in got] == alone
    assert shown == wanted


@pytest.mark.parametrize("family", ["t32", "t4"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_rounds_that_show_picks_read_nothing_and_give_everything_back(
    folders: dict[str, Path], family: str, drafts: int
) -> None:
    llm = engine(folders[family], context_len=128, guard=True, speculate=drafts)
    llm.capture(extras=3)
    seen = watch_requests(llm)
    selections(llm)
    counters, log = llm.executor.counters, llm.executor.sync_log
    assert log.reads == [] and log.copies == []
    assert counters.rounds == counters.uploads == counters.downloads == counters.graph_launches
    assert counters.late_captures == 0
    assert all(request.tenancy is None for request in seen)
    for pool in llm._session.scheduler.copies[0].roster.reservations.pools:
        assert pool.owned == pool.quarantined == 0


def test_a_text_that_was_answered_is_found_in_the_cache(folders: dict[str, Path]) -> None:
    llm = engine(folders["t32"], context_len=128)
    (answer,) = llm.generate([TEXT[:60]], GREEDY)
    whole = [*TEXT[:60], *answer.token_ids]
    seen = watch_requests(llm)
    warm = llm.selection(whole[:70])
    assert seen[0].stats.cached_tokens >= 60
    assert warm == engine(folders["t32"], context_len=128, prefix_cache=False).selection(whole[:70])


@pytest.mark.parametrize(
    ("prompt", "field"), [([], "prompt"), ([999999], "prompt"), (TEXT + TEXT, "prompt")]
)
def test_what_cannot_be_computed_is_refused(
    folders: dict[str, Path], prompt: list[int], field: str
) -> None:
    with pytest.raises(RequestError) as refused:
        engine(folders["t32"], context_len=128).selection(prompt)
    assert refused.value.field == field
