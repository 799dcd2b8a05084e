# SPDX-License-Identifier: Apache-2.0
"""Host memory behind several ranks: answers from there are the answers of one process without."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.config import keep_to_loopback
from freewheel.engine import TokenEngine
from freewheel.errors import ConfigError, RankError
from freewheel.host import Request
from freewheel.memory import pages_wanted
from freewheel.runtime.convoy import Convoy
from freewheel.runtime.parallel import crew as crew_module
from freewheel.runtime.parallel.crew import Crew, LocalCrew, assemble, dismiss
from freewheel.runtime.parallel.group import meeting_place
from freewheel.spec import Transfer, Way
from tests.fixtures import closed_form, compressed
from tests.program.test_schedules import CONTEXT
from tests.program.whitebox import engine, watch_requests

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONGER = SamplingParams(temperature=0.9, seed=7, max_tokens=20, ignore_eos=True)
TP: dict[str, Any] = {"tp": 2, "check_ranks": True}
DP: dict[str, Any] = {"dp": 2, "ep": True}


@pytest.fixture(scope="module", autouse=True)
def crew() -> object:
    dismiss()  # another file's, of another mesh
    yield
    dismiss()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {"t32": closed_form.write_t32(root / "t32"), "t4": compressed.write_t4(root / "t4")}


def gather(mesh: dict[str, Any]) -> None:
    """Ranks of another mesh part; those of this one stay for the next test."""
    shape = (mesh.get("tp", 1), mesh.get("dp", 1))
    if any(crew.shape != shape for crew in crew_module._CREWS):
        dismiss()


def turns(count: int, length: int) -> list[list[int]]:
    rng = random.Random(3)
    return [rng.choices(range(256), k=length) for _ in range(count)]


def alone(folder: Path, depth: int) -> LLM:
    return engine(folder, speculate=depth, prefix_cache=False, context_len=CONTEXT)


def small(one: LLM, mesh: dict[str, Any], **more: Any) -> LLM:
    """As `one`, on several ranks. Each copy has pages for little more than one full context."""
    own: dict[str, Any] = {"context_len": CONTEXT, "speculate": one.config.speculate}
    own |= {"run_ahead": 3, "guard": True, "host_cache_gb": 0.01}
    config = replace(one.config, run_ahead=3)
    budget = 1
    for group in one.built.groups:
        size = pages_wanted(config, group, CONTEXT) * group.page_bytes
        budget += size if group.retention is not None else int(0.3 * size)
    return engine(Path(one.config.model), **(own | mesh | more), cache_bytes=budget)


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    return [one.token_ids for one in llm.generate(prompts, params)]


def conserves(llm: LLM) -> None:
    for copy in llm._session.scheduler.copies:
        copy.roster.reservations.check()
    load = TokenEngine(llm).load()
    for pool in (load.rows, *load.pages):
        assert pool.free + pool.cached + pool.owned + pool.quarantined == pool.total


@pytest.mark.parametrize(
    ("family", "depth", "mesh"),
    [("t32", 0, TP), ("t4", 3, TP), ("t32", 3, DP), ("t4", 0, DP)],
    ids=["t32-0-tp", "t4-3-tp", "t32-3-dp", "t4-0-dp"],
)
def test_answers_through_host_memory_are_those_of_one_process_without(
    folders: dict[str, Path], family: str, depth: int, mesh: dict[str, Any]
) -> None:
    """Side by side, so that rows are preempted; again, when the device has let the prompts go."""
    gather(mesh)
    prompts, one = turns(4 if mesh is TP else 6, 40), alone(folders[family], depth)
    wanted = tokens(one, prompts, LONGER)
    llm = small(one, mesh)
    seen: list[Request] = watch_requests(llm)
    assert tokens(llm, prompts, LONGER) == wanted
    assert tokens(llm, prompts, LONGER) == wanted
    tiers = TokenEngine(llm).load().tiers
    assert tiers is not None and tiers.stored and tiers.fetched and not tiers.damaged
    assert tiers.bytes_in >= tiers.fetched * llm.executor.mover.slot_bytes
    assert sum(request.stats.preemptions for request in seen)
    assert llm.executor.host_reads() == [0, 0]
    counters = llm.executor.counters
    assert counters.uploads == counters.downloads == counters.rounds
    conserves(llm)


def test_what_one_rank_alone_finds_damaged_is_computed_anew_on_all(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dismiss()
    prompts, one = turns(4, CONTEXT - 16), alone(folders["t32"], 3)
    wanted = tokens(one, prompts, GREEDY)
    store = str(tmp_path / "store")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.parallel.faulty_rank", store]
    rank = subprocess.Popen(command, env=environment, cwd=ROOT)
    try:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
        keep_to_loopback()
        crew = Crew("cpu", 2)
        crew.meet(meeting_place(store, 2))
        crew_module._enlist(crew)
        llm = small(one, TP)
        for _ in range(3):
            assert tokens(llm, prompts, GREEDY) == wanted
        tiers = TokenEngine(llm).load().tiers
        assert tiers is not None and tiers.damaged and tiers.fetched
        assert llm.executor.host_reads() == [0, 0]
        conserves(llm)
        dismiss()
        assert rank.wait() == 0
    finally:
        rank.kill()
        rank.wait()


def test_a_rank_lost_in_the_middle_of_a_copy_ends_the_engine_and_another_starts_anew(
    folders: dict[str, Path],
) -> None:
    """It stands still before it hears of the copy, so that none can end; then it is killed."""
    gather(TP)
    prompts, one = turns(3, CONTEXT - 16), alone(folders["t32"], 3)
    llm = small(one, TP)
    wanted = [tokens(llm, [prompt], GREEDY)[0] for prompt in prompts]
    crew, carrier = assemble("cpu", 2), llm.executor.carrier
    assert isinstance(crew, LocalCrew) and isinstance(carrier, Convoy)
    pid, start = crew.pids[1], carrier.start
    killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))

    def started(transfer: Transfer) -> None:
        if transfer.way is Way.IN and not killer.is_alive():
            os.kill(pid, signal.SIGSTOP)
            killer.start()
        start(transfer)

    carrier.start = started  # type: ignore[method-assign]
    with pytest.raises(RankError):
        tokens(llm, prompts[:1], GREEDY)
    killer.join()
    with pytest.raises(RankError):
        tokens(llm, prompts[:1], GREEDY)
    while not crew.why_now():
        time.sleep(0.05)
    again = small(one, TP)
    assert tokens(again, prompts, GREEDY) == wanted


def settle(llm: LLM) -> None:
    """All that was begun is written on every rank, and known to be."""
    for copy in llm._session.scheduler.copies:
        moves = copy.roster.reservations.moves
        assert moves is not None and moves.disk is not None
        while moves.disk._writes or moves.disk._fresh:
            llm._session._move(fresh=False, wait=True)


def files(place: Path, rank: int) -> list[Path]:
    return sorted((place / f"rank-{rank}").glob("*.block"))


def let_go(llm: LLM) -> None:
    store = llm.executor.mover.files
    assert store is not None
    store.close()


@pytest.mark.parametrize(("family", "mesh"), [("t32", TP), ("t4", DP)], ids=["t32-tp", "t4-dp"])
def test_blocks_in_every_rank_s_files_come_back_after_a_restart(
    folders: dict[str, Path], tmp_path: Path, family: str, mesh: dict[str, Any]
) -> None:
    """Host memory has room for a few blocks alone. What one rank has lost is lost to its copy."""
    gather(mesh)
    prompts, one = turns(6, CONTEXT - 16), alone(folders[family], 3)
    wanted = tokens(one, prompts, GREEDY)
    own: dict[str, Any] = {"disk_cache_gb": 0.05, "disk_cache_dir": str(tmp_path / "blocks")}
    own["host_cache_gb"] = {"t32": 0.0002, "t4": 0.001}[family]
    llm = small(one, mesh, **own)
    assert tokens(llm, prompts, GREEDY) == wanted
    settle(llm)
    llm.close()
    written = [files(tmp_path / "blocks", rank) for rank in range(2)]
    assert all(written)
    if mesh is TP:  # they hold the same, under names of their own
        assert len(written[0]) == len(written[1]) and written[0][0].name != written[1][0].name
    another = small(one, mesh, **own)
    assert tokens(another, prompts, GREEDY) == wanted
    load = TokenEngine(another).load()
    assert load.disk is not None and load.disk.fetched and not load.disk.damaged
    assert load.tiers is not None and not load.tiers.damaged
    assert another.executor.host_reads() == [0, 0]
    conserves(another)
    another.close()


def test_the_folder_of_several_ranks_is_as_closed_as_that_of_one(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    gather(TP)
    one, place = alone(folders["t32"], 3), tmp_path / "new" / "blocks"
    own = {"disk_cache_gb": 0.05, "host_cache_gb": 0.0005, "disk_cache_dir": str(place)}
    small(one, TP, **own).close()
    made = [place.parent, place, place / "rank-0", place / "rank-1"]
    assert [folder.stat().st_mode & 0o777 for folder in made] == [0o700] * 4
    place.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        small(one, TP, **own)
    dismiss()
    place.chmod(0o700)
    small(one, {}, **own).close()  # what ranks made, one process may use


def test_files_that_one_rank_lost_or_finds_damaged_are_computed_anew(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    gather(TP)
    prompts, one = turns(3, CONTEXT - 16), alone(folders["t32"], 3)
    wanted = tokens(one, prompts, GREEDY)
    place, own = tmp_path / "blocks", {"disk_cache_gb": 0.05, "host_cache_gb": 0.0005}
    llm = small(one, TP, **own, disk_cache_dir=str(place))
    assert tokens(llm, prompts, GREEDY) == wanted
    settle(llm)
    let_go(llm)
    lost, *rest = files(place, 1)
    lost.unlink()
    for path in rest[::3]:
        raw = path.read_bytes()
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 4]))
    another = small(one, TP, **own, disk_cache_dir=str(place))
    load = TokenEngine(another).load()
    assert load.disk is not None and load.disk.used == len(rest)
    assert tokens(another, prompts, GREEDY) == wanted
    load = TokenEngine(another).load()
    assert load.disk is not None and load.disk.damaged
    settle(another)
    conserves(another)
    let_go(another)


def test_one_process_has_the_folder_that_ranks_had_and_they_have_it_again(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Also where the ranks made it. Each finds what is its own."""
    gather(TP)
    prompts, one = turns(2, CONTEXT - 16), alone(folders["t32"], 0)
    wanted = tokens(one, prompts, GREEDY)
    place = tmp_path / "new" / "blocks"
    own: dict[str, Any] = {"disk_cache_gb": 0.05, "disk_cache_dir": str(place)}
    for turn, mesh in enumerate((TP, {}, TP, {})):
        llm = small(one, mesh, **own)
        load = TokenEngine(llm).load()
        assert load.disk is not None and bool(load.disk.used) == (turn > 1)
        assert tokens(llm, prompts, GREEDY) == wanted
        settle(llm)
        llm.close()
        assert place.stat().st_mode & 0o077 == 0
