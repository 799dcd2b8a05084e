# SPDX-License-Identifier: Apache-2.0
"""Blocks in files: found again after a restart, computed anew if damaged, waited for by none."""

from __future__ import annotations

import logging
import os
import random
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.config import EngineConfig
from freewheel.engine import TokenEngine
from freewheel.errors import ConfigError
from freewheel.host import RequestState, TextStream
from freewheel.host.disk import DiskMoves
from freewheel.runtime.files import FileStore, make_private, tell_of_ranks_no_more
from freewheel.spec import Way
from freewheel.spec.filed import NO_KEY, Filed
from freewheel.spec.transfer import BlockCopy, Transfer
from tests.program.test_schedules import CONTEXT, tight
from tests.program.test_tier import TierSchedule, turns
from tests.program.whitebox import engine
from tests.waiting import PATIENCE, wait_for

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
BOTH = pytest.mark.parametrize("family", ["t32", "t4"])
HOST_GB = {"t32": 0.0003, "t4": 0.002}
"""Some forty and some twenty blocks."""


def small(folder: Path, place: Path, **options: Any) -> LLM:
    """Host memory for a few prompts, files for all of them."""
    given = {"host_cache_gb": HOST_GB[folder.name], "disk_cache_gb": 0.05} | options
    return tight(folder, 1, 3, disk_cache_dir=str(place), **given)


def disk_of(llm: LLM) -> DiskMoves:
    moves = llm._session.scheduler.copies[0].roster.reservations.moves
    assert moves is not None and moves.disk is not None
    return moves.disk


def store_of(llm: LLM) -> FileStore:
    store = llm.executor.mover.files
    assert store is not None
    return store


def ask(llm: LLM, prompts: list[list[int]]) -> list[tuple[tuple[int, ...], int]]:
    """Answers, and how much of each prompt was not computed."""
    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    return [(one.token_ids, one.metrics.cached_tokens) for one in outputs]


def tokens(answers: list[tuple[tuple[int, ...], int]]) -> list[tuple[int, ...]]:
    return [ids for ids, _ in answers]


def settle(llm: LLM) -> None:
    """All that was begun is written, and known to be."""
    while disk_of(llm)._writes or disk_of(llm)._fresh:
        llm._session._move(fresh=False, wait=True)


def files(place: Path) -> list[Path]:
    return sorted(place.glob("*.block"))


@BOTH
def test_prompts_that_left_host_memory_come_back_from_files_and_after_a_restart(
    folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    place, prompts = tmp_path / "blocks", turns(3, 8)
    llm, first = small(folders[family], place), []
    for prompt in prompts:
        first += ask(llm, [prompt])
        settle(llm)  # what host memory gives away before it is written is computed anew
    again = ask(llm, prompts)
    assert tokens(again) == tokens(first)
    block = max(group.page_size for group in llm.built.groups)
    whole = (len(prompts[0]) - 1) // block * block
    assert [found for _, found in again] == [whole] * len(prompts)
    assert disk_of(llm).counts.fetched > 0
    settle(llm)
    store_of(llm).close()
    another = small(folders[family], place)
    assert ask(another, prompts) == again
    assert disk_of(another).counts.fetched > 0 and not disk_of(another).counts.stored
    load = TokenEngine(another).load().disk
    assert load is not None and load.used == len(files(place)) <= load.blocks


@BOTH
def test_what_a_file_brought_counts_as_the_disk_s_once_and_as_host_memory_s_after(
    folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    place, prompts = tmp_path / "blocks", [[*turn, 7] for turn in turns(3, 2)]
    llm = small(folders[family], place)
    ask(llm, prompts)
    settle(llm)
    store_of(llm).close()
    another = small(folders[family], place)
    filed = another.generate([prompts[0]], GREEDY)[0].metrics
    assert filed.cached_disk_tokens == filed.cached_tokens > 0 == filed.cached_host_tokens
    on_device = another.generate([prompts[0]], GREEDY)[0].metrics
    assert on_device.cached_tokens == filed.cached_tokens
    assert on_device.cached_disk_tokens == on_device.cached_host_tokens == 0
    reservations = another._session.scheduler.copies[0].roster.reservations
    for group, pool in enumerate(reservations.pools):
        assert reservations.prefix is not None
        reservations.prefix.make_room(group, pool.total)
    in_memory = another.generate([prompts[0]], GREEDY)[0].metrics
    assert in_memory.cached_host_tokens == filed.cached_tokens
    assert in_memory.cached_disk_tokens == 0


def test_another_model_precision_or_salt_finds_nothing(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    place, prompts = tmp_path / "blocks", turns(4, 2)
    llm = small(folders["t32"], place)
    ask(llm, prompts)
    salted = llm.generate([prompts[0]], GREEDY, cache_salt="another")[0]
    assert salted.metrics.cached_tokens == 0
    settle(llm)
    store_of(llm).close()
    count = len(files(place))
    other = small(folders["t32"], place, dtype="float32")
    assert count and not files(place)  # nobody can use them, and the folder is bounded
    assert [found for _, found in ask(other, prompts)] == [0, 0]


def harmed(raw: bytes, harm: str) -> bytes | None:
    """What a file holds afterwards; None: there is none."""
    if harm == "flip":
        at = len(raw) * 2 // 3
        return raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :]
    return {"cut": raw[:-1], "empty": b"", "longer": raw + b"0", "remove": None}[harm]


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "longer", "remove", "swap", "header"])
def test_a_store_knows_a_harmed_file(tmp_path: Path, harm: str) -> None:
    memory = bytearray(random.Random(2).randbytes(2 * 512))
    slots = [memoryview(memory)[at : at + 512] for at in (0, 512)]
    store = FileStore(tmp_path / "blocks", b"one", 512)
    filed = [Filed(bytes([n]) * 16, NO_KEY, True) for n in range(2)]
    blocks = tuple(BlockCopy(n, 0, (), one) for n, one in enumerate(filed))
    store.start(Transfer(1, Way.DOWN, blocks), slots.__getitem__)
    store.ended(wait=True)
    path, other = store._path(filed[0].key), store._path(filed[1].key)
    raw = path.read_bytes()
    if harm == "swap":
        path.write_bytes(other.read_bytes())
    elif harm == "header":
        path.write_bytes(raw[:40] + bytes([raw[40] ^ 1]) + raw[41:])  # whether it has the latest
    elif (after := harmed(raw, harm)) is None:
        path.unlink()
    else:
        path.write_bytes(after)
    found = store.scan()
    store.start(Transfer(2, Way.UP, blocks[:1]), slots.__getitem__)
    assert [r.damaged for r in store.ended(wait=True)] == [frozenset({0})]
    assert filed[1] in found and not path.exists()


def test_files_are_bounded_and_the_oldest_go(folders: dict[str, Path], tmp_path: Path) -> None:
    place = tmp_path / "blocks"
    size = (small(folders["t32"], tmp_path / "else").executor.mover.slot(0).numel() + 128) / 1e9
    llm = small(folders["t32"], place, disk_cache_gb=30.5 * size)
    prompts = turns(6, 5)
    ask(llm, prompts)
    settle(llm)
    llm._session.close([])
    assert disk_of(llm).index.blocks == 30 and disk_of(llm).counts.evicted > 0
    assert ask(llm, prompts[-1:])[0][1] > 0
    settle(llm)
    llm._session.close([])
    store_of(llm).close()
    assert 20 < len(files(place)) <= 30
    fewer = small(folders["t32"], place, disk_cache_gb=10.5 * size)
    assert len(disk_of(fewer).index) == 10


def test_the_folder_is_closed_to_others_and_has_one_engine(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    place = tmp_path / "new" / "blocks"
    llm = small(folders["t32"], place)
    ask(llm, turns(7, 1))
    settle(llm)
    assert place.stat().st_mode & 0o777 == 0o700
    assert files(place) and {path.stat().st_mode & 0o777 for path in place.iterdir()} == {0o600}
    with pytest.raises(ConfigError, match="another engine has"):
        small(folders["t32"], place)
    place.chmod(0o750)
    store_of(llm).close()
    with pytest.raises(ConfigError, match="chmod 700"):
        small(folders["t32"], place)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_every_folder_that_is_made_is_closed_to_others(tmp_path: Path, umask: int) -> None:
    tmp_path.chmod(0o755)
    former = os.umask(umask)
    try:
        make_private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(former)
    made = [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"]
    assert [one.stat().st_mode & 0o777 for one in made] == [0o700] * 3
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="must be yours"):
        make_private(tmp_path)


def test_nobody_waits_for_a_file_to_be_written(folders: dict[str, Path], tmp_path: Path) -> None:
    llm, go = small(folders["t32"], tmp_path / "blocks"), threading.Event()
    stuck = store_of(llm)._thread.submit(go.wait)
    first = ask(llm, turns(9, 6))
    assert disk_of(llm)._writes and not files(tmp_path / "blocks")
    go.set()
    stuck.result()
    settle(llm)
    assert files(tmp_path / "blocks") and len(first) == 6


def test_others_go_on_while_one_waits_for_files(folders: dict[str, Path], tmp_path: Path) -> None:
    llm, go = small(folders["t32"], tmp_path / "blocks"), threading.Event()
    prompt, *rest, other = turns(10, 8)
    first = ask(llm, [prompt])
    ask(llm, rest)
    settle(llm)
    stuck = store_of(llm)._thread.submit(go.wait)
    session = llm._session
    waiting, going = (
        session.add(llm._request(one, GREEDY, ""), TextStream(lambda ids: ""))
        for one in (prompt, other)
    )
    while not session.ended(going) and going.request.finish is None:
        session.step()
    assert not stuck.done() and waiting.request.lifted
    assert waiting.request.state is RequestState.WAITING
    go.set()
    while waiting.request.finish is None:
        session.step()
    session.close([])
    assert tuple(waiting.request.output) == first[0][0]
    assert waiting.request.stats.cached_tokens == 76


def test_a_flush_removes_the_files(folders: dict[str, Path], tmp_path: Path) -> None:
    place, prompts = tmp_path / "blocks", turns(11, 3)
    llm = small(folders["t32"], place)
    first = ask(llm, prompts)
    settle(llm)
    assert files(place)
    TokenEngine(llm).flush_prefixes()
    again = ask(llm, prompts)
    assert [found for _, found in again] == [0, 0, 0] and tokens(again) == tokens(first)


def run_schedules(folder: Path, place: Path, count: int, run_ahead: int) -> int:
    cold = engine(folder, prefix_cache=False, max_batch=1, prefill_batch=1, context_len=CONTEXT)
    llm = small(folder, place)
    for number in range(count):
        schedule = TierSchedule(llm, random.Random(900 + 10 * number + run_ahead))
        schedule.run()
        schedule.check(cold)
    moves = llm._session.scheduler.copies[0].roster.reservations.moves
    assert moves is not None
    moves.check()
    return disk_of(llm).counts.stored


@pytest.mark.slow
@BOTH
def test_answers_with_files_are_those_of_cold_engines(
    folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    assert run_schedules(folders[family], tmp_path / "blocks", 2, 1)


@pytest.mark.exhaustive
@BOTH
def test_answers_with_files_under_many_schedules(
    folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    assert run_schedules(folders[family], tmp_path / "blocks", 40, 2)


def test_a_store_gives_back_what_it_took_and_to_its_own_kind_alone(tmp_path: Path) -> None:
    memory = bytearray(random.Random(1).randbytes(3 * 512))
    slots = [memoryview(memory)[at : at + 512] for at in (0, 512, 1024)]
    store = FileStore(tmp_path / "blocks", b"one", 512)
    filed = [
        Filed(bytes([n]) * 16, NO_KEY if n == 0 else bytes([n - 1]) * 16, n > 0) for n in (0, 1)
    ]
    blocks = tuple(BlockCopy(n, 0, (), one) for n, one in enumerate(filed))
    store.start(Transfer(1, Way.DOWN, blocks), slots.__getitem__)
    assert [r.damaged for r in store.ended(wait=True)] == [frozenset()]
    back = tuple(BlockCopy(2, 0, (), one) for one in filed)
    for nth, copy in enumerate(back):
        store.start(Transfer(2, Way.UP, (copy,)), slots.__getitem__)
        assert [r.damaged for r in store.ended(wait=True)] == [frozenset()]
        assert slots[2] == slots[nth]
    assert sorted(store.scan(), key=lambda one: one.key) == filed
    store.close()
    assert FileStore(tmp_path / "blocks", b"another", 512).scan() == []


def test_what_is_being_written_is_there_when_the_folder_is_read(tmp_path: Path) -> None:
    """An error in a round reads it anew, while files come and go."""
    store, slot, go = FileStore(tmp_path, b"one", 512), memoryview(bytes(512)), threading.Event()
    old, new = (Filed(bytes([n]) * 16, NO_KEY, True) for n in (1, 2))
    store.start(Transfer(1, Way.DOWN, (BlockCopy(0, 0, (), old),)), lambda _: slot)
    assert store.scan() == [old]
    store._thread.submit(go.wait)
    down = Transfer(2, Way.DOWN, (BlockCopy(0, 0, (), new),), gone=(old.key,))
    store.start(down, lambda _: slot)
    found = list[list[Filed]]()
    reader = threading.Thread(target=lambda: found.append(store.scan()))
    reader.start()
    reader.join(0.1)
    go.set()
    reader.join()
    assert found == [[new]]
    store.close()


def test_a_store_that_is_dropped_while_it_writes_leaves_the_folder_to_others(
    tmp_path: Path,
) -> None:
    """The thread is then the last that has it."""
    store, go = FileStore(tmp_path / "blocks", b"one", 512), threading.Event()

    def slot(number: int) -> memoryview:
        assert go.wait(PATIENCE) and number == 0
        return memoryview(bytes(512))

    filed = Filed(b"k" * 16, NO_KEY, True)
    store.start(Transfer(1, Way.DOWN, (BlockCopy(0, 0, (), filed),)), slot)
    gone = weakref.ref(store)
    del store
    assert gone() is not None
    go.set()

    def another() -> FileStore | None:
        with suppress(ConfigError):
            return FileStore(tmp_path / "blocks", b"one", 512)
        return None

    found = wait_for("an end of the first", another)
    assert found.scan() == [filed]
    found.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disk_cache_gb": 1}, "below host memory"),
        ({"disk_cache_gb": -1, "host_cache_gb": 1}, "disk_cache_gb: must be 0"),
        ({"disk_cache_dir": "there", "host_cache_gb": 1}, "disk_cache_dir: is for blocks in files"),
        ({"disk_cache_gb": 1, "host_cache_gb": 1, "load_format": "dummy"}, "dummy weights"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="demo", **options)


@pytest.mark.parametrize(("ranks", "left"), [(1, "rank-0, rank-1, rank-2"), (2, "rank-2"), (3, "")])
def test_folders_of_ranks_that_are_no_more_are_named_and_stay(
    tmp_path: Path, ranks: int, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in range(3):
        (tmp_path / f"rank-{rank}").mkdir()
    with caplog.at_level(logging.WARNING, "freewheel.cache"):
        tell_of_ranks_no_more(tmp_path / "none", ranks)
        tell_of_ranks_no_more(tmp_path, ranks)
    said = [record.getMessage() for record in caplog.records]
    assert [f"{tmp_path} has {left} from" in one for one in said] == ([True] if left else [])
    assert len(list(tmp_path.iterdir())) == 3
